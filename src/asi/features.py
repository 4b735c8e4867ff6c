"""What the frozen layers make of a set of texts, computed once: every training step and the index start from it.

With a wholly frozen encoder a document is one vector, so that training costs minutes on a CPU instead of hours.
"""

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Sequence
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


class JoinedStates:
    """Token states of several lists of texts, looked up as if they stood one behind the other; none are copied."""

    def __init__(self, parts: Sequence[NDArray[np.float16]]) -> None:
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)])

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[np.float16]:
        found = np.empty((*places.shape, self.parts[0].shape[1]), dtype=np.float16)
        owner = np.searchsorted(self.starts, places, side="right") - 1
        for i, part in enumerate(self.parts):
            own = owner == i
            found[own] = part[places[own] - self.starts[i]]
        return found


class SomeStates:
    """States of some of the tokens, looked up by the places that these have among all."""

    def __init__(self, states: NDArray[np.float16], kept: NDArray[np.bool_]) -> None:
        self.states = states
        self.row_of = rows_among(kept)

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[np.float16]:
        return self.states[self.row_of[places]]


def rows_among(kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each place the row that it has among those that are kept; some row, where it is not kept."""
    rows: NDArray[np.int64] = np.maximum(np.cumsum(kept), 1) - 1
    return rows


States = NDArray[np.float16] | JoinedStates | SomeStates  # looked up by places in the list of all tokens


class Features(NamedTuple):
    """The texts, and as much of their encoding as can't change in training."""

    tokens: TokenisedTexts
    pooled: NDArray[np.float32] | None  # (texts, D), if the encoder is wholly frozen
    states: States | None  # (tokens, D) after the frozen layers, if they are kept


def compute_features(
    model: Asi,
    tokens: TokenisedTexts,
    *,
    keep_states: bool,
    of_tokens: NDArray[np.bool_] | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Features:
    """Run the frozen layers over all texts, and keep the states of all tokens, or of those that are named.

    The result goes to a folder under `cache`, and is taken from there if the same encoder has already been over the
    same texts: in this run, or in another one with the same cache.
    """
    frozen = model.encoder.is_frozen
    keep_states = keep_states and model.encoder.frozen_layers > 0
    if not frozen and not keep_states:
        return Features(tokens, None, None)
    of_tokens = of_tokens if keep_states else None
    place = cache / cache_key(model, tokens, frozen, keep_states, of_tokens) if cache is not None else None
    if place is not None and place.exists():
        return read_cache(place, tokens, frozen, keep_states, of_tokens)
    if cache is not None and (whole := cache / cache_key(model, tokens, frozen, True)).exists():
        return read_cache(whole, tokens, frozen, keep_states)  # it has what is wanted, and more states
    width = model.encoder.shape.width
    pooled = np.empty((len(tokens), width), dtype=np.float32) if frozen else None
    beside = begin_cache(place) if place is not None else None
    kept_tokens = of_tokens if of_tokens is not None else np.ones(len(tokens.ids), dtype=bool)
    states = new_states(beside, (int(kept_tokens.sum()), width)) if keep_states else None
    row_of = rows_among(kept_tokens)
    done = 0
    batches = tokens.batches(TOKENS_PER_BATCH)
    random.Random(0).shuffle(batches)  # short texts first would make the time that is left look short
    for rows in batches:
        ids, mask = (part.to(model.device) for part in tokens.padded(rows))
        with torch.inference_mode():
            batch = model.encoder.lower(ids, mask)
            if pooled is not None:
                pooled[rows] = model.pool(batch, mask).float().cpu().numpy()
        if states is not None:
            places, kept = tokens.places(rows)
            kept &= kept_tokens[places]
            states[row_of[places[kept]]] = batch.cpu().numpy()[kept]
        done += len(rows)
        if progress is not None:
            progress(done, len(tokens))
    if place is None or beside is None:
        return Features(tokens, pooled, looked_up(states, of_tokens))
    if pooled is not None:
        np.save(beside / "pooled.npy", pooled)
    if isinstance(states, np.memmap):
        states.flush()
    finish_cache(beside, place)
    return read_cache(place, tokens, frozen, keep_states, of_tokens)


def encode(model: Asi, features: Features, rows: NDArray[np.int64], *, states: bool = True) -> Encoded:
    """Finish the encoding of the texts `rows`, with gradients into whatever is trained.

    Without `states` the token states are there only if the encoding needs them.
    """
    pooled = on_device(model, features.pooled[rows]) if features.pooled is not None else None
    if features.states is not None and (states or pooled is None):
        places, kept = features.tokens.places(rows)
        mask = torch.from_numpy(kept).to(model.device)
        lower = on_device(model, features.states[places]) * mask[:, :, None]
        return model.finish(lower if pooled is not None else model.encoder.upper(lower, mask), mask, pooled)
    if pooled is not None:  # a document: nothing looks at its token states
        return model.finish(pooled[:, None], torch.ones(len(rows), 1, dtype=torch.bool, device=model.device), pooled)
    ids, mask = features.tokens.padded(rows)
    return model.encode(ids.to(model.device), mask.to(model.device))


def docids_of(model: Asi, features: Features, rows: NDArray[np.int64], x: Tensor) -> Tensor:
    """The docids (n, m) of the texts `rows` with the vectors x: what the heads say, or the control's random codes."""
    if model.config.docids == "random":
        return torch.from_numpy(random_docids(features.tokens, rows, model.config.m, model.config.V)).to(x.device)
    return model.heads(x).argmax(-1)


def random_docids(tokens: TokenisedTexts, rows: NDArray[np.int64], m: int, V: int) -> NDArray[np.int64]:
    """Docids (n, m) that depend on nothing but the text, and mean nothing."""
    places, kept = tokens.places(rows)
    words = np.where(kept, tokens.ids[places] + 1, 0).astype(np.uint64)
    mixed = (words * np.cumprod(np.full(words.shape[1], 0x9E3779B97F4A7C15, dtype=np.uint64))).sum(1)
    codes = []
    for _ in range(m):  # an integer hash: each round is as good as another draw
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(1)
        codes.append((mixed >> np.uint64(33)) % np.uint64(V))
    return np.stack(codes, axis=1).astype(np.int64)


def on_device(model: Asi, array: NDArray[np.floating[Any]]) -> Tensor:
    return torch.from_numpy(array).to(model.device, model.dtype)


def cache_key(
    model: Asi, tokens: TokenisedTexts, pooled: bool, states: bool, of_tokens: NDArray[np.bool_] | None = None
) -> str:
    """Changes with the frozen weights, how they are computed with, the pooling, the texts and what is kept of them."""
    digest = hashlib.sha256(f"{model.config.pooling} {model.encoder.precision} {pooled} {states}".encode())
    for name, weight in model.encoder.state_dict().items():
        if not name.startswith("layers.") or int(name.split(".")[1]) < model.encoder.frozen_layers:
            digest.update(weight.cpu().numpy().tobytes())
    digest.update(tokens.ids.tobytes())
    digest.update(tokens.offsets.tobytes())
    if of_tokens is not None:
        digest.update(np.packbits(of_tokens).tobytes())
    return digest.hexdigest()[:32]


def read_cache(
    place: Path, tokens: TokenisedTexts, pooled: bool, states: bool, of_tokens: NDArray[np.bool_] | None = None
) -> Features:
    return Features(
        tokens,
        np.load(place / "pooled.npy") if pooled else None,
        looked_up(np.load(place / "states.npy", mmap_mode="r") if states else None, of_tokens),
    )


def looked_up(states: NDArray[np.float16] | None, of_tokens: NDArray[np.bool_] | None) -> States | None:
    return states if states is None or of_tokens is None else SomeStates(states, of_tokens)


def new_states(beside: Path | None, shape: tuple[int, int]) -> NDArray[np.float16]:
    """Room for the token states: in a file if there is a cache, because memory may not hold those of a large corpus."""
    if beside is None:
        return np.empty(shape, dtype=np.float16)
    return np.lib.format.open_memmap(beside / "states.npy", mode="w+", dtype=np.float16, shape=shape)


def begin_cache(place: Path) -> Path:
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def finish_cache(beside: Path, place: Path) -> None:
    if place.exists():  # another process was faster: the same content
        shutil.rmtree(beside)
    else:
        beside.rename(place)
