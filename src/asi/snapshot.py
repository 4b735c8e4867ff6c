"""Which documents each docid has, at one moment."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asi.records import Docid

MAX_CODES = 65_536  # V: a code is two bytes at the most


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The whole docid map at one moment, as arrays: bucket u is `numbers[offsets[u]:offsets[u + 1]]`."""

    codes: NDArray[np.uint8] | NDArray[np.uint16]  # (U, m): the docids in use, sorted
    offsets: NDArray[np.int64]  # (U + 1,)
    numbers: NDArray[np.uint32]  # (N,): ascending within a bucket
    transaction: int

    def bucket(self, docid: Docid) -> NDArray[np.uint32]:
        """The numbers of the documents with this docid: none if the docid is not in use."""
        if len(docid) != self.codes.shape[1] or not all(0 <= code <= np.iinfo(self.codes.dtype).max for code in docid):
            return self.numbers[:0]
        start, end = 0, len(self.codes)
        for position, code in enumerate(np.array(docid, self.codes.dtype)):  # another type would copy the whole column
            column = self.codes[start:end, position]
            end = start + int(np.searchsorted(column, code, side="right"))
            start += int(np.searchsorted(column, code))
        return self.numbers[self.offsets[start] : self.offsets[end]]
