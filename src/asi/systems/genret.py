"""GenRet: docids that are learned by auto-encoding, one code after the other.

The decoder reads a text, query or document, and its state at position t is compared with a codebook. For each position
in turn: queries and documents are brought together by their states; a codebook starts from clusters of the documents'
states; then codes are learned by contrast, commitment, reconstruction and the codes before. A batch has documents whose
codes so far are the same, so that the next one has to tell them apart. When a position is done its codes and codebook
are fixed. In the end the decoder learns the whole docids, with one more code that tells equal ones apart.
Letters: B batch, V codes, d decoder width, N documents.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from asi.batches import Batch, GroupedPairs, TrainingPairs
from asi.features import encode
from asi.losses import in_batch_softmax
from asi.model import Tables
from asi.systems.decoders import Shape, TextDecoder, begin_with_vectors
from asi.systems.identifiers import Identifiers, cluster_centres, numbers_within
from asi.systems.sequences import LEARNING_RATE, SequenceRetriever, sequence_loss
from asi.systems.workplace import Built, Reading, Workplace, parameters_of
from asi.training import ParameterGroup, PlainObjective, part_of_run

SOURCES = ("queries", "pseudo")
BATCH = 128
POSITIONS = 3
FEWEST_CODES, MOST_CODES = 16, 512  # of a position; the original has 512 for some 110,000 documents
SHARE = 0.1  # of the run, for each position; the rest is for whole docids, as most rounds of the original are
PREPARED = 0.5  # of that, before there is a codebook; both begin with a twentieth of the run, which planning.py expects
TEMPERATURE = 0.05
CONTRAST, COMMITMENT, PREFIX, RECONSTRUCTION = 0.5, 0.5, 0.5, 0.1  # weights of the losses
SINKHORN_ROUNDS = 100
SAMPLE = 8192  # documents whose states make the clusters


class Part(NamedTuple):
    """Where in the progressive training a step is."""

    position: int  # POSITIONS for the last part
    has_codebook: bool
    frozen: bool = False
    rewritten: bool = False


class States(NamedTuple):
    queries: Tensor  # (B, d)
    documents: Tensor  # (B, d)
    query_logits: Tensor  # (B, V)
    document_logits: Tensor  # (B, V)


def part_at(progress: float) -> Part:
    """
    >>> [part_at(progress)[:2] for progress in (0.0, 0.15, 0.99)]
    [(0, False), (1, True), (3, True)]
    """
    parts = round(progress / SHARE, 9)
    position = min(POSITIONS, int(parts))
    return Part(position, position == POSITIONS or round(parts - position, 9) >= PREPARED)


def balanced_codes(logits: Tensor) -> Tensor:
    """Codes (B,) such that the batch uses all of them about equally: Sinkhorn's algorithm on the logits (B, V).

    They are brought into [-1, 1] first, so that what a code has too much in all rows is taken off, and little more.
    """
    middle = (logits.max() + logits.min()) / 2
    plan = ((logits - middle) / (logits.max() - middle).clamp(min=1e-5)).double().exp()
    for _ in range(SINKHORN_ROUNDS):
        plan = plan / plan.sum(0, keepdim=True).clamp(min=1e-300) / plan.size(1)
        plan = plan / plan.sum(1, keepdim=True).clamp(min=1e-300) / plan.size(0)
    return plan.argmax(1)


def codes_for(documents: int) -> int:
    """So many codes at each position that the first alone leaves groups which the others have to tell apart.

    >>> codes_for(110_000), codes_for(10_000), codes_for(10)
    (469, 141, 16)
    """
    return max(FEWEST_CODES, min(MOST_CODES, round((2 * documents) ** 0.5)))


class GenRetDecoder(TextDecoder):
    """A decoder that knows the docids which it was trained on."""

    codes: Tensor  # (N, POSITIONS + 1), as far as they are fixed

    def __init__(self, width: int, documents: int) -> None:
        super().__init__(width, Shape(POSITIONS + 1, codes_for(documents), shared_tokens=False))
        self.register_buffer("codes", torch.zeros(documents, POSITIONS + 1, dtype=torch.long))
        self.fixed = 0  # codebooks that learn no more

    def output_tables(self) -> Tables:
        return [table.detach() if i < self.fixed else table for i, table in enumerate(super().output_tables())]

    def at(self, states: Tensor, position: int) -> Tensor:
        """Log-probabilities (B, V) of the codes at a position, from states (B, positions, d)."""
        return self.log_probs(states[:, position : position + 1], self.output_tables(), position, None)[:, 0]


class GenRetObjective(PlainObjective):
    def __init__(self, model: GenRetDecoder, workplace: Workplace, reading: Reading, batch: int = BATCH) -> None:
        self.model = model
        self.workplace = workplace
        self.queries = reading.features
        self.documents = workplace.documents
        self.all_pairs = reading.all_pairs
        self.batch = batch
        self.pairs = self.batches(0)
        self.part: Part | None = None

    def batches(self, codes: int) -> TrainingPairs:
        """Batches of documents that have so many codes in common; in rounds through all pairs for whole docids."""
        if codes == POSITIONS:
            return TrainingPairs(self.all_pairs, self.workplace.terms.seed, self.batch)
        groups = np.unique(self.model.codes[:, :codes].cpu().numpy(), axis=0, return_inverse=True)[1].ravel()
        return GroupedPairs(self.all_pairs, self.workplace.terms.seed, self.batch, groups)

    def course(self, step: int, steps: int) -> tuple[int, int]:
        return part_of_run(step, steps, [*(SHARE * (i + 1) for i in range(POSITIONS)), 1.0])

    def enter(self, progress: float) -> Part:
        part = part_at(progress)
        if part != self.part:
            self.begin(part)
        self.part = part
        return part

    @torch.no_grad()
    def begin(self, part: Part) -> None:
        """Fix the codes of the positions before, and start the codebook of this one from clusters."""
        known = self.workplace.known
        done = self.part.position if self.part is not None and self.part.position < part.position else part.position
        for position in range(done, part.position):
            self.fix(position, known, apart=True)
        self.model.fixed = part.position % POSITIONS  # none in the last part: the codes are given then
        self.pairs = self.batches(part.position)
        if part.position == POSITIONS:
            self.number(known)
        elif part.has_codebook:
            drawn = np.random.default_rng(self.workplace.terms.seed).permutation(known)[:SAMPLE]
            states = [self.model.norm(own[:, -1]) for own in self.document_states(drawn, part.position)]
            around = centred(torch.cat(states).cpu().numpy(), self.model.codes[drawn, : part.position].cpu().numpy())
            centres = torch.from_numpy(cluster_centres(around, self.model.V, self.workplace.terms.seed))
            book = self.model.outputs[part.position]
            # A state has the length sqrt(d): so the logits are those of cosines at the temperature of the contrast.
            book[: len(centres)] = (centres / (book.size(1) * TEMPERATURE)).to(book.device)

    def document_states(self, rows: NDArray[np.int64], position: int) -> Iterator[Tensor]:
        """States (n, position + 1, d) of documents, given their codes so far, some at a time."""
        for own in np.array_split(rows, max(1, len(rows) // 256)):
            codes = self.model.codes[own, : position + 1]
            yield self.model.states(encode(self.workplace.encoder, self.documents, own), codes)

    @torch.no_grad()
    def fix(self, position: int, rows: NDArray[np.int64], *, apart: bool) -> None:
        """The codes of these documents at `position`, as the model has them now; without what those of one prefix have
        in common if they are to be told `apart`, as the codebook began and Sinkhorn's algorithm teaches it."""
        if len(rows):
            found = [self.model.at(states, position) for states in self.document_states(rows, position)]
            logits, prefixes = torch.cat(found).cpu().numpy(), self.model.codes[rows, :position].cpu().numpy()
            best = (centred(logits, prefixes) if apart else logits).argmax(1)
            self.model.codes[rows, position] = torch.from_numpy(best).to(self.model.codes.device)

    def number(self, rows: NDArray[np.int64]) -> None:
        """The last code, which tells equal ones apart."""
        codes = self.model.codes
        numbers = numbers_within(codes[:, :POSITIONS].cpu().numpy(), rows) % self.model.V
        codes[:, POSITIONS] = torch.from_numpy(numbers).to(codes.device)

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        return {"decoder": ParameterGroup(list(self.model.parameters()), LEARNING_RATE)}

    def represent(self, batch: Batch) -> tuple[States, tuple[Tensor, Tensor]]:
        """The states at the position that is being learned, and all states of query and document."""
        assert self.part is not None
        position = self.part.position
        codes = self.model.codes[batch.documents, : position + 1]
        query = self.model.states(encode(self.workplace.encoder, self.queries, batch.queries), codes)
        document = self.model.states(encode(self.workplace.encoder, self.documents, batch.documents), codes)
        both = (query, document)
        if position == POSITIONS:
            return States(*[query.new_zeros(len(query), 0)] * 4), both
        vectors = (self.model.norm(states[:, -1]) for states in both)
        return States(*vectors, *(self.model.at(states, position) for states in both)), both

    def batch_losses(self, representations: States, batch: Batch) -> dict[str, Tensor]:
        assert self.part is not None
        if self.part.position == POSITIONS:
            return {}
        queries, documents, query_logits, document_logits = representations
        negatives = self.pairs.negatives(batch).to(queries.device)
        q, d = F.normalize(queries, dim=-1), F.normalize(documents, dim=-1)
        parts = {"contrast": CONTRAST * in_batch_softmax(q @ d.T / TEMPERATURE, negatives)}
        if self.part.has_codebook:
            codes = balanced_codes(document_logits.detach())
            parts["commitment"] = COMMITMENT * (F.nll_loss(query_logits, codes) + F.nll_loss(document_logits, codes))
            quantised = F.normalize(self.model.outputs[self.part.position][codes], dim=-1)
            parts["reconstruction"] = RECONSTRUCTION * in_batch_softmax(
                quantised @ d.detach().T / TEMPERATURE, negatives
            )
        return parts

    def pair_losses(
        self, _: States, states: tuple[Tensor, Tensor], batch: Batch, chosen: NDArray[np.bool_], phase: Part
    ) -> dict[str, Tensor]:
        """The codes that are fixed already, from the query and from the document."""
        if not phase.position:
            return {}
        known = POSITIONS + 1 if phase.position == POSITIONS else phase.position
        codes = self.model.codes[batch.documents, : phase.position + 1]
        counts = (torch.arange(codes.size(1), device=codes.device) < known).expand_as(codes)
        weight = 1.0 if phase.position == POSITIONS else PREFIX / known
        losses = [sequence_loss(self.model, own, codes, counts, None) for own in states]
        return {"prefix": weight * (losses[0] + losses[1])}


