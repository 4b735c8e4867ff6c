"""Ragged arrays: many ranges of rows at once, and rows by their group, without a loop."""

from typing import NamedTuple, Self

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


class Groups(NamedTuple):
    """Rows by the group that they are in."""

    rows: NDArray[np.int64]  # (n,) group after group, ascending within each
    offsets: NDArray[np.int64]  # (groups + 1,) where the rows of each begin

    @classmethod
    def of(cls, group: NDArray[np.int64], count: int) -> Self:
        """From the group of each row (n,), a number below `count`.

        >>> groups = Groups.of(np.array([2, 0, 2]), 3)
        >>> [groups.members(number).tolist() for number in range(3)]
        [[1], [], [0, 2]]
        """
        rows = np.argsort(group, kind="stable")
        return cls(rows, np.searchsorted(group[rows], np.arange(count + 1)))

    def members(self, group: int) -> NDArray[np.int64]:
        return self.rows[self.offsets[group] : self.offsets[group + 1]]
