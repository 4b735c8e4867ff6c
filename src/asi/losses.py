"""The terms of the objective: pure functions of tensors, each with its equation.

Two kinds: `generation` is a mean over pairs and can be computed in parts; the others compare every query or document
with every other of the batch, and need only the heads' outputs and the vectors of the whole batch.
Letters: B batch, D width, m docid length, V codes per position.
"""

import math

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


def expected_distance(queries: Tensor, documents: Tensor) -> Tensor:
    """tau of every query with every document (Bq, Bd): squared distance of their code distributions (B, m, V)."""
    q, d = queries.flatten(1), documents.flatten(1)
    return q.square().sum(1)[:, None] + d.square().sum(1)[None, :] - 2 * q @ d.T


def discrete_contrastive(queries: Tensor, documents: Tensor, negatives: Tensor, margin: float) -> Tensor:
    """L_c: hinge on tau(q, d) - tau(q, d-) + margin, summed over negatives (B, B) as printed, mean over queries."""
    tau = expected_distance(queries, documents)
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


def expected_match(queries: Tensor, documents: Tensor, negatives: Tensor) -> Tensor:
    """InfoNCE on the log-probability that query and document draw the same docid from their distributions (B, m, V)."""
    scores = torch.zeros(len(queries), len(documents), device=queries.device, dtype=queries.dtype)
    for i in range(queries.size(1)):
        scores = scores + torch.log(queries[:, i] @ documents[:, i].T + 1e-6)
    return in_batch_softmax(scores, negatives)


def one_pass_match(query_log_probs: Tensor, docids: Tensor, negatives: Tensor) -> Tensor:
    """InfoNCE on the one-pass score: the log-probability (B, m, V) of each document's docid, straight-through one-hots.

    What one-pass search ranks by, so that heads and docids are trained for the rounding that search does.
    """
    return in_batch_softmax(query_log_probs.flatten(1) @ docids.flatten(1).T, negatives)


def token_match(queries: Tensor, documents: Tensor) -> Tensor:
    """Match (Bq, Bd) of token vectors (B, T, d): each query token's product with the document's nearest, summed."""
    products = queries.flatten(0, 1) @ documents.flatten(0, 1).T  # (Bq Tq, Bd Td)
    return products.view(*queries.shape[:2], *documents.shape[:2]).amax(3).sum(1)


def token_softmax(queries: Tensor, documents: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """InfoNCE on the matches of tokens that rank the candidates."""
    return in_batch_softmax(token_match(queries, documents) / temperature, negatives)


def code_balance(documents: Tensor) -> Tensor:
    """How far each position's use of its codes (B, m, V) is from even: log V minus the entropy of the batch's mean."""
    use = documents.mean(0)  # (m, V)
    entropy = -torch.special.xlogy(use, use).sum(-1)
    return (math.log(documents.size(-1)) - entropy).mean()
