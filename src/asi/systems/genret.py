"""GenRet: docids that are learned by auto-encoding, one code after the other.

The decoder reads a text, query or document, and its state at position t is compared with a codebook. For each position
in turn: queries and documents are brought together by their states; a codebook starts from clusters of the documents'
states; then codes are learned by contrast, commitment, reconstruction and the codes before. When a position is done its
codes are fixed. In the end the decoder learns the whole docids, with one more code that tells equal ones apart.
Letters: B batch, V codes, d decoder width, N documents.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from asi.batches import Batch, TrainingPairs
from asi.features import Features, encode
from asi.losses import in_batch_softmax
from asi.model import Decoder, Encoded
from asi.systems.identifiers import Identifiers, cluster_centres
from asi.systems.sequences import LEARNING_RATE, SequenceRetriever, Shape, sequence_loss
from asi.systems.workplace import Built, Workplace, trained_parameters
from asi.training import PlainObjective

BATCH = 128
POSITIONS = 3
CODES = 256
SHARE = 0.25  # of the run, for each position; the rest is for whole docids
PREPARED = 0.2  # of that: queries and documents are brought together before there is a codebook
TEMPERATURE = 0.05
CONTRAST, COMMITMENT, PREFIX, RECONSTRUCTION = 0.5, 0.5, 0.5, 0.1  # weights of the losses
SINKHORN_ROUNDS = 50
SAMPLE = 8192  # documents whose states make the clusters


class Part(NamedTuple):
    """Where in the progressive training a step is."""

    position: int  # POSITIONS for the last part
    has_codebook: bool
    frozen: bool = False


class States(NamedTuple):
    queries: Tensor  # (B, d)
    documents: Tensor  # (B, d)
    query_logits: Tensor  # (B, V)
    document_logits: Tensor  # (B, V)


def part_at(progress: float) -> Part:
    """
    >>> part_at(0.0), part_at(0.3), part_at(0.99)
    (Part(position=0, has_codebook=False, frozen=False), Part(position=1, has_codebook=True, frozen=False), \
Part(position=3, has_codebook=True, frozen=False))
    """
    position = min(POSITIONS, int(progress / SHARE))
    return Part(position, position == POSITIONS or progress / SHARE - position >= PREPARED)


def balanced_codes(logits: Tensor) -> Tensor:
    """Codes (B,) such that the batch uses all of them about equally (Sinkhorn's algorithm on the logits (B, V))."""
    plan = (logits - logits.max()).exp().double()
    for _ in range(SINKHORN_ROUNDS):
        plan = plan / plan.sum(0, keepdim=True).clamp(min=1e-300) / plan.size(1)
        plan = plan / plan.sum(1, keepdim=True).clamp(min=1e-300) / plan.size(0)
    return plan.argmax(1)


class GenRetObjective(PlainObjective):
    def __init__(
        self, model: Decoder, workplace: Workplace, queries: Features, documents: Features, pairs: TrainingPairs
    ) -> None:
        self.model = model
        self.workplace = workplace
        self.queries = queries
        self.documents = documents
        self.pairs = pairs
        self.codes = torch.zeros(len(documents.tokens), POSITIONS + 1, dtype=torch.long)
        self.part: Part | None = None

    def phase(self, progress: float) -> Part:
        part = part_at(progress)
        if part != self.part:
            self.enter(part)
        self.part = part
        return part

    def enter(self, part: Part) -> None:
        """Fix the codes of the position before, and start the codebook of this one from clusters."""
        known = self.workplace.known
        if part.position and not (part.has_codebook and part.position < POSITIONS):
            self.fix(part.position - 1, known)
        if part.position == POSITIONS:
            self.codes[:, POSITIONS] = numbers_within(self.codes[:, :POSITIONS].numpy(), known)
        elif part.has_codebook:
            drawn = np.random.default_rng(self.workplace.seed).permutation(known)[:SAMPLE]
            with torch.no_grad():
                normed = [
                    self.model.norm(own.to(self.model.outputs.device))
                    for own in self.document_states(drawn, part.position)
                ]
            states = torch.cat(normed).cpu().numpy()
            centres = torch.from_numpy(cluster_centres(states - states.mean(0), CODES, self.workplace.seed))
            with torch.no_grad():
                self.model.outputs[part.position, : len(centres)] = F.normalize(centres, dim=-1).to(normed[0].device)

    def document_states(self, rows: NDArray[np.int64], position: int) -> list[Tensor]:
        with torch.no_grad():
            return [
                self.states(encode(self.workplace.encoder, self.documents, own), self.codes[own], position).cpu()
                for own in np.array_split(rows, max(1, len(rows) // 256))
            ]

    def fix(self, position: int, rows: NDArray[np.int64]) -> None:
        """The codes of these documents at `position`, as the model has them now."""
        with torch.no_grad():
            found = [
                self.model.log_probs(states[:, None].to(self.model.outputs.device), position, None)[:, 0].argmax(-1)
                for states in self.document_states(rows, position)
            ]
        self.codes[rows, position] = torch.cat(found).cpu()

    def states(self, text: Encoded, codes: Tensor, position: int) -> Tensor:
        """States (B, d) at `position`, given the codes before it."""
        return self.model.states(text, codes.to(text.x.device))[:, position]

    def parameter_groups(self) -> dict[str, tuple[list[nn.Parameter], float]]:
        return {"decoder": (list(self.model.parameters()), LEARNING_RATE)}

    def represent(self, batch: Batch) -> tuple[States, tuple[Encoded, Encoded]]:
        assert self.part is not None
        query = encode(self.workplace.encoder, self.queries, batch.queries)
        document = encode(self.workplace.encoder, self.documents, batch.documents)
        position = min(self.part.position, POSITIONS - 1)
        codes = self.codes[batch.documents]
        states = [self.states(text, codes, position) for text in (query, document)]
        logits = [self.model.log_probs(own[:, None], position, None)[:, 0] for own in states]
        return States(*(self.model.norm(own) for own in states), *logits), (query, document)

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
        self,
        representations: States,
        texts: tuple[Encoded, Encoded],
        batch: Batch,
        chosen: NDArray[np.bool_],
        phase: Part,
    ) -> dict[str, Tensor]:
        """The codes that are fixed already, from the query and from the document."""
        if not phase.position:
            return {}
        known = POSITIONS + 1 if phase.position == POSITIONS else phase.position
        codes = self.codes[batch.documents].to(texts[0].x.device)
        losses = [
            sequence_loss(self.model(text, codes)[:, :known], codes[:, :known], ends=False).sum() for text in texts
        ]
        return {"prefix": (1.0 if phase.position == POSITIONS else PREFIX) * (losses[0] + losses[1])}


def numbers_within(docids: NDArray[np.int64], rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
    """For every document its number among those of `rows` with the same docid, modulo CODES; 0 for the others."""
    numbers = np.zeros(len(docids), dtype=np.int64)
    seen: dict[tuple[int, ...], int] = {}
    for row in np.asarray(rows).tolist():
        docid = tuple(docids[row].tolist())
        numbers[row] = seen.get(docid, 0) % CODES
        seen[docid] = seen.get(docid, 0) + 1
    return torch.from_numpy(numbers)


def build_genret(workplace: Workplace, name: str) -> Built:
    torch.manual_seed(workplace.seed)
    shape = Shape(POSITIONS + 1, CODES, shared_tokens=False)
    decoder = Decoder(workplace.encoder.encoder.shape.width, shape).to(workplace.device)
    pairs = workplace.pairs(workplace.texts.pairs, BATCH)
    objective = GenRetObjective(
        decoder, workplace, workplace.features(workplace.texts.queries), workplace.documents, pairs
    )
    minutes = workplace.train(name, objective)
    every = np.arange(len(workplace.keys))
    for position in range(POSITIONS):  # old and new documents alike: what the trained model says
        objective.fix(position, every)
    known_first = np.append(workplace.known, np.setdiff1d(every, workplace.known))
    objective.codes[:, POSITIONS] = numbers_within(objective.codes[:, :POSITIONS].numpy(), known_first)
    identifiers = Identifiers(objective.codes.numpy(), every, CODES, shared=False)
    retriever = SequenceRetriever(workplace, decoder, identifiers, constrained=True)
    return Built(retriever, trained_parameters(decoder), minutes, identifiers.bytes_each, retriever)
