"""ASI's objective: L = L_s + gamma_c L_c + gamma_r L_r and our further terms, with the schedule of the docids.

A run begins with the ranking vectors alone; then the heads start as a quantiser of them (train.start_heads). From there
the docids are shaped by the losses on the heads; then the gradient of L_s is let into the heads
through the straight-through docids (it pulls every document to the docid that the decoder already likes, so not
before the heads can resist); at the end the docids are frozen and only the decoder learns. Vectors go on getting better
in a long run, docids and decoder learn the pairs by heart: these have some rounds through the pairs and no more.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asi import losses
from asi.batches import DOCUMENT, QUERY, Batch, TrainingPairs
from asi.config import Config, TrainConfig
from asi.features import Features, docids_of, encode, on_device
from asi.losses import straight_through
from asi.matching import document_tokens, query_tokens
from asi.metrics import DocidHealth, docid_health
from asi.model import Asi, Encoded
from asi.quantiser import SAMPLE, fit_quantiser
from asi.training import ParameterGroup, residual_group

TEXTS_AT_ONCE = 256
LEAST_STEPS = 100  # that heads and decoder have, however few the pairs are, but
LEAST_OF_A_ROUND = 32  # times their rounds, where these are few
TRAINED_TOKENS = 16  # of a query, that are matched in training: fewer than in search, because this is a step's cost


class Representations(NamedTuple):
    """What the losses over the whole batch need of it."""

    query_logits: Tensor  # (B, m, V)
    document_logits: Tensor  # (B, m, V)
    query_vectors: Tensor  # (B, D)
    document_vectors: Tensor  # (B, D)
    query_tokens: Tensor  # (B, T, d); 0 for queries whose tokens are not matched in this step
    document_tokens: Tensor  # (B, T, d)


class Phase(NamedTuple):
    """Where in the schedule a step is."""

    straight_through: float  # weight of L_s's gradient into the heads
    joint: bool  # L_s has a gradient into more than the decoder
    frozen: bool  # docids are final; only the decoder learns
    rewritten: bool = False  # the heads have just been started


class DocidSteps(NamedTuple):
    """The steps of a run in which docids learn."""

    learning: int  # of every
    among: int  # steps, evenly spread
    frozen_from: float  # share of the run

    def learn_in(self, step: int) -> bool:
        return (step + 1) * self.learning // self.among > step * self.learning // self.among


def docid_steps(train: TrainConfig, steps: int, steps_per_round: int) -> DocidSteps:
    """As the settings have it, but with no more rounds through the pairs than they allow.

    >>> short = docid_steps(TrainConfig(), 2000, steps_per_round=8)
    >>> short, [step for step in range(8) if short.learn_in(step)]
    (DocidSteps(learning=1, among=4, frozen_from=0.9), [3, 7])
    >>> docid_steps(TrainConfig(), 8000, steps_per_round=8)
    DocidSteps(learning=384, among=5344, frozen_from=0.968)
    """

    def most(rounds: float) -> int:
        least = min(rounds * LEAST_OF_A_ROUND, LEAST_STEPS)
        return round(max(rounds * steps_per_round, least)) if rounds else steps

    frozen_from = max(train.freeze_docids, 1 - most(train.decoder_rounds) / steps)
    before = round((frozen_from - train.start_heads) * steps)
    if before <= most(train.docid_rounds) * train.docid_every:
        return DocidSteps(1, train.docid_every, frozen_from)
    return DocidSteps(most(train.docid_rounds), before, frozen_from)


def partly_detached(x: Tensor, share: float) -> Tensor:
    """x with `share` of its gradient."""
    if share in (0, 1):
        return x if share else x.detach()
    return share * x + (1 - share) * x.detach()


def some(text: Encoded, rows: Tensor) -> Encoded:
    """The encoding of those texts of a batch for which `rows` (B,) is true."""
    return Encoded(*(part[rows] for part in text))


def feature_dropout(vectors: Tensor, rows: NDArray[np.int64], kind: int, step: int, share: float) -> Tensor:
    """Dropout that depends on the text and the step alone: neither chunks, processes nor resuming change it.

    A query and a document with the same row lose different features: else these would tell which belong together.
    """
    D = vectors.size(1)
    mixed = torch.from_numpy(rows)[:, None] * D + torch.arange(D) + (2 * step + kind) * 0x9E3779B1  # (B, D)
    for factor in (0x7FEB352D, 0x846CA68B):  # an integer hash: 32 well-mixed bits for each component
        mixed = mixed & 0xFFFFFFFF
        mixed = (mixed ^ (mixed >> 16)) * factor
    kept = (mixed & 0xFFFFFFFF) >> 8 >= share * 2**24
    return vectors * kept.to(vectors.device) / (1 - share)


class AsiObjective:
    """Knows the model and the training texts; `training.fit` knows neither."""

    def __init__(
        self, model: Asi, queries: Features, documents: Features, pairs: TrainingPairs, config: Config
    ) -> None:
        self.model = model
        self.queries = queries
        self.documents = documents
        self.pairs = pairs
        self.config = config
        self.docid_steps = DocidSteps(1, config.train.docid_every, config.train.freeze_docids)
        self.codes: Tensor | None = None  # (documents, m), once the docids are frozen
        self.vectors_alone = False  # in this part of the run
        self.start_heads_at = config.train.start_heads  # share of the run
        if config.model.docids == "random":
            self.freeze()

    def plan(self, steps: int) -> bool:
        before = self.docid_steps
        self.docid_steps = docid_steps(self.config.train, steps, self.pairs.steps_per_epoch)
        self.start_heads_at = min(self.config.train.start_heads, (steps - 1) / steps)  # in a run of few steps too
        return self.docid_steps != before

    def enter(self, progress: float) -> Phase:
        """Begin the part of the schedule at `progress`, the share of the run that is over."""
        train, loss = self.config.train, self.config.loss
        self.vectors_alone = loss.vector > 0 and progress < self.start_heads_at
        rewritten = bool(train.start_heads) and not self.vectors_alone and self.model.heads.untouched
        if rewritten:
            self.start_heads()
        if progress >= self.docid_steps.frozen_from:
            return Phase(0.0, joint=False, frozen=True)
        if progress < train.straight_through_start:
            return Phase(0.0, joint=False, frozen=False, rewritten=rewritten)
        ramp = train.straight_through_full - train.straight_through_start
        share = min(1.0, (progress - train.straight_through_start) / ramp) if ramp else 1.0
        weight = share * loss.straight_through_weight if loss.straight_through else 0.0
        return Phase(weight, joint=True, frozen=False, rewritten=rewritten)

    def course(self, step: int, steps: int) -> tuple[int, int]:
        return step, steps

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        train = self.config.train
        trained = [p for p in self.model.encoder.parameters() if p.requires_grad]
        groups = {
            "decoder": ParameterGroup(list(self.model.decoder.parameters()), train.lr),
            "heads": ParameterGroup(list(self.model.heads.parameters()), train.lr),
            "encoder": ParameterGroup(trained, train.encoder_lr),
        }
        if self.model.matcher is not None:
            groups["matcher"] = ParameterGroup(list(self.model.matcher.parameters()), train.matcher_lr)
        if self.model.adapter is not None:
            parameters = list(self.model.adapter.parameters())
            groups["adapter"] = residual_group(parameters, train.adapter_lr, train.adapter_decay, self.pairs)
        return {name: group for name, group in groups.items() if group.parameters}

    def learns_docids(self, batch: Batch) -> bool:
        """Whether it is a step for all losses, or only for what documents are ranked by."""
        return not self.vectors_alone and self.kind_of_step(batch.step) == "docids"

    def learns_tokens(self, batch: Batch) -> bool:
        """With a frozen encoder in every step once the docids have begun; else only where all is encoded anyway."""
        if self.model.matcher is None or not self.config.loss.tokens:
            return False
        return self.learns_docids(batch) or (self.model.encoder.is_frozen and not self.vectors_alone)

    def kind_of_step(self, step: int) -> str:
        return "docids" if self.docid_steps.learn_in(step) or not self.config.loss.vector else "ranking"

    @torch.no_grad()
    def start_heads(self) -> None:
        """The docids begin as what the ranking vectors are near to, and are learned from there.

        Documents without training pairs take no part: to the learned docids they are new.
        """
        sources = [(self.documents, self.pairs.pairs[:, 1])]
        if self.config.train.start_with_queries:
            sources.append((self.queries, self.pairs.pairs[:, 0]))
        found = []
        for texts, known in sources:
            rows = np.sort(np.random.default_rng(0).permutation(np.unique(known))[:SAMPLE])
            found += [self.model.heads.inner(x) for _, x in self.vectors_of(texts, rows)]
        quantiser = fit_quantiser(torch.cat(found), self.model.config.m, self.model.config.V, self.config.train.seed)
        self.model.heads.start_from(quantiser, self.config.loss.vector_temperature)

    def represent(self, batch: Batch) -> tuple[Representations, Encoded | None]:
        nothing = torch.zeros(len(batch.queries), 0, device=self.model.device)
        if not self.learns_docids(batch):
            query_vectors = self.vectors(self.pooled(self.queries, batch.queries), QUERY, batch)
            document_vectors = self.vectors(self.pooled(self.documents, batch.documents), DOCUMENT, batch)
            tokens = self.token_vectors(batch, None, None) if self.learns_tokens(batch) else (nothing, nothing)
            return Representations(nothing, nothing, query_vectors, document_vectors, *tokens), None
        query = encode(self.model, self.queries, batch.queries)
        document = encode(self.model, self.documents, batch.documents, states=False)
        vectors = self.vectors(query.pooled, QUERY, batch), self.vectors(document.pooled, DOCUMENT, batch)
        query_logits = self.head_logits(query, QUERY, batch)
        document_logits = self.head_logits(document, DOCUMENT, batch)
        tokens = self.token_vectors(batch, query, document) if self.learns_tokens(batch) else (nothing, nothing)
        return Representations(query_logits, document_logits, *vectors, *tokens), query

    def token_vectors(self, batch: Batch, query: Encoded | None, document: Encoded | None) -> tuple[Tensor, Tensor]:
        """Token vectors of all documents, and of the queries whose turn it is: the same ones however a batch is cut.

        With a frozen encoder token states are looked up, and no encoding is needed.
        """
        matcher = self.model.matcher
        assert matcher is not None
        turn = (batch.first + np.arange(len(batch.queries))) % self.token_stride == 0
        rows = torch.from_numpy(turn).to(self.model.device)
        asked = some(query, rows) if query is not None else None
        queries = query_tokens(matcher, self.model, self.queries, batch.queries[turn], asked, TRAINED_TOKENS)
        whole = queries.new_zeros(len(turn), *queries.shape[1:])
        documents = document_tokens(matcher, self.model, self.documents, batch.documents, document)
        return whole.index_copy(0, rows.nonzero().squeeze(1), queries), documents

    @property
    def token_stride(self) -> int:
        return -(-self.pairs.batch // self.config.train.token_batch)

    def head_logits(self, text: Encoded, kind: int, batch: Batch) -> Tensor:
        x = partly_detached(text.x, self.config.loss.docid_gradient)
        if self.config.loss.docid_dropout:
            x = feature_dropout(x, batch.rows(kind), kind, ~batch.step, self.config.loss.docid_dropout)
        return self.model.heads(x)

    def pooled(self, features: Features, rows: NDArray[np.int64]) -> Tensor:
        if features.pooled is not None:
            return on_device(self.model, features.pooled[rows])
        return encode(self.model, features, rows).pooled

    def vectors(self, pooled: Tensor, kind: int, batch: Batch) -> Tensor:
        """The ranking vectors, from pooled vectors with some features dropped: they must hold for new documents too."""
        if self.config.loss.vector_dropout:
            pooled = feature_dropout(pooled, batch.rows(kind), kind, batch.step, self.config.loss.vector_dropout)
        return self.model.adapt(pooled)

    def batch_losses(self, representations: Representations, batch: Batch) -> dict[str, Tensor]:
        """The weighted terms that compare every query and document of the batch with every other."""
        weights = self.config.loss
        query_logits, document_logits, query_vectors, document_vectors, _, _ = representations
        negatives = self.pairs.negatives(batch).to(query_logits.device)
        parts: dict[str, Tensor] = {}
        if weights.vector:
            term = losses.vector_softmax(query_vectors, document_vectors, negatives, weights.vector_temperature)
            parts["vector"] = weights.vector * term
        if self.learns_tokens(batch):
            parts["tokens"] = weights.tokens * self.token_loss(representations, negatives)
        if not self.learns_docids(batch):
            return parts
        query_probs, document_probs = query_logits.softmax(-1), document_logits.softmax(-1)
        rows = torch.from_numpy(batch.documents).to(query_logits.device)
        if weights.contrastive or weights.match:
            overlap = losses.CodeOverlap.of(query_probs, document_probs)
        if weights.contrastive:
            parts["contrastive"] = weights.contrastive * losses.discrete_contrastive(overlap, negatives, weights.margin)
        if weights.reverse:
            term = losses.reverse_cross_entropy(document_logits.log_softmax(-1), rows[:, None] != rows[None, :])
            parts["reverse"] = weights.reverse * term
        if weights.match:
            parts["match"] = weights.match * losses.expected_match(overlap, negatives)
        if weights.one_pass:
            term = losses.one_pass_match(query_logits.log_softmax(-1), straight_through(document_probs), negatives)
            parts["one_pass"] = weights.one_pass * term
        if weights.balance:
            parts["balance"] = weights.balance * losses.code_balance(document_probs)
        return parts

    def token_loss(self, representations: Representations, negatives: Tensor) -> Tensor:
        """Tokens choose among the documents that the vectors take for similar, as in search."""
        _, _, query_vectors, document_vectors, query_tokens, document_tokens = representations
        turn = torch.arange(0, len(query_tokens), self.token_stride, device=query_tokens.device)
        similar = query_vectors[turn].detach() @ nn.functional.normalize(document_vectors.detach(), dim=-1).T
        opponents = losses.nearest_negatives(similar, turn, negatives[turn], self.config.train.token_negatives)
        temperature = self.config.loss.vector_temperature
        return losses.token_softmax(query_tokens[turn], document_tokens, opponents, temperature)

    def generated(self, size: int, phase: Phase) -> NDArray[np.bool_]:
        """Which pairs of a batch the decoder learns from in this phase, evenly spread over the batch."""
        wanted = size if phase.frozen else min(size, self.config.train.generation_batch)
        return np.arange(size) % -(-size // wanted) == 0

    def pair_losses(
        self,
        representations: Representations,
        query: Encoded | None,
        batch: Batch,
        chosen: NDArray[np.bool_],
        phase: Phase,
    ) -> dict[str, Tensor]:
        """L_s summed over the `chosen` pairs of a part of the batch; the phase says what its gradient reaches."""
        if query is None or not self.config.loss.generation:
            return {}
        rows = torch.from_numpy(chosen).to(query.x.device)
        if self.config.model.docids == "random":
            docid = self.fixed_docids(batch, rows)
        else:
            docid = straight_through(representations.document_logits[rows].softmax(-1), phase.straight_through)
        return {"generation": self.generation_loss(query, representations.query_logits, docid, rows, phase)}

    def frozen_losses(self, batch: Batch, chosen: NDArray[np.bool_], phase: Phase) -> dict[str, Tensor]:
        """L_s on the final docids, for a part of the batch."""
        with torch.no_grad():
            query = encode(self.model, self.queries, batch.queries)
            prior = self.model.heads(query.x)
        rows = torch.from_numpy(chosen).to(query.x.device)
        return {"generation": self.generation_loss(query, prior, self.fixed_docids(batch, rows), rows, phase)}

    def fixed_docids(self, batch: Batch, rows: Tensor) -> Tensor:
        """The final docids of the chosen pairs' documents, one-hot (n, m, V)."""
        assert self.codes is not None, "freeze comes first"
        codes = self.codes[torch.from_numpy(batch.documents)[rows.cpu()]].to(rows.device)
        return nn.functional.one_hot(codes, self.model.config.V).to(self.model.dtype)

    def generation_loss(self, query: Encoded, prior: Tensor, docid: Tensor, rows: Tensor, phase: Phase) -> Tensor:
        x, states, prior = query.x[rows], query.states[rows], prior[rows]
        x = partly_detached(x, self.config.loss.docid_gradient if phase.joint else 0)
        states = states if phase.joint else states.detach()
        prior = prior if phase.straight_through else prior.detach()
        chosen = some(query, rows)._replace(x=x, states=states)
        log_probs = self.model.decoder(chosen, docid, prior)
        return self.config.loss.generation * losses.generation(log_probs, docid).sum()

    def freeze(self) -> None:
        """Fix the docids of all documents: from now on neither encoder nor heads change."""
        self.codes = torch.from_numpy(self.docids(np.arange(len(self.documents.tokens))))

    @torch.no_grad()
    def docids(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The docids (n, m) that the heads give the documents `rows` now."""
        parts = self.vectors_of(self.documents, rows)
        found = [docids_of(self.model, self.documents, own, x).cpu().numpy() for own, x in parts]
        return np.concatenate(found) if found else np.empty((0, self.model.config.m), dtype=np.int64)

    def vectors_of(self, texts: Features, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """The texts `rows`, some at a time, each with its x."""
        for start in range(0, len(rows), TEXTS_AT_ONCE):
            own = rows[start : start + TEXTS_AT_ONCE]
            yield own, encode(self.model, texts, own, states=False).x

    def health(self, sample: int = 512) -> DocidHealth:
        """Health of the docids of the corpus, or of a sample of it where documents are expensive to encode."""
        count = len(self.documents.tokens)
        limit = count if self.documents.pooled is not None else min(sample, count)
        rows = np.sort(np.random.default_rng(0).choice(count, min(limit, 50_000), replace=False))
        return docid_health(self.docids(rows))
