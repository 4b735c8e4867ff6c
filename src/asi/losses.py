"""The terms of the objective: pure functions of tensors, each with its equation.

Two kinds: `generation` is a mean over pairs and can be computed in parts; the others compare every query or document
with every other of the batch, and need only the heads' outputs and the vectors of the whole batch.
Letters: B batch, D width, m docid length, V codes per position.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EXCLUDED = -1e9  # the logit of a pair that is neither positive nor negative: a softmax gives it exactly zero


def straight_through(probabilities: Tensor, gradient: float = 1.0) -> Tensor:
    """One-hot of the argmax on the way forward, `gradient` times the gradient of `probabilities` on the way back."""
    hard = F.one_hot(probabilities.argmax(-1), probabilities.size(-1)).type_as(probabilities)
    if gradient == 0:
        return hard
    return hard + gradient * (probabilities - probabilities.detach())


def generation(log_probs: Tensor, docid: Tensor) -> Tensor:
    """L_s: negative log-likelihood (B,) of the docids, one-hot (B, m, V) so that the heads can get a gradient."""
    return -(docid * log_probs).sum(dim=(1, 2))


class CodeOverlap(NamedTuple):
    """Products of the code distributions of queries and documents: computed once, because they are a step's cost."""

    positions: list[Tensor]  # m of (Bq, Bd): the probability that both draw the same code there
    queries: Tensor  # (Bq,) squared lengths over all positions
    documents: Tensor  # (Bd,)

    @classmethod
    def of(cls, queries: Tensor, documents: Tensor) -> "CodeOverlap":
        """From distributions (B, m, V)."""
        positions = [q @ d.T for q, d in zip(queries.unbind(1), documents.unbind(1), strict=True)]
        return cls(positions, queries.square().sum((1, 2)), documents.square().sum((1, 2)))


def expected_distance(overlap: CodeOverlap) -> Tensor:
    """tau of every query with every document (Bq, Bd): squared distance of their code distributions."""
    return overlap.queries[:, None] + overlap.documents[None, :] - 2 * torch.stack(overlap.positions).sum(0)


def discrete_contrastive(overlap: CodeOverlap, negatives: Tensor, margin: float) -> Tensor:
    """L_c: hinge on tau(q, d) - tau(q, d-) + margin, summed over negatives (B, B) as printed, mean over queries."""
    tau = expected_distance(overlap)
    return (F.relu(tau.diagonal()[:, None] - tau + margin) * negatives).sum(1).mean()


def reverse_cross_entropy(log_probs: Tensor, different: Tensor) -> Tensor:
    """L_r: minus the mean, over pairs of different documents, of the largest cross-entropy among the positions.

    Labels are the detached docids of the other document. Capped at log V, where a distribution is as far from the
    label as a uniform one: as printed the loss has no lower bound.
    """
    V = log_probs.size(-1)
    codes = log_probs.detach().argmax(-1)  # (B, m)
    farthest = -log_probs[:, 0, codes[:, 0]]  # (B, B)
    for i in range(1, log_probs.size(1)):
        farthest = torch.maximum(farthest, -log_probs[:, i, codes[:, i]])
    capped = farthest.clamp(max=math.log(V))
    return -(capped * different).sum() / different.sum().clamp(min=1)


def in_batch_softmax(scores: Tensor, negatives: Tensor) -> Tensor:
    """Cross-entropy of each query's own document (the diagonal) against the negatives, of which there may be more."""
    allowed = negatives | torch.eye(*scores.shape, dtype=torch.bool, device=scores.device)
    return F.cross_entropy(scores.masked_fill(~allowed, EXCLUDED), torch.arange(len(scores), device=scores.device))


def vector_softmax(queries: Tensor, documents: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """InfoNCE on the cosine of the vectors (B, D) that rank the candidates."""
    scores = F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).T
    return in_batch_softmax(scores / temperature, negatives)


def expected_match(overlap: CodeOverlap, negatives: Tensor) -> Tensor:
    """InfoNCE on the log-probability that query and document draw the same docid from their distributions."""
    scores = torch.stack([torch.log(position + 1e-6) for position in overlap.positions]).sum(0)
    return in_batch_softmax(scores, negatives)


def one_pass_match(query_log_probs: Tensor, docids: Tensor, negatives: Tensor) -> Tensor:
    """InfoNCE on the one-pass score: the log-probability (B, m, V) of each document's docid, straight-through one-hots.

    What one-pass search ranks by, so that heads and docids are trained for the rounding that search does.
    """
    return in_batch_softmax(query_log_probs.flatten(1) @ docids.flatten(1).T, negatives)


class Opponents(NamedTuple):
    """For each of n queries its own document, and then those documents of the batch that it takes for similar."""

    rows: Tensor  # (n, k)
    allowed: Tensor  # (n, k): false where a query has fewer negatives


@torch.no_grad()
def nearest_negatives(scores: Tensor, own: Tensor, negatives: Tensor, count: int) -> Opponents:
    """The `count` negatives (n, B) with the highest scores (n, B), behind each query's own document (n,)."""
    found = scores.masked_fill(~negatives, -torch.inf).topk(min(count, scores.size(1)))
    rows = torch.cat([own[:, None], found.indices], dim=1)
    return Opponents(rows, torch.cat([torch.ones_like(own, dtype=torch.bool)[:, None], found.values.isfinite()], dim=1))


def token_match(queries: Tensor, documents: Tensor) -> Tensor:
    """Match (n, k) of each query's tokens (n, T, d) with its documents' (n, k, T, d).

    Each query token's product with the document's nearest, summed.
    """
    products = queries @ documents.flatten(1, 2).mT  # (n, Tq, k Td)
    return products.unflatten(2, documents.shape[1:3]).max(3).values.sum(1)


def token_softmax(queries: Tensor, documents: Tensor, opponents: Opponents, temperature: float) -> Tensor:
    """Cross-entropy of each query's own document, by the match of tokens, against those that vectors take for similar.

    Among such documents tokens have to choose in search. Query tokens (n, T, d), document tokens (B, T, d).
    """
    rows, allowed = opponents
    chosen = documents.index_select(0, rows.flatten()).unflatten(0, rows.shape)  # (n, k, T, d)
    scores = (token_match(queries, chosen) / temperature).masked_fill(~allowed, EXCLUDED)
    return F.cross_entropy(scores, torch.zeros(len(rows), dtype=torch.long, device=rows.device))


def code_balance(documents: Tensor) -> Tensor:
    """How far each position's use of its codes (B, m, V) is from even: log V minus the entropy of the batch's mean."""
    use = documents.mean(0)  # (m, V)
    entropy = -torch.special.xlogy(use, use).sum(-1)
    return (math.log(documents.size(-1)) - entropy).mean()
