"""Generative retrieval with docids that are made beforehand: one sequence-to-sequence mechanism for many systems.

The frozen encoder reads a text, a decoder writes a docid. What a system learns from (queries, pseudo queries, parts of
documents), in which order, and what its docids are, are settings. Search is the project's beam search, along the
docids that exist, or over all codes with whatever is no docid dropped.
Letters: B texts, L docid length, V codes, d decoder width, Q queries, K beams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from asi.arrays import Groups
from asi.batches import Batch, TrainingPairs
from asi.beam import PrefixTree, beam_search
from asi.features import Features, encode
from asi.model import Asi, Decoder, Encoded, Generation
from asi.records import Docid, Hit
from asi.systems.decoders import (
    PrefixAwareDecoder,
    PrefixAwareGeneration,
    Shape,
    TextDecoder,
    begin_as_dense,
    begin_with_vectors,
)
from asi.systems.identifiers import END, Identifiers
from asi.systems.words import WordCodes
from asi.systems.workplace import Built, Reading, Source, Workplace, parameters_of
from asi.training import Nothing, ParameterGroup, StagedObjective

BATCH = 64
CODES_AT_ONCE = 2**24  # logits of a step; a batch with long docids of many codes is smaller
LEARNING_RATE = 1e-3
COPYING_RATE = 2e-2
DROPOUT = 0.1  # of what the decoder reads
BEAMS = 20


@dataclass(frozen=True)
class Stage:
    """A part of the training: until when, as a share of the run, and what is read."""

    until: float
    sources: tuple[str, ...]


@dataclass(frozen=True)
class SequenceSettings:
    identifiers: Callable[[Workplace], Identifiers]
    stages: tuple[Stage, ...]
    constrained: bool = True
    prefix_aware: bool = False
    starts_from_vectors: bool = False  # output rows of the documents begin as their vectors
    pick: Callable[[Workplace, Identifiers, Source], NDArray[np.int64]] | None = None  # of several docids of a document
    beams: int = BEAMS


class SequenceObjective(StagedObjective):
    """Texts to docids: likelihood of every code up to the end of the docid."""

    def __init__(
        self,
        model: Decoder,
        encoder: Asi,
        features: Features,
        codes: Tensor,
        stages: Sequence[tuple[float, TrainingPairs]],
        *,
        ends: bool,
        words: WordCodes | None = None,
        given: int = 0,
    ) -> None:
        super().__init__(stages)
        self.model = model
        self.encoder = encoder
        self.features = features
        self.codes = codes  # (R, L)
        self.ends = ends
        self.words = words
        self.given = given  # codes at the beginning that are not written

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        factor = self.model.prior_scale
        others = [parameter for parameter in self.model.parameters() if parameter is not factor]
        groups = {"decoder": ParameterGroup(others, LEARNING_RATE)}
        if factor is not None:  # one number, far from where it ends
            groups["copying"] = ParameterGroup([factor], COPYING_RATE)
        return groups

    def represent(self, batch: Batch) -> tuple[Nothing, Encoded]:
        text = encode(self.encoder, self.features, batch.queries)
        return Nothing(), text._replace(x=F.dropout(text.x, DROPOUT), states=F.dropout(text.states, DROPOUT))

    def pair_losses(
        self, representations: Nothing, text: Encoded, batch: Batch, chosen: NDArray[np.bool_], phase: Any
    ) -> dict[str, Tensor]:
        codes = self.codes[torch.from_numpy(batch.documents)].to(text.x.device)
        prior = self.words.prior(self.features.tokens, batch.queries, self.model) if self.words else None
        counts = written(codes) if self.ends else torch.ones_like(codes, dtype=torch.bool)
        counts[:, : self.given] = False
        longest = int(counts.sum(1).max()) + self.given  # nobody asks for the states behind
        codes, counts = codes[:, :longest], counts[:, :longest]
        prior = prior if prior is None else prior[:, :longest]
        return {"generation": sequence_loss(self.model, self.model.states(text, codes), codes, counts, prior)}


def batch_of(codes: NDArray[np.int64], V: int, *, ends: bool) -> int:
    """Pairs in a step: fewer where docids (R, L) are long and have many codes to choose from."""
    length = float(written(torch.from_numpy(codes)).sum(1).float().mean()) if ends else codes.shape[1]
    return max(16, min(BATCH, int(CODES_AT_ONCE / (length * V))))


def written(codes: Tensor) -> Tensor:
    """Which of the codes (B, L) a docid has: those up to its first END, and this END."""
    is_end = codes == END
    return torch.cumsum(is_end, dim=1) <= is_end


def sequence_loss(decoder: Decoder, states: Tensor, codes: Tensor, counts: Tensor, prior: Tensor | None) -> Tensor:
    """Negative log-likelihood of the codes (B, L) that count (B, L), summed; from the decoder's states (B, L, d).

    Nothing is computed for the others: with long docids of many codes that is most of them.
    """
    tables = decoder.output_tables()
    groups = [(tables[0], counts)]  # a table of codes, and where it is used
    if len(decoder.outputs) > 1:
        at = torch.arange(codes.size(1), device=codes.device)
        groups = [(table, counts & (at == i)) for i, table in enumerate(tables[: codes.size(1)])]
    total = states.new_zeros(())
    for table, where in groups:
        own = prior[where] if prior is not None else None
        total = total + F.cross_entropy(decoder.logits(states[where], table, own), codes[where], reduction="sum")
    return total


def generation(workplace: Workplace, decoder: Decoder, queries: Sequence[str], words: WordCodes | None) -> Generation:
    """The beginning of a generation for queries that are being asked."""
    tokens = workplace.tokenise(queries)
    prior = words.prior(tokens, np.arange(len(tokens)), decoder) if words else None
    return Generation(decoder, workplace.encode(tokens), prior)


class SequenceRetriever:
    """Generates docids and opens their documents, in the order of the corpus where several share one."""

    def __init__(
        self, workplace: Workplace, decoder: Decoder, identifiers: Identifiers, *, constrained: bool, beams: int = BEAMS
    ) -> None:
        self.workplace = workplace
        self.decoder = decoder.eval()
        self.identifiers = identifiers
        self.constrained = constrained
        self.beams = beams
        table, buckets = np.unique(identifiers.codes, axis=0, return_inverse=True)
        self.tree = PrefixTree(table, identifiers.V)
        self.count = len(table)
        self.by_docid = Groups.of(buckets.ravel(), len(table))
        first = identifiers.first_rows(len(workplace.keys))
        self.of_documents = np.where(first >= 0, buckets.ravel()[first], -1)[:, None]
        self.generated: dict[str, list[int]] = {}  # what search has generated for a query, for measures of docids

    @torch.inference_mode()
    def generate(self, queries: Sequence[str], beams: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows of the docids (Q, K), -1 for what no document has, and their scores, best first; -inf behind the last.

        The score is the log-probability, where docids differ in length that of a code on average.
        """
        if isinstance(self.decoder, PrefixAwareDecoder):
            step: Generation = PrefixAwareGeneration(
                self.decoder, self.workplace.encode(self.workplace.tokenise(queries))
            )
        else:
            step = generation(self.workplace, self.decoder, queries, self.identifiers.words)
        tree = self.tree if self.constrained else None
        end = END if self.identifiers.ends else None
        found = beam_search(step, self.decoder.m, min(beams, self.count), tree, end=end)
        rows = found.rows if found.rows is not None else self.tree.find(found.codes.cpu())
        return rows.numpy(), found.scores.cpu().numpy()

    def docids(self, queries: Sequence[str], count: int) -> list[list[Docid]]:
        """A document with several docids counts by its first one, whichever is generated.

        What no document has keeps its place, as a docid that nothing has.
        """
        if any(query not in self.generated for query in queries):
            self.search(queries, count)
        first_documents = self.identifiers.documents[self.by_docid.rows[self.by_docid.offsets[:-1]]]
        first = self.of_documents[first_documents, 0]
        found: list[list[Docid]] = [[] for _ in queries]
        for query, own in zip(queries, found, strict=True):
            places = enumerate(self.generated[query])
            known = dict.fromkeys(int(first[row]) if row >= 0 else self.count + place for place, row in places)
            own += [(row,) for row in known]
        return [own[:count] for own in found]

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        answers = []
        for query, rows, scores in zip(queries, *self.generate(queries, max(k, self.beams)), strict=True):
            found = np.isfinite(scores)
            self.generated[query] = rows[found].tolist()
            answers.append(self.opened(self.generated[query], scores[found].tolist(), k))
        return answers

    def opened(self, rows: list[int], scores: list[float], k: int) -> list[Hit]:
        hits: dict[int, Hit] = {}
        for row, score in ((row, score) for row, score in zip(rows, scores, strict=True) if row >= 0):
            for document in self.identifiers.documents[self.by_docid.members(row)].tolist():
                hits.setdefault(document, Hit(self.workplace.keys[document], score, (row,)))
            if len(hits) >= k:
                break
        return list(hits.values())[:k]


