"""What the frozen layers make of a set of texts, computed once: every training step and the index start from it.

With a wholly frozen encoder a document is one vector, so that training costs minutes on a CPU instead of hours.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.encoder import TokenisedTexts
from asi.model import Asi, Encoded

TOKENS_PER_BATCH = 4096
Progress = Callable[[int, int], None]  # texts done, texts in all


class Features(NamedTuple):
    """The texts, and as much of their encoding as can't change in training."""

    tokens: TokenisedTexts
    pooled: NDArray[np.float32] | None  # (texts, D), if the encoder is wholly frozen
    states: NDArray[np.float16] | None  # (tokens, D) after the frozen layers, if they are kept


def compute_features(
    model: Asi,
    tokens: TokenisedTexts,
    *,
    keep_states: bool,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Features:
    """Run the frozen layers over all texts. Token states go to a file under `cache`, and are taken from there if
    the same encoder has already been over the same texts."""
    frozen = model.encoder.is_frozen
    keep_states = keep_states and model.encoder.frozen_layers > 0
    if not frozen and not keep_states:
        return Features(tokens, None, None)
    if cache is not None and (found := read_cache(cache, model, tokens, frozen, keep_states)):
        return found
    width = model.encoder.shape.width
    pooled = np.empty((len(tokens), width), dtype=np.float32) if frozen else None
    states = np.empty((len(tokens.ids), width), dtype=np.float16) if keep_states else None
    done = 0
    for rows in tokens.batches(TOKENS_PER_BATCH):
        ids, mask = (part.to(model.device) for part in tokens.padded(rows))
        with torch.inference_mode():
            batch = model.encoder.lower(ids, mask)
            if pooled is not None:
                pooled[rows] = model.pool(batch, mask).float().cpu().numpy()
        if states is not None:
            places, kept = tokens.places(rows)
            states[places[kept]] = batch.cpu().numpy()[kept]
        done += len(rows)
        if progress is not None:
            progress(done, len(tokens))
    features = Features(tokens, pooled, states)
    if cache is not None:
        write_cache(cache, model, features)
    return features


def encode(model: Asi, features: Features, rows: NDArray[np.int64]) -> Encoded:
    """Finish the encoding of the texts `rows`, with gradients into whatever is trained."""
    pooled = on_device(model, features.pooled[rows]) if features.pooled is not None else None
    if features.states is not None:
        places, kept = features.tokens.places(rows)
        mask = torch.from_numpy(kept).to(model.device)
        lower = on_device(model, features.states[places]) * mask[:, :, None]
        return model.finish(lower if pooled is not None else model.encoder.upper(lower, mask), mask, pooled)
    if pooled is not None:  # a document: nothing looks at its token states
        return model.finish(pooled[:, None], torch.ones(len(rows), 1, dtype=torch.bool, device=model.device), pooled)
    ids, mask = features.tokens.padded(rows)
    return model.encode(ids.to(model.device), mask.to(model.device))


def on_device(model: Asi, array: NDArray[np.floating[Any]]) -> Tensor:
    return torch.from_numpy(array).to(model.device, model.dtype)


def cache_key(model: Asi, tokens: TokenisedTexts) -> str:
    """Changes with the frozen weights, the pooling and the texts."""
    digest = hashlib.sha256(model.config.pooling.encode())
    for name, weight in model.encoder.state_dict().items():
        if not name.startswith("layers.") or int(name.split(".")[1]) < model.encoder.frozen_layers:
            digest.update(weight.cpu().numpy().tobytes())
    digest.update(tokens.ids.tobytes())
    digest.update(tokens.offsets.tobytes())
    return digest.hexdigest()


def read_cache(cache: Path, model: Asi, tokens: TokenisedTexts, pooled: bool, states: bool) -> Features | None:
    try:
        manifest = json.loads((cache / "manifest.json").read_text())
    except (OSError, ValueError):
        return None
    if manifest != {"key": cache_key(model, tokens), "pooled": pooled, "states": states}:
        return None
    return Features(
        tokens,
        np.load(cache / "pooled.npy") if pooled else None,
        np.load(cache / "states.npy", mmap_mode="r") if states else None,
    )


def write_cache(cache: Path, model: Asi, features: Features) -> None:
    """The manifest is written last: its existence means that the arrays are whole."""
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "manifest.json").unlink(missing_ok=True)
    for name in ("pooled", "states"):
        if (array := getattr(features, name)) is not None:
            np.save(cache / f"{name}.npy", array)
    manifest = {
        "key": cache_key(model, features.tokens),
        "pooled": features.pooled is not None,
        "states": features.states is not None,
    }
    (cache / "manifest.json").write_text(json.dumps(manifest))
