"""What the frozen layers make of a set of texts, computed once: every training step and the index start from it.

With a wholly frozen encoder a document is one vector, so that training costs minutes on a CPU instead of hours.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.array_cache import ArrayCache
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

    The result goes to files in the folder `cache`; what the same encoder has made of the same texts already, in this
    run or in another one with the same cache, is taken from there.
    """
    wants_pooled = model.encoder.is_frozen
    wants_states = keep_states and model.encoder.frozen_layers > 0
    if not wants_pooled and not wants_states:
        return Features(tokens, None, None)
    arrays = ArrayCache(cache)
    keys = cache_keys(model, tokens, of_tokens) if cache is not None else CacheKeys("", "", "")
    pooled = arrays.find(keys.pooled, mapped=False) if wants_pooled else None
    states = find_states(arrays, keys, of_tokens) if wants_states else None
    lacks_pooled, lacks_states = wants_pooled and pooled is None, wants_states and states is None
    if lacks_pooled or lacks_states:
        width = model.encoder.shape.width
        kept = of_tokens if of_tokens is not None else np.ones(len(tokens.ids), dtype=bool)
        new_pooled = arrays.new(keys.pooled, (len(tokens), width), np.float32) if lacks_pooled else None
        new_states = arrays.new(keys.states, (int(kept.sum()), width), np.float16) if lacks_states else None
        run_frozen_layers(model, tokens, new_pooled, new_states, kept, progress)
        if new_pooled is not None:
            pooled = arrays.keep(keys.pooled, new_pooled, mapped=False)
        if new_states is not None:
            states = looked_up(arrays.keep(keys.states, new_states, mapped=True), of_tokens)
    return Features(tokens, pooled, states)


def run_frozen_layers(
    model: Asi,
    tokens: TokenisedTexts,
    pooled: NDArray[np.float32] | None,
    states: NDArray[np.float16] | None,
    kept_tokens: NDArray[np.bool_],
    progress: Progress | None,
) -> None:
    """Fill the arrays that are given: the pooled vectors of all texts, and the states of the tokens that are kept."""
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


class CacheKeys(NamedTuple):
    """Under which names results are kept: they change with what the results depend on."""

    pooled: str
    states: str  # of the tokens that are named
    all_states: str


def cache_keys(model: Asi, tokens: TokenisedTexts, of_tokens: NDArray[np.bool_] | None) -> CacheKeys:
    """From the frozen weights, how they are computed with, the texts, the pooling and the tokens that are named."""
    digest = hashlib.sha256(str(model.encoder.precision).encode())
    for name, weight in model.encoder.state_dict().items():
        if not name.startswith("layers.") or int(name.split(".")[1]) < model.encoder.frozen_layers:
            digest.update(weight.cpu().numpy().tobytes())
    digest.update(tokens.ids.tobytes())
    digest.update(tokens.offsets.tobytes())

    def key(kept: bytes) -> str:
        own = digest.copy()
        own.update(kept)
        return own.hexdigest()[:32]

    all_states = key(b"states")
    named = key(b"states" + np.packbits(of_tokens).tobytes()) if of_tokens is not None else all_states
    return CacheKeys(key(f"pooled {model.config.pooling}".encode()), named, all_states)


def find_states(arrays: ArrayCache, keys: CacheKeys, of_tokens: NDArray[np.bool_] | None) -> States | None:
    """Those of all tokens serve too who wants some."""
    if (whole := arrays.find(keys.all_states, mapped=True)) is not None:
        return whole
    named = arrays.find(keys.states, mapped=True)
    return looked_up(named, of_tokens) if named is not None else None


def looked_up(states: NDArray[np.float16], of_tokens: NDArray[np.bool_] | None) -> States:
    return states if of_tokens is None else SomeStates(states, of_tokens)
