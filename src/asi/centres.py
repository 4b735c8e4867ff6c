"""What buckets are near to: a few rows for each, by which it scores as its best document is expected to.

A bucket of a few documents has one row. The documents of a larger one may lie far apart, and their mean near to none of
them: it is halved until the parts are small, and is as near as the nearest of them.
Letters: n documents, U buckets, C parts (at least U), D width.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asi.ranking import Floats, RankingRows

LARGEST_PART = 4  # documents (LOG.md)
SPREAD_ALONG_A_QUERY = np.float32(0.1)  # part of a spread, as in about 100 dimensions (LOG.md)
Integers = NDArray[np.int64]


class Centres(NamedTuple):
    rows: RankingRows  # (C, D), (C,), bucket after bucket
    counts: Integers  # (U,) of each bucket's rows


def centres_of(rows: RankingRows, starts: Integers) -> Centres:
    """Centres of the buckets whose documents are `rows`, one bucket after the other from `starts` on."""
    bucket = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(rows.vectors)))
    part = halved(rows.vectors, starts)
    order = np.lexsort((part, bucket))
    first = np.flatnonzero(np.diff(part[order], prepend=-1))
    found = means_and_bonus(RankingRows(rows.vectors[order], rows.bias[order]), first)
    return Centres(found, np.bincount(bucket[order[first]], minlength=len(starts)))


def most_centres(sizes: Integers) -> int:
    """A bound of the number of centres of buckets of these sizes: a half of five or more is at least two."""
    return int(np.where(sizes > LARGEST_PART, sizes // 2, 1).sum())


def halved(vectors: Floats, starts: Integers) -> Integers:
    """The part of each document (n,): buckets are halved until no part has more than LARGEST_PART documents."""
    sizes = np.diff(starts, append=len(vectors))
    part = np.repeat(np.arange(len(starts)), sizes)
    parts, rows = len(starts), np.flatnonzero(sizes[part] > LARGEST_PART)
    while len(rows):
        _, starts, group, sizes = np.unique(part[rows], return_index=True, return_inverse=True, return_counts=True)
        along = np.einsum("nd,nd->n", vectors[rows], widest_directions(vectors[rows], starts, group)[group])
        place = np.empty(len(rows), dtype=np.int64)
        place[np.lexsort((along, group))] = np.arange(len(rows)) - starts[group]
        is_far = 2 * place >= sizes[group]
        part[rows[is_far]] = parts + group[is_far]
        parts += len(starts)
        rows = rows[np.argsort(part[rows], kind="stable")]
        _, group, sizes = np.unique(part[rows], return_inverse=True, return_counts=True)
        rows = rows[sizes[group] > LARGEST_PART]
    return part


def widest_directions(vectors: Floats, starts: Integers, group: Integers) -> Floats:
    """For each group, the direction between two of its documents that lie far apart: (groups, D)."""
    sums: Floats = np.add.reduceat(vectors, starts, axis=0)
    means: Floats = sums / np.bincount(group).astype(np.float32)[:, None]
    one = vectors[farthest(vectors, means, starts, group)]
    other = vectors[farthest(vectors, one, starts, group)]
    return other - one


def farthest(vectors: Floats, points: Floats, starts: Integers, group: Integers) -> Integers:
    """For each group, the row of the document that is farthest from the group's point."""
    distances = np.square(vectors - points[group]).sum(axis=1)
    return np.lexsort((-distances, group))[starts]


def means_and_bonus(rows: RankingRows, starts: Integers) -> RankingRows:
    """One row for each part, by which it scores as its best document is expected to; `starts` are the first rows.

    The best of n draws stands about sqrt(2 ln n) deviations above their mean, so a part with documents that are unlike
    each other is nearer than its mean. How much of their distances from the mean is along a query, is measured.
    """
    sizes = np.diff(starts, append=len(rows.vectors)).astype(np.float32)
    sums: Floats = np.add.reduceat(rows.vectors, starts, axis=0)
    means = sums / sizes[:, None]
    squares = np.add.reduceat(np.square(rows.vectors).sum(axis=1), starts) / sizes
    spread = np.sqrt(np.maximum(squares - np.square(means).sum(axis=1), 0))
    bias = np.add.reduceat(rows.bias, starts) / sizes
    return RankingRows(means, bias + SPREAD_ALONG_A_QUERY * spread * np.sqrt(2 * np.log(sizes)))
