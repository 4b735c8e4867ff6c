"""One moment of the store, as search looks at it: the tree of docids, and what each code and each bucket is near to.

What a view holds is computed when it is first asked for, and shared by all searchers of an index.
Letters: N documents, U docids in use, C centres of their buckets, m docid length, D width.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.arrays import expand_ranges
from asi.beam import PrefixTree
from asi.centres import centres_of, most_centres
from asi.code_vectors import LARGEST_TABLE, CodeVectors, fit_code_vectors
from asi.indexing import row_shape
from asi.model import Asi
from asi.ranking import RankingRows, unpack
from asi.snapshot import Snapshot
from asi.store import Store

LARGEST_CENTRES = 2**30  # bytes; with more there are none, and the list of docids is filled up by codes alone
DOCUMENTS_AT_ONCE = 2**17  # whose vectors are held at a time


class BucketCentres(NamedTuple):
    """What each bucket is near to: one row or more, bucket after bucket."""

    vectors: Tensor  # (C, D)
    biases: Tensor  # (C,)
    owners: Tensor  # (C,) their buckets
    offsets: NDArray[np.int64]  # (U + 1,) where the rows of each bucket begin

    def scores(self, x: Tensor) -> Tensor:
        """How near every bucket is to queries' unit vectors (Q, D): (Q, U), as near as its nearest centre."""
        found = x @ self.vectors.T + self.biases
        none = found.new_full((len(x), len(self.offsets) - 1), -torch.inf)
        return none.scatter_reduce(1, self.owners.expand(len(x), -1), found, "amax")

    def scores_of(self, x: Tensor, buckets: Tensor) -> Tensor:
        """The same for some buckets (n,) and one query (D,), looking at no others."""
        own = buckets.cpu().numpy()
        items, owners = (
            torch.from_numpy(part).to(x.device) for part in expand_ranges(self.offsets[own], self.offsets[own + 1])
        )
        found = self.vectors[items] @ x + self.biases[items]
        return found.new_full(buckets.shape, -torch.inf).scatter_reduce(0, owners, found, "amax")


class View:
    def __init__(self, snapshot: Snapshot, model: Asi, store: Store) -> None:
        self.snapshot = snapshot
        self.model = model
        self.store = store

    @cached_property
    def tree(self) -> PrefixTree:
        return PrefixTree(self.snapshot.codes, self.model.config.V)

    @cached_property
    def columns(self) -> Tensor:
        """The codes (m, U) position by position, for look-ups in tables."""
        return torch.from_numpy(np.ascontiguousarray(self.snapshot.codes.T, dtype=np.int32)).to(self.model.device)

    @cached_property
    def code_vectors(self) -> CodeVectors | None:
        """Of the documents, of a part of them where they are very many; None if they have no vectors, or too many
        codes."""
        config, snapshot = self.model.config, self.snapshot
        if not self.store.meta.width or config.m * config.V > LARGEST_TABLE:
            return None
        stride = max(1, math.ceil(len(snapshot.numbers) / DOCUMENTS_AT_ONCE))
        chosen = np.arange(0, len(snapshot.numbers), stride)
        codes = snapshot.codes[np.searchsorted(snapshot.offsets, chosen, side="right") - 1]
        found = fit_code_vectors(codes, self.ranking_rows(chosen), config.V)
        return CodeVectors(*(part.to(self.model.device) for part in found))

    def ranking_rows(self, places: NDArray[np.int64] | slice) -> RankingRows:
        """Of the documents at these places of the snapshot."""
        return unpack(self.store.vectors(self.snapshot.numbers[places], slice(0, row_shape(self.model).ranked)))

    @cached_property
    def centres(self) -> BucketCentres | None:
        """None if there are no vectors, or too many."""
        snapshot, width = self.snapshot, self.model.encoder.shape.width
        count = most_centres(np.diff(snapshot.offsets))
        if not count or not self.store.meta.width or 4 * count * width > LARGEST_CENTRES:
            return None
        parts, counts = [], []
        for first, last in ranges(snapshot.offsets, DOCUMENTS_AT_ONCE):
            starts = snapshot.offsets[first : last + 1]
            centres = centres_of(self.ranking_rows(slice(starts[0], starts[-1])), starts[:-1] - starts[0])
            parts.append(centres.rows)
            counts.append(centres.counts)
        vectors, biases = (
            torch.from_numpy(np.concatenate(part)).to(self.model.device) for part in zip(*parts, strict=True)
        )
        offsets = np.cumsum(np.concatenate([[0], *counts]))
        owners = torch.from_numpy(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))).to(self.model.device)
        return BucketCentres(vectors, biases, owners, offsets)


def ranges(offsets: NDArray[np.int64], size: int) -> Iterator[tuple[int, int]]:
    """Buckets from one to another (not included), each time as many as have `size` documents together, or one.

    >>> list(ranges(np.array([0, 2, 4, 9, 10, 11]), 4))
    [(0, 2), (2, 3), (3, 5)]
    """
    first = 0
    while first < len(offsets) - 1:
        last = max(first + 1, int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1)
        yield first, last
        first = last


class Views:
    """The current view of a store."""

    def __init__(self, model: Asi, store: Store) -> None:
        self.model = model
        self.store = store
        self.latest: View | None = None

    def current(self) -> View:
        snapshot = self.store.snapshot()
        view = self.latest
        if view is None or view.snapshot is not snapshot:
            view = self.latest = View(snapshot, self.model, self.store)
        return view
