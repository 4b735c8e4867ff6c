"""Training pairs in batches: which queries and documents go into step s, and which of them are negatives.

A batch depends on the seed and the step's number alone, so that a resumed run needs no saved position.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.arrays import expand_ranges
from asi.datasets import Dataset, WithMorePairs
from asi.errors import DataError
from asi.records import Document

Rows = NDArray[np.int64]


QUERY, DOCUMENT = 0, 1  # kinds of texts


class TooFewPairs(DataError):
    """There are documents, but nothing to train on."""


class Batch(NamedTuple):
    queries: Rows  # (B,)
    documents: Rows  # (B,)
    step: int
    first: int = 0  # place of its first pair in the whole batch

    def rows(self, kind: int) -> Rows:
        return (self.queries, self.documents)[kind]

    def part(self, rows: slice) -> "Batch":
        return Batch(self.queries[rows], self.documents[rows], self.step, self.first + rows.start)


class Shuffled:
    """Pairs in a new order every epoch, `batch` of them in a step."""

    def __init__(self, pairs: NDArray[np.int64], seed: Sequence[int], batch: int) -> None:
        self.pairs = pairs
        self.seed = seed
        self.batch = batch
        self.steps_per_epoch = len(pairs) // max(batch, 1)
        self.order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def at(self, step: int) -> NDArray[np.int64]:
        """(batch, 2); the few pairs of an epoch that do not fill a batch wait for another epoch's order."""
        if not self.batch:
            return self.pairs[:0]
        epoch, place = divmod(step, self.steps_per_epoch)
        if self.order[0] != epoch:
            self.order = (epoch, np.random.default_rng([*self.seed, epoch]).permutation(len(self.pairs)))
        return self.pairs[self.order[1][place * self.batch : (place + 1) * self.batch]]


class TrainingPairs:
    """Relevant (query, document) pairs as row numbers, drawn in batches.

    Of the pairs, those from number `own` on come from elsewhere (pseudo queries). They have no more than
    `further_share` of a batch, because they may be many and worse. An epoch is one of the others.
    """

    def __init__(
        self, pairs: NDArray[np.int64], seed: int, batch: int, own: int | None = None, further_share: float = 1.0
    ) -> None:
        self.own = own = len(pairs) if own is None else own
        self.batch = min(batch, len(pairs))
        further = int(min(further_share, 1 - own / len(pairs)) * self.batch)
        if 0 < own < self.batch - further and further_share < 1:  # a share of the batch that there is
            further = int(own * further_share / (1 - further_share))
        parts = ((in_order(pairs[:own]), self.batch - further, [seed]), (in_order(pairs[own:]), further, [seed, 1]))
        self.parts = [Shuffled(part, seeds, min(size, len(part))) for part, size, seeds in parts]
        self.batch = sum(part.batch for part in self.parts)
        self.steps_per_epoch = self.parts[0].steps_per_epoch
        self.pairs = in_order(pairs)
        self.starts = np.searchsorted(self.pairs[:, 0], np.arange(self.pairs[:, 0].max() + 2))

    def at(self, step: int) -> Batch:
        pairs = np.concatenate([part.at(step) for part in self.parts])
        return Batch(pairs[:, 0], pairs[:, 1], step)

    def negatives(self, batch: Batch) -> Tensor:
        """(B, B) true where document j is not known to be relevant to query i: "(q, d-) not in D"."""
        known = expand_ranges(self.starts[batch.queries], self.starts[batch.queries + 1])
        relevant = self.pairs[known.items, 1]
        order = np.argsort(batch.documents, kind="stable")
        ordered = batch.documents[order]
        places = expand_ranges(np.searchsorted(ordered, relevant, "left"), np.searchsorted(ordered, relevant, "right"))
        negatives = np.ones((len(batch.queries), len(batch.documents)), dtype=bool)
        negatives[known.owners[places.owners], order[places.items]] = False
        return torch.from_numpy(negatives)


class GroupedPairs(TrainingPairs):
    """Batches of documents of one group, drawn anew for each step, then others; of each document one of its queries."""

    def __init__(self, pairs: NDArray[np.int64], seed: int, batch: int, groups: Rows) -> None:
        """`groups` are numbers of all documents."""
        super().__init__(pairs, seed, batch)
        self.seed = seed
        self.by_document = pairs[np.argsort(pairs[:, 1], kind="stable")]
        self.documents, first = np.unique(self.by_document[:, 1], return_index=True)
        self.first = np.append(first, len(pairs))  # of each document's pairs
        self.groups = groups[self.documents]
        self.batch = min(batch, len(self.documents))

    def at(self, step: int) -> Batch:
        draw = np.random.default_rng([self.seed, step])
        order = draw.permutation(len(self.documents))
        is_same = self.groups[order] == self.groups[order[0]]
        chosen = np.concatenate([order[is_same], order[~is_same]])[: self.batch]
        places = draw.integers(self.first[chosen], self.first[chosen + 1])
        return Batch(self.by_document[places, 0], self.by_document[places, 1], step)


def in_order(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]


class TrainingTexts(NamedTuple):
    """The texts of a data set's training split: the whole corpus, because it will be indexed too."""

    documents: list[Document]
    queries: list[str]
    pairs: NDArray[np.int64]  # (n, 2): query row, document row
    own: int  # of the pairs, the first so many; after them further ones from elsewhere, such as pseudo queries

    @property
    def own_pairs(self) -> NDArray[np.int64]:
        return self.pairs[: self.own]

    def fingerprint(self) -> str:
        """Changes with the documents, the queries and what belongs together."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.key}\0{document.title}\0{document.text}\0".encode())
        for query in self.queries:
            digest.update(f"{query}\0".encode())
        digest.update(self.pairs.tobytes())
        return digest.hexdigest()[:32]


def training_texts(dataset: Dataset, split: str = "train") -> TrainingTexts:
    documents = list(dataset.documents())
    queries, qrels = dataset.judged(split)
    own = len(qrels)
    if isinstance(dataset, WithMorePairs):
        further_queries, further_qrels = dataset.further()
        queries, qrels = queries + further_queries, qrels + further_qrels
    rows = {document.key: row for row, document in enumerate(documents)}
    query_rows = {query.key: row for row, query in enumerate(queries)}
    pairs = np.array([(query_rows[qrel.query], rows[qrel.document]) for qrel in qrels], dtype=np.int64).reshape(-1, 2)
    if len(np.unique(pairs[:, 1])) < 2:
        raise TooFewPairs(f"{dataset.name} has training pairs for fewer than two documents; nothing can be contrasted")
    return TrainingTexts(documents, [query.text for query in queries], pairs, own)


def contents(documents: Sequence[Document]) -> list[str]:
    return [document.content for document in documents]