def training_stages(
    workplace: Workplace, settings: SequenceSettings, identifiers: Identifiers, reading: Reading
) -> list[tuple[float, TrainingPairs]]:
    """What is learnt until when: pairs of a text that is read and the row of a docid."""
    batch = batch_of(identifiers.codes, identifiers.V, ends=identifiers.ends)
    first_rows = identifiers.first_rows(len(workplace.keys))

    def pairs_of(source: str) -> NDArray[np.int64]:
        texts, documents = reading.pairs(source).T
        pick = settings.pick
        targets = pick(workplace, identifiers, reading.sources[source]) if pick else first_rows[documents]
        return np.stack([texts, targets], axis=1)

    return [
        (stage.until, workplace.pairs(np.concatenate([pairs_of(source) for source in stage.sources]), batch))
        for stage in settings.stages
    ]


def build_sequences(workplace: Workplace, name: str, settings: SequenceSettings) -> Built:
    """Make the docids, train the decoder, open the retriever."""
    identifiers = settings.identifiers(workplace)
    L, V = identifiers.codes.shape[1], identifiers.V
    width = workplace.encoder.encoder.shape.width
    kind = PrefixAwareDecoder if settings.prefix_aware else TextDecoder
    words = identifiers.words
    shape = Shape(L, V, identifiers.shared, head_prior=words is not None)
    decoder = workplace.new_model(lambda: kind(width, shape))
    pooled = workplace.documents.pooled
    assert pooled is not None
    if words is not None:
        words.start(decoder, workplace.encoder.encoder.words.weight)
    elif settings.starts_from_vectors:
        begin_as_dense(decoder, pooled[identifiers.documents], identifiers.codes[:, 0])
    else:
        begin_with_vectors(decoder, pooled[workplace.known])
    reading = workplace.reading(list(dict.fromkeys(name for stage in settings.stages for name in stage.sources)))
    codes = torch.from_numpy(identifiers.codes)
    stages = training_stages(workplace, settings, identifiers, reading)
    objective = SequenceObjective(
        decoder, workplace.encoder, reading.features, codes, stages, ends=identifiers.ends, words=words
    )
    training = workplace.train(name, objective, identifiers.codes)
    retriever = SequenceRetriever(
        workplace, decoder, identifiers, constrained=settings.constrained, beams=settings.beams
    )
    unused = decoder.embeddings.numel() if L == 1 else 0  # nothing is written after the one code
    grows = decoder.outputs.numel() * 4 if L == 1 else 0  # an atomic docid is a row of the output table
    each = (identifiers.bytes_each * len(identifiers.documents) + grows) / len(workplace.keys)
    return Built(retriever, parameters_of(decoder) - unused, training, each, retriever)
