"""Settings: frozen dataclasses with defaults and checks, presets, TOML in and out, overrides like `train.lr=3e-4`.

The defaults are the preset `small`. The preset `paper` is the objective and the sizes of the paper, and nothing else.
"""

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from asi.errors import ConfigError

POOLINGS = ("mean", "cls")
SEARCH_MODES = ("beam", "constrained", "one-pass")
PRECISIONS = ("auto", "float32", "bfloat16")
DOCIDS = ("learned", "random")
RANKINGS = ("docid", "vector", "sum")
SHORT_TEXT = 64  # tokens: what is read where that holds most documents whole (asi.lengths)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class ModelConfig:
    encoder: str = "all-MiniLM-L6-v2"  # a local folder, the installed default or a name on the Hugging Face hub
    pooling: str = "mean"  # x is the mean of the token states, or the state of [CLS]
    max_length: int | None = None  # tokens of a query or a document; the rest is cut off. By default 64, or 256 if more
    # than a fifth of the documents are longer than 64
    frozen_layers: int | None = None  # lower encoder layers that are never trained, by default all; their output is
    # computed once and reused
    precision: str = "auto"  # of the frozen layers' products: bfloat16 where the hardware has it, else float32
    adapter: int = 1024  # hidden width of the residual layer on x; 0 for none
    docids: str = "learned"  # by the heads; "random" is the control: docids that depend on the text but mean nothing
    m: int = 2  # docid length
    V: int = 1024  # codes per position
    shared_tokens: bool = False  # one table of code embeddings for all positions (the paper's Share) or one for each
    head_adapter: int = 1024  # hidden width of the heads' own residual layer on x; 0 for none
    logit_scale: float = 1.0  # where the learned scale of the heads' logits starts
    decoder_layers: int = 1
    decoder_width: int = 256
    decoder_heads: int = 4
    token_width: int = 64  # of the token vectors that candidates are ranked by, besides x; 0 for none
    kept_tokens: int | None = None  # of a document: its rarest ones; by default 32, of longer texts than 64 tokens 64
    head_prior: bool = True  # the decoder's logits start from the heads' logits on the query

    def __post_init__(self) -> None:
        require(self.pooling in POOLINGS, f"model.pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        require(self.docids in DOCIDS, f"model.docids must be one of {', '.join(DOCIDS)}, got {self.docids!r}")
        require(
            self.precision in PRECISIONS,
            f"model.precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}",
        )
        require(
            self.max_length is None or self.max_length >= 8,
            f"model.max_length must be at least 8, got {self.max_length}",
        )
        require((self.frozen_layers or 0) >= 0, f"model.frozen_layers must not be negative, got {self.frozen_layers}")
        require(self.adapter >= 0, f"model.adapter must not be negative, got {self.adapter}")
        require(self.head_adapter >= 0, f"model.head_adapter must not be negative, got {self.head_adapter}")
        require(self.token_width >= 0, f"model.token_width must not be negative, got {self.token_width}")
        require(
            self.kept_tokens is None or self.kept_tokens >= 1,
            f"model.kept_tokens must be at least 1, got {self.kept_tokens}",
        )
        require(1 <= self.m <= 32, f"model.m must be from 1 to 32, got {self.m}")
        require(2 <= self.V <= 65536, f"model.V must be from 2 to 65536, got {self.V}")
        require(self.logit_scale > 0, f"model.logit_scale must be positive, got {self.logit_scale}")
        require(self.decoder_layers >= 1, f"model.decoder_layers must be at least 1, got {self.decoder_layers}")
        require(
            self.decoder_width % self.decoder_heads == 0,
            f"model.decoder_width {self.decoder_width} must be a multiple of model.decoder_heads {self.decoder_heads}",
        )

    @property
    def tokens_of_document(self) -> int:
        return self.kept_tokens or (32 if (self.max_length or 0) <= SHORT_TEXT else 64)


@dataclass(frozen=True)
class LossConfig:
    """Weights of the terms; a weight of 0 removes the term. The first three are the paper's."""

    generation: float = 1.0  # L_s
    contrastive: float = 0.0005  # gamma_c
    reverse: float = 0.1  # gamma_r
    margin: float = 3.0  # alpha in L_c
    straight_through: bool = True  # the paper's reparameterization: L_s has a gradient into the heads
    straight_through_weight: float = 0.02  # of that gradient, once it is ramped in
    docid_gradient: float = 0.0  # share of the docid terms' gradient that goes on into x and the encoder
    docid_dropout: float = 0.0  # of the components of x that the heads see in training
    vector: float = 1.0  # softmax over the batch on the vectors that rank the candidates
    vector_temperature: float = 0.05
    vector_dropout: float = 0.2  # of the components of the pooled vectors that this term sees
    tokens: float = 1.0  # softmax over a part of the batch on the matches of tokens
    match: float = 0.5  # InfoNCE on expected matches of the heads
    one_pass: float = 0.0  # InfoNCE on the one-pass scores of the rounded docids
    balance: float = 0.4  # codes used evenly at every position

    def __post_init__(self) -> None:
        for f in fields(self):
            require(getattr(self, f.name) >= 0, f"loss.{f.name} must not be negative, got {getattr(self, f.name)}")
        require(self.vector_temperature > 0, "loss.vector_temperature must be positive")
        for name in ("vector_dropout", "docid_dropout"):
            require(getattr(self, name) < 1, f"loss.{name} must be less than 1, got {getattr(self, name)}")


LENGTHS = ("steps", "epochs", "minutes")  # of a run: one of them


@dataclass(frozen=True)
class TrainConfig:
    steps: int | None = None  # the length of the run: give one of steps, epochs, minutes
    epochs: float | None = None
    minutes: float | None = None
    batch: int = 1024  # pairs in a step, over all processes
    chunk: int = 1024  # pairs that go through the network at once; any value gives the same gradient
    generation_batch: int = 256  # pairs of each step that the decoder learns from, until the docids are frozen
    start_heads: float = 0.3  # share of the run for the vectors alone; then the heads start as a quantiser of them
    start_with_queries: bool = False  # a quantiser of documents and their queries: new documents are rounded better
    docid_every: int = 4  # steps: between them only ranking vectors and tokens learn; they need more and cheaper steps
    docid_rounds: float = 48.0  # through the pairs at the most, by the steps for docids; rarer in a longer run, as
    # heads would learn the pairs by heart; 0 for no such bound
    decoder_rounds: float = 32.0  # the same for the decoder alone, once the docids are frozen
    more_share: float = 0.25  # of a batch at most: pairs of --more, such as pseudo queries
    token_batch: int = 128  # pairs of each step whose tokens are matched
    token_negatives: int = 15  # documents of the batch that they are matched with besides: the most similar ones
    lr: float = 2e-3  # of heads and decoder
    matcher_lr: float = 6e-3  # of the token matcher
    adapter_lr: float = 2e-3  # of the adapter on x, which the ranking vectors come from
    adapter_decay: float = 5.0  # weight decay of it with 10,000 pairs; more with fewer (training.residual_group)
    encoder_lr: float = 2e-5  # for encoder layers that are not frozen
    weight_decay: float = 0.01  # of everything else
    warmup_steps: int = 50
    clip: float = 1.0  # of the gradient's norm: decoder, heads, adapter, matcher and encoder each by itself
    straight_through_start: float = 0.3  # share of the run after which L_s's gradient into the heads is ramped in
    straight_through_full: float = 0.5  # and where it has its full weight
    freeze_docids: float = 0.9  # share of the run after which only the decoder learns; 1 for never
    seed: int = 0
    checkpoint_every: int = 500  # steps
    log_every: int = 20  # steps
    health_every: int = 100  # steps between looks at the docids of (a sample of) the corpus

    def __post_init__(self) -> None:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        require(len(given) <= 1, f"give one of train.steps, train.epochs and train.minutes, got {' and '.join(given)}")
        for name in given:
            length = getattr(self, name)
            require(0 < length < math.inf, f"train.{name} must be positive, got {length}")
        for name in (
            "batch",
            "chunk",
            "generation_batch",
            "token_batch",
            "token_negatives",
            "docid_every",
            "checkpoint_every",
            "log_every",
            "health_every",
        ):
            require(getattr(self, name) >= 1, f"train.{name} must be at least 1, got {getattr(self, name)}")
        require(self.batch >= 2, "train.batch must be at least 2: the other documents of the batch are the negatives")
        for name in ("lr", "matcher_lr", "adapter_lr", "encoder_lr", "clip"):
            require(getattr(self, name) > 0, f"train.{name} must be positive, got {getattr(self, name)}")
        for name in ("weight_decay", "adapter_decay", "warmup_steps", "docid_rounds", "decoder_rounds"):
            require(getattr(self, name) >= 0, f"train.{name} must not be negative, got {getattr(self, name)}")
        require(
            0 <= self.straight_through_start <= self.straight_through_full <= 1,
            "train.straight_through_start and straight_through_full must be shares of the run, in this order",
        )
        require(0 <= self.start_heads < 1, f"train.start_heads must be in [0, 1), got {self.start_heads}")
        require(0 <= self.more_share <= 1, f"train.more_share must be from 0 to 1, got {self.more_share}")
        require(0 < self.freeze_docids <= 1, f"train.freeze_docids must be in (0, 1], got {self.freeze_docids}")
        require(self.start_heads < self.freeze_docids, "train.start_heads must come before train.freeze_docids")


@dataclass(frozen=True)
class IndexConfig:
    known_queries: bool = True  # documents are ranked by their training queries too, as far as that helps on the data
    vectors: bool = True  # kept beside the docids to rank by; without them docids are all there is


@dataclass(frozen=True)
class SearchConfig:
    mode: str = "constrained"
    beams: int = 10  # K: docids that are generated for a query
    candidates: int | None = None  # documents that are ranked, at the most; default: 2% of the corpus, at least 100
    ranking: str = "vector"  # candidates are ranked by docid score, by similarity of vectors, or by a weighted sum
    token_weight: float = 0.5  # of the match of tokens beside the similarity of vectors, if the model has token vectors
    matched: int = 100  # candidates whose tokens are matched: the most similar ones
    docid_weight: float = 0.002  # of the docid's score in that sum; the similarity has weight 1
    centre_share: float = 1.0  # of the buckets, the best by their codes, whose centres a query of constrained looks at;
    # with 0 codes alone fill up
    code_weight: float = 80.0  # of the similarity with what a docid's codes stand for in the corpus, beside the heads'
    # log-probability of them; not in the plain beam, nor where docids are all there is to rank by. Where all centres
    # are looked at, of the similarity with them instead
    ahead_weight: float = 0.5  # of that sum, of the best docid ahead, in the beam of constrained
    bucket_cap: int | None = None  # documents of one bucket in an answer, at the most

    def __post_init__(self) -> None:
        require(self.mode in SEARCH_MODES, f"search.mode must be one of {', '.join(SEARCH_MODES)}, got {self.mode!r}")
        require(self.ranking in RANKINGS, f"search.ranking must be one of {', '.join(RANKINGS)}, got {self.ranking!r}")
        require(self.beams >= 1, f"search.beams must be at least 1, got {self.beams}")
        require(
            self.candidates is None or self.candidates >= 1,
            f"search.candidates must be at least 1, got {self.candidates}",
        )
        require(0 <= self.centre_share <= 1, f"search.centre_share must be from 0 to 1, got {self.centre_share}")
        require(self.code_weight >= 0, f"search.code_weight must not be negative, got {self.code_weight}")
        require(self.ahead_weight >= 0, f"search.ahead_weight must not be negative, got {self.ahead_weight}")
        require(self.token_weight >= 0, f"search.token_weight must not be negative, got {self.token_weight}")
        require(self.matched >= 1, f"search.matched must be at least 1, got {self.matched}")
        require(self.docid_weight >= 0, f"search.docid_weight must not be negative, got {self.docid_weight}")
        require(
            self.bucket_cap is None or self.bucket_cap >= 1,
            f"search.bucket_cap must be at least 1, got {self.bucket_cap}",
        )


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        require(
            self.index.vectors or self.search.ranking == "docid", "index.vectors = false needs search.ranking = docid"
        )


PRESETS: dict[str, Config] = {
    "small": Config(),
    # Docids alone: as many codes as a document needs, no decoder, no vectors; search in one pass.
    "docids": Config(
        model=ModelConfig(m=32, V=256, token_width=0),
        loss=LossConfig(generation=0.0, contrastive=0.0, reverse=0.0, tokens=0.0, match=0.0, one_pass=1.0),
        train=TrainConfig(
            start_heads=0.95, start_with_queries=True, docid_every=1, docid_rounds=1.0, freeze_docids=1.0, lr=5e-4
        ),
        index=IndexConfig(known_queries=False, vectors=False),
        search=SearchConfig(mode="one-pass", ranking="docid"),
    ),
    "paper": Config(
        model=ModelConfig(
            encoder="gaunernst/bert-L6-H768-uncased",
            pooling="cls",
            max_length=64,
            frozen_layers=0,
            adapter=0,
            m=4,
            V=256,
            head_adapter=0,
            logit_scale=8.0,
            decoder_layers=6,
            decoder_width=768,
            decoder_heads=12,
            token_width=0,
            head_prior=False,
        ),
        loss=LossConfig(
            contrastive=0.2,
            reverse=0.2,
            straight_through_weight=1.0,
            docid_gradient=1.0,
            vector=0.0,
            vector_dropout=0.0,
            tokens=0.0,
            match=0.0,
            balance=0.0,
        ),
        train=TrainConfig(
            batch=4096,
            chunk=64,
            generation_batch=4096,
            docid_every=1,
            docid_rounds=0.0,
            decoder_rounds=0.0,
            lr=1e-4,
            encoder_lr=1e-4,
            straight_through_start=0.0,
            straight_through_full=0.0,
            start_heads=0.0,
            freeze_docids=1.0,
        ),
        index=IndexConfig(known_queries=False),
        search=SearchConfig(mode="beam", beams=10, ranking="docid"),
    ),
}

# The paper's variants, and a control with random docids and the same decoder, as overrides of any configuration.
VARIANTS: dict[str, tuple[str, ...]] = {
    "unique": ("model.shared_tokens=false",),
    "share": ("model.shared_tokens=true",),
    "no-contrastive": ("loss.contrastive=0",),
    "no-reverse": ("loss.reverse=0",),
    "no-reparameterization": ("loss.straight_through=false",),
    "random-docids": (
        "model.docids=random",
        "train.start_heads=0",
        "model.head_prior=false",
        *(f"loss.{name}=0" for name in ("contrastive", "reverse", "match", "one_pass", "balance")),
    ),
}


# The paper's own objective and docids on a small network: its three losses, straight-through at full weight.
# With two positions its margin of 3 is hardly within reach (two docids are at most 2 m apart), and docids collapse.
PAPER_OBJECTIVE = (
    "model.m=4",
    "model.V=256",
    "loss.contrastive=0.2",
    "loss.reverse=0.2",
    "loss.straight_through_weight=1.0",
    "loss.match=0",
    "loss.one_pass=0",
    "loss.balance=0",
    "model.logit_scale=8.0",
    "model.head_prior=false",
    "train.start_heads=0",
    "search.code_weight=0",
    "search.ahead_weight=0",
)

# As the paper trains; ours spends most steps on what documents are ranked by.
DOCIDS_IN_EVERY_STEP = ("train.docid_every=1", "train.docid_rounds=0", "train.decoder_rounds=0")


def preset(name: str) -> Config:
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; presets are {', '.join(PRESETS)}")
    return PRESETS[name]


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The sections as plain values; settings that are not given are left out, as TOML has no null."""
    sections = dataclasses.asdict(config)
    return {name: {k: v for k, v in values.items() if v is not None} for name, values in sections.items()}


def from_dict(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """`base` with the given settings changed; refuses unknown sections, unknown names and values of another type."""
    base = base or Config()
    sections = {f.name: getattr(base, f.name) for f in fields(Config)}
    for name, settings in values.items():
        require(name in sections, f"unknown section [{name}]; sections are {', '.join(sections)}")
        require(isinstance(settings, Mapping), f"[{name}] must be a table of settings, got {settings!r}")
        sections[name] = with_settings(sections[name], name, settings)
    return Config(**sections)


def with_settings(section: Any, name: str, settings: Mapping[str, Any]) -> Any:
    hints = get_type_hints(type(section))
    if unknown := sorted(settings.keys() - hints.keys()):
        raise ConfigError(f"[{name}] has no setting {', '.join(unknown)}; its settings are {', '.join(hints)}")
    checked = {key: as_type(value, hints[key], f"{name}.{key}") for key, value in settings.items()}
    if name == "train" and checked.keys() & set(LENGTHS):  # a new length replaces the one that the base has
        section = replace(section, **dict.fromkeys(LENGTHS))
    return replace(section, **checked)


def as_type(value: Any, hint: Any, name: str) -> Any:
    kinds = getattr(hint, "__args__", (hint,))
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) in kinds:
        return value
    wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise ConfigError(f"{name} must be {wanted}, got {value!r}")


def with_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Apply `section.name=value` texts together: one alone may contradict what another changes too."""
    return from_dict(parse_overrides(overrides), config)


def parse_overrides(overrides: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`section.name=value` texts as sections of values, which are in TOML notation (a bare word is a string)."""
    changes: dict[str, dict[str, Any]] = {}
    for text in overrides:
        path, equals, value = text.partition("=")
        section, dot, name = path.strip().partition(".")
        require(bool(equals and dot), f"--set takes section.name=value, got {text!r}")
        own = changes.setdefault(section, {})
        for other in LENGTHS if (section, name in LENGTHS) == ("train", True) else ():
            own.pop(other, None)  # a later length replaces an earlier one
        own[name] = parse_value(value.strip())
    return changes


def parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text)  # .2 is no TOML, but everybody writes it
    except ValueError:
        return text


def load_config(path: Path, base: Config) -> Config:
    """Settings of a TOML file on top of `base`, or on top of the preset that the file names (`preset = "paper"`)."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"can't read settings from {path}: {error}") from error
    if "preset" in values:
        base = preset(values.pop("preset"))
    return from_dict(values, base)


def to_toml(config: Config) -> str:
    lines = []
    for section, settings in to_dict(config).items():
        lines += [f"[{section}]", *(f"{name} = {toml_value(value)}" for name, value in settings.items()), ""]
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