def centred(states: NDArray[np.float32], prefixes: NDArray[np.int64]) -> NDArray[np.float32]:
    """States (n, d) with the mean of all in place of the mean of those with the same codes before."""
    group = np.zeros(len(states), dtype=np.int64)
    if prefixes.shape[1]:
        group = np.unique(prefixes, axis=0, return_inverse=True)[1].ravel()
    sums = np.zeros((int(group.max(initial=0)) + 1, states.shape[1]))
    np.add.at(sums, group, states)
    means = sums / np.bincount(group)[:, None]
    return (states - means[group] + states.mean(axis=0)).astype(np.float32)


def build_genret(workplace: Workplace, name: str) -> Built:
    every = np.arange(len(workplace.keys))
    reading = workplace.reading(SOURCES)
    decoder = workplace.new_model(lambda: GenRetDecoder(workplace.encoder.encoder.shape.width, len(every)))
    assert workplace.documents.pooled is not None
    begin_with_vectors(decoder, workplace.documents.pooled[workplace.known])
    objective = GenRetObjective(decoder, workplace, reading)
    training = workplace.train(name, objective)
    new = np.setdiff1d(every, workplace.known)
    for position in range(POSITIONS):
        objective.fix(position, new, apart=False)
    objective.number(np.append(workplace.known, new))  # known ones first: theirs are as they were
    identifiers = Identifiers(decoder.codes.cpu().numpy(), every, decoder.V, shared=False, ends=False)
    retriever = SequenceRetriever(workplace, decoder, identifiers, constrained=True)
    return Built(retriever, parameters_of(decoder), training, identifiers.bytes_each, retriever)
