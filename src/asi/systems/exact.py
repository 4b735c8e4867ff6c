"""Exact search with vectors: every document is compared with every query. What a shortcut is measured against."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from asi.beam import stable_topk
from asi.pretrained import Embed
from asi.records import Hit


class ExactRetriever:
    """Cosine similarity with all documents."""

    def __init__(self, keys: Sequence[str], vectors: NDArray[np.float32], embed: Embed) -> None:
        self.keys = keys
        self.vectors: Tensor = F.normalize(torch.from_numpy(vectors), dim=-1)  # (N, D)
        self.embed = embed

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        vectors = F.normalize(torch.from_numpy(self.embed(queries)), dim=-1)
        scores, rows = stable_topk(vectors @ self.vectors.T, k)
        return [
            [Hit(self.keys[row], score) for row, score in zip(best, values, strict=True)]
            for best, values in zip(rows.tolist(), scores.tolist(), strict=True)
        ]
