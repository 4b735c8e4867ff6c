"""Docids to the documents that are ranked, and these to the best of each query."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asi.arrays import expand_ranges
from asi.docid_search import Docids
from asi.snapshot import Snapshot


class Candidates(NamedTuple):
    """Documents of the docids' buckets, all queries in one flat list, in the order of the docids."""

    query: NDArray[np.int64]  # (n,)
    row: NDArray[np.int64]  # (n,) the docid's row
    number: NDArray[np.int64]  # (n,) the document's number in the store
    score: NDArray[np.float32]  # (n,) the docid's score


def candidates_of(
    docids: Docids, snapshot: Snapshot, limit: int, least: int, bucket_cap: int | None = None
) -> Candidates:
    """The documents of the docids' buckets, best docid first: buckets that fit into `limit` documents for a query.

    A bucket is taken whole or not at all, because which of its documents is best is seen only in ranking; and taken
    even if it does not fit, as long as there are fewer than `least` documents that may be shown. What room a bucket
    that does not fit has left goes to those behind it.
    """
    valid = (docids.rows >= 0) & np.isfinite(docids.scores)
    rows = np.where(valid, docids.rows, 0)
    sizes = np.where(valid, snapshot.offsets[rows + 1] - snapshot.offsets[rows], 0)
    shown = sizes if bucket_cap is None else np.minimum(sizes, bucket_cap)
    is_needed = np.cumsum(shown, axis=1) - shown < least
    taken = is_needed | (np.cumsum(sizes, axis=1) <= limit)
    while True:  # each round takes as many as fit side by side, the first of them at least
        room = limit - np.where(taken, sizes, 0).sum(axis=1, keepdims=True)
        fits = ~taken & (sizes > 0) & (sizes <= room)
        if not fits.any():
            break
        taken |= fits & (np.cumsum(np.where(fits, sizes, 0), axis=1) <= room)
    sizes = np.where(taken, sizes, 0)
    starts = snapshot.offsets[rows]
    items, owners = expand_ranges(starts.ravel(), (starts + sizes).ravel())
    K = docids.rows.shape[1]
    return Candidates(
        owners // K, rows.ravel()[owners], snapshot.numbers[items].astype(np.int64), docids.scores.ravel()[owners]
    )


def best_of_each_query(
    candidates: Candidates, scores: NDArray[np.float32], k: int, bucket_cap: int | None, queries: int
) -> NDArray[np.int64]:
    """Indices of each query's k best candidates, best first; equal scores in the order of document numbers."""
    order = np.lexsort((candidates.number, -scores, candidates.query))
    if bucket_cap is not None:
        order = order[rank_within(candidates.query[order], candidates.row[order]) < bucket_cap]
    place = (
        np.arange(len(order)) - np.searchsorted(candidates.query[order], np.arange(queries))[candidates.query[order]]
    )
    return order[place < k]


def rank_within(queries: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each item of a ranked list: how many items of the same query and bucket stand before it."""
    order = np.lexsort((np.arange(len(rows)), rows, queries))
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (queries[order][1:] != queries[order][:-1]) | (rows[order][1:] != rows[order][:-1])
    first = np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - first
    return rank
