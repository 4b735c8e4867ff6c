"""What each code stands for in a corpus: a vector and a bias, which add up to what a docid's documents are like.

The heads learn codes from training pairs; which of the documents they have never seen share a code, only the corpus
says. The score of a docid is then m look-ups as by the heads, and no document's vector is looked at. The table has the
size of the heads, however many documents there are.
Letters: n documents, Q queries, m docid length, V codes per position, D width.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.ranking import RankingRows

LARGEST_TABLE = 2**13  # codes at all positions together: the equations have that number squared of entries
RIDGE = np.float32(0.3)  # draws the vectors of rare codes to 0


class CodeVectors(NamedTuple):
    vectors: Tensor  # (m, V, D)
    biases: Tensor  # (m, V)

    def scores(self, x: Tensor) -> Tensor:
        """What every code is worth to queries' unit vectors (Q, D): (Q, m, V), to be summed over a docid's codes."""
        return (x @ self.vectors.flatten(0, 1).T).unflatten(1, self.biases.shape) + self.biases


def fit_code_vectors(codes: NDArray[np.integer], rows: RankingRows, V: int) -> CodeVectors:
    """The least squares of documents' rows against the sums of their codes' (n, m), with a ridge."""
    n, m = codes.shape
    columns = codes.astype(np.int64) + V * np.arange(m)
    has_code = scipy.sparse.csr_array(
        (np.ones(n * m, np.float32), columns.ravel(), m * np.arange(n + 1)), shape=(n, m * V)
    )
    wanted = has_code.T @ np.concatenate([rows.vectors, rows.bias[:, None]], axis=1)
    equations = (has_code.T @ has_code).toarray() + RIDGE * np.eye(m * V, dtype=np.float32)
    found = torch.from_numpy(scipy.linalg.solve(equations, wanted, assume_a="pos")).unflatten(0, (m, V))
    return CodeVectors(found[..., :-1].contiguous(), found[..., -1].contiguous())
