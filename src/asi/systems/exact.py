"""Exact search with vectors: every document is compared with every query. What a shortcut is measured against."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from asi.beam import stable_topk
from asi.encoder import find_encoder, load_encoder, load_tokeniser
from asi.features import compute_features
from asi.model import Asi
from asi.records import Hit


class Embed(Protocol):
    """Texts to vectors (n, D); what frozen layers make of them may be kept in, or taken from, a cache."""

    def __call__(self, texts: Sequence[str], cache: Path | None = None) -> NDArray[np.float32]: ...


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


def untrained_embedding(model: Asi) -> Embed:
    """Vectors as the pretrained encoder of this model's settings gives them, with nothing trained."""
    source = find_encoder(model.config.encoder)
    encoder = load_encoder(source, frozen_layers=1_000).to(model.device)
    tokenise = load_tokeniser(source, model.config.max_length)
    plain = Asi(encoder, model.config).to(model.device)

    def embed(texts: Sequence[str], cache: Path | None = None) -> NDArray[np.float32]:
        pooled = compute_features(plain, tokenise(texts), keep_states=False, cache=cache).pooled
        assert pooled is not None, "a wholly frozen encoder has pooled vectors"
        return pooled

    return embed
