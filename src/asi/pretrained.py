"""An encoder as it was pretrained, with nothing trained, and nothing that will be."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asi.config import ModelConfig
from asi.encoder import TextTokeniser, find_encoder, load_encoder, load_tokeniser
from asi.features import compute_features
from asi.model import Asi


class Embed(Protocol):
    """Texts to vectors (n, D); what frozen layers make of them may be kept in, or taken from, a cache."""

    def __call__(self, texts: Sequence[str], cache: Path | None = None) -> NDArray[np.float32]: ...


def load_pretrained(
    encoder: str, max_length: int, device: torch.device, pooling: str = "mean"
) -> tuple[Asi, TextTokeniser]:
    source = find_encoder(encoder)
    config = ModelConfig(encoder=encoder, max_length=max_length, pooling=pooling, token_width=0)
    model = Asi(load_encoder(source, None, config.precision), config)
    return model.to(device).eval().requires_grad_(False), load_tokeniser(source, max_length)


def pretrained_embedding(encoder: str, max_length: int, device: torch.device, pooling: str = "mean") -> Embed:
    """Pooled token states."""
    model, tokenise = load_pretrained(encoder, max_length, device, pooling)

    def embed(texts: Sequence[str], cache: Path | None = None) -> NDArray[np.float32]:
        pooled = compute_features(model, tokenise(texts), keep_states=False, cache=cache).pooled
        assert pooled is not None, "a wholly frozen encoder has pooled vectors"
        return pooled

    return embed
