"""Ragged arrays: many ranges of rows at once, without a loop."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Expanded(NamedTuple):
    items: NDArray[np.int64]
    owners: NDArray[np.int64]


def expand_ranges(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Expanded:
    """All numbers of many ranges, and the range that each comes from.

    >>> items, owners = expand_ranges(np.array([3, 7, 8]), np.array([5, 7, 9]))
    >>> items.tolist(), owners.tolist()
    ([3, 4, 8], [0, 0, 2])
    """
    counts = ends - starts
    owners = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Expanded(starts[owners] + within, owners)
