"""A generator of queries that is trained on the user's pairs: document -> query.

The frozen encoder reads the document, a small decoder writes the query word piece by word piece, and at each place it
can copy a word piece of the document or take one of its own vocabulary. Queries are sampled, not searched for: a beam's
queries are nearly alike.
Letters: B batch, T tokens of the document, L tokens of the query, D width, d decoder width, W words of the vocabulary.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asi.batches import Batch, TrainingPairs, TrainingTexts, contents
from asi.checkpoint import RunFolder, read_manifest, resumed_step, save_folder
from asi.config import TrainConfig
from asi.distributed import Processes
from asi.encoder import TextTokeniser, TokenisedTexts
from asi.errors import ConfigError, Interrupted
from asi.features import Features, Progress, compute_features
from asi.folders import write_atomically
from asi.model import STARTING_SPREAD, Asi, DecoderLayer, table_of_words
from asi.planning import planned_steps
from asi.pretrained import load_pretrained
from asi.training import Listener, Nothing, ParameterGroup, PlainObjective, Trainer, fit

LONGEST_QUERY = 64  # word pieces; less where the queries that are learnt from are shorter
WRITTEN_WHOLE = 0.95  # share of these that it has room for
SAMPLED_FROM = 10  # the likeliest choices at each place
TOKENS_AT_ONCE = 8192
STILL_WORTH_IT = 0.8  # share of documents with unfinished queries at which the others are left out
MOST_EPOCHS, LEAST_STEPS = 8, 50  # where the length is given in minutes
KIND = "query generator"


@dataclass(frozen=True)
class GeneratorConfig:
    encoder: str
    max_length: int  # tokens of a document
    width: int = 256
    layers: int = 2
    heads: int = 4
    longest: int = LONGEST_QUERY  # word pieces of a query


class CopyDecoder(nn.Module):
    """Document states to a distribution over word pieces, by generating and by copying."""

    vocabulary: Tensor  # (W,) numbers of word pieces

    def __init__(self, config: GeneratorConfig, memory_width: int, vocabulary: NDArray[np.int64], pieces: int) -> None:
        super().__init__()
        d = config.width
        self.embeddings = nn.Embedding(pieces, d)
        nn.init.normal_(self.embeddings.weight, std=STARTING_SPREAD)
        self.positions = nn.Parameter(STARTING_SPREAD * torch.randn(config.longest, d))
        self.layers = nn.ModuleList(DecoderLayer(d, memory_width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(d)
        self.output = nn.Linear(d, len(vocabulary))
        self.copy_query = nn.Linear(d, d)
        self.copy_key = nn.Linear(memory_width, d)
        self.gate = nn.Linear(d, 1)
        self.register_buffer("vocabulary", torch.from_numpy(vocabulary))

    @property
    def longest(self) -> int:
        """Word pieces of a query, the end included."""
        return len(self.positions)

    @property
    def blocks(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def forward(self, states: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        """Decoder states (B, L, d) at every place of a query whose word pieces so far are `previous` (B, L)."""
        hidden = self.embeddings(previous) + self.positions[: previous.size(1)]
        for layer in self.blocks:
            hidden = layer(hidden, layer.memory_keys_values(states, mask), mask)
        return self.norm(hidden)

    @torch.no_grad()
    def start(self, vectors: Tensor) -> None:
        """Let the tables begin as the encoder's vectors of all word pieces: also of those that only documents have."""
        rows = table_of_words(vectors, self.output.in_features)
        self.embeddings.weight[:, : rows.size(1)] = rows
        self.output.weight[:, : rows.size(1)] = rows[self.vocabulary]

    def copying(self, hidden: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Copying each token of the document (B, L, T), whose `copy_key` are `keys` (B, T, d), and the share of copying
        (B, L, 1)."""
        scores = self.copy_query(hidden) @ keys.transpose(1, 2) / hidden.size(-1) ** 0.5
        copied = scores.masked_fill(~mask[:, None, :], -torch.inf).softmax(-1)
        return copied, self.gate(hidden).sigmoid()

    def likelihood(
        self, hidden: Tensor, states: Tensor, mask: Tensor, source: Tensor, target: Tensor, rows: Tensor
    ) -> Tensor:
        """The probability (B, L) of the word pieces `target`; `rows` are their places in the vocabulary, or -1: those
        can only be copied."""
        copied, share = self.copying(hidden, self.copy_key(states), mask)
        known = rows >= 0
        losses = F.cross_entropy(self.output(hidden[known]), rows[known], reduction="none")
        written = torch.zeros_like(hidden[:, :, 0]).masked_scatter(known, torch.exp(-losses))
        taken = (copied * (source[:, None, :] == target[:, :, None])).sum(-1)
        return (1 - share[:, :, 0]) * written + share[:, :, 0] * taken

    def choices(self, hidden: Tensor, keys: Tensor, mask: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Everything that can be written or copied behind each of `hidden` (B, L, d): its probability and its word
        piece, both (B, L, W + T). A piece that the vocabulary and the document have is there more than once."""
        copied, share = self.copying(hidden, keys, mask)
        probabilities = torch.cat([(1 - share) * self.output(hidden).softmax(-1), share * copied], dim=-1)
        pieces = torch.cat([self.vocabulary.expand(len(source), -1), source], dim=1)
        return probabilities, pieces[:, None].expand_as(probabilities)


class ExpansionObjective(PlainObjective):
    """Document to query, for the project's one training loop."""

    def __init__(
        self,
        model: CopyDecoder,
        documents: Features,
        queries: TokenisedTexts,
        pairs: TrainingPairs,
        lr: float,
        start: int | None = None,
    ) -> None:
        self.model = model
        self.documents = documents
        self.queries = queries
        self.pairs = pairs
        self.lr = lr
        self.start = start  # what stands before a query, if the tokeniser puts nothing there
        self.rows = torch.full((model.embeddings.num_embeddings,), -1)  # word piece -> place in the vocabulary
        self.rows[model.vocabulary.cpu()] = torch.arange(len(model.vocabulary))

    def parameter_groups(self) -> dict[str, ParameterGroup]:
        return {"decoder": ParameterGroup(list(self.model.parameters()), self.lr)}

    def represent(self, batch: Batch) -> tuple[Nothing, tuple[Tensor, Tensor, Tensor]]:
        return Nothing(), document_memory(self.documents, batch.documents, self.model.positions)

    def pair_losses(
        self,
        representations: Nothing,
        memory: tuple[Tensor, Tensor, Tensor],
        batch: Batch,
        chosen: NDArray[np.bool_],
        phase: Any,
    ) -> dict[str, Tensor]:
        """Negative log-likelihood of the queries, per word piece, summed over the pairs."""
        states, mask, source = memory
        ids, kept = self.queries.padded(batch.queries)
        if self.start is not None:  # texts that begin at once, as T5's
            ids, kept = F.pad(ids, (1, 0), value=self.start), F.pad(kept, (1, 0), value=True)
        ids, kept = (part[:, : self.model.longest + 1].to(states.device) for part in (ids, kept))
        previous, target, real = ids[:, :-1], ids[:, 1:], kept[:, 1:]
        hidden = self.model(states, mask, previous)
        rows = self.rows.to(states.device)[target].masked_fill(~real, -1)  # nothing is computed behind a query's end
        likelihood = self.model.likelihood(hidden, states, mask, source, target, rows)
        # A piece that can be neither written nor copied has no likelihood, and teaches nothing.
        losses = -(likelihood.clamp(min=1e-9).log()) * (real & (likelihood > 0))
        return {"generation": (losses.sum(1) / real.sum(1).clamp(min=1)).sum()}


def document_memory(features: Features, rows: NDArray[np.int64], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token states (B, T, D), mask (B, T) and token numbers (B, T) of documents."""
    assert features.states is not None, "the documents' token states are kept"
    places, kept = features.tokens.places(rows)
    mask = torch.from_numpy(kept).to(like.device)
    states = torch.from_numpy(features.states[places]).to(like.device, like.dtype) * mask[:, :, None]
    source = torch.from_numpy(np.where(kept, features.tokens.ids[places], 0).astype(np.int64)).to(like.device)
    return states, mask, source


class TrainedGenerator:
    """Our own generator: encoder, decoder and tokeniser."""

    name = "our own generator"

    def __init__(self, encoder: Asi, decoder: CopyDecoder, tokenise: TextTokeniser) -> None:
        self.encoder = encoder
        self.decoder = decoder.eval()
        self.tokenise = tokenise

    def generate(self, texts: Sequence[str], count: int, seed: int) -> list[list[str]]:
        tokens = self.tokenise(texts)
        found: list[list[str]] = [[] for _ in texts]
        for number, rows in enumerate(tokens.batches(TOKENS_AT_ONCE)):
            features = compute_features(self.encoder, subset(tokens, rows), keep_states=True)
            memory = document_memory(features, np.arange(len(rows)), self.decoder.positions)
            draw = torch.Generator(device=memory[0].device).manual_seed(seed * 1_000_003 + number)
            pieces = sample_queries(self.decoder, *memory, *self.ends(), count, draw)
            written = self.tokenise.tokeniser.decode_batch(pieces.flatten(0, 1).tolist(), skip_special_tokens=True)
            for place, text in zip(np.repeat(rows, count).tolist(), written, strict=True):
                found[place].append(" ".join(text.split()))
        return found

    def ends(self) -> tuple[int, int]:
        """The word pieces that every text begins and ends with."""
        empty = self.tokenise([""]).ids
        return int(empty[0]), int(empty[-1])


def subset(tokens: TokenisedTexts, rows: NDArray[np.int64]) -> TokenisedTexts:
    ids = np.concatenate([tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]] for row in rows])
    return TokenisedTexts(ids, np.append(0, np.cumsum(tokens.lengths[rows])), tokens.pad)


@torch.inference_mode()
def sample_queries(
    decoder: CopyDecoder,
    states: Tensor,
    mask: Tensor,
    source: Tensor,
    start: int,
    end: int,
    count: int,
    draw: torch.Generator,
) -> Tensor:
    """`count` sampled queries for each document of the memory: word pieces (B, count, L), filled up with `end`."""
    pieces = torch.full((len(states), count, decoder.longest + 1), end, device=states.device)
    pieces[:, :, 0] = start
    rows = torch.arange(len(states), device=states.device)  # documents that have a query to finish
    memories = [layer.memory_keys_values(states, mask) for layer in decoder.blocks]
    copy_keys = decoder.copy_key(states)
    kept: list[tuple[Tensor, Tensor] | None] = [None] * len(memories)
    for place in range(decoder.longest):
        hidden = decoder.embeddings(pieces[rows, :, place]) + decoder.positions[place]  # (documents, count, d)
        for number, layer in enumerate(decoder.blocks):
            hidden, kept[number] = layer.self_step(hidden, kept[number])
            hidden = layer.cross_and_inner(hidden, memories[number], mask)
        probabilities, choices = decoder.choices(decoder.norm(hidden), copy_keys, mask, source)
        best, numbers = probabilities.topk(min(SAMPLED_FROM, choices.size(-1)), dim=-1)
        drawn = torch.multinomial(best.flatten(0, 1), 1, generator=draw).unflatten(0, best.shape[:2])
        chosen = choices.gather(-1, numbers.gather(-1, drawn))[:, :, 0]
        is_open = (pieces[rows, :, place] != end) if place else torch.ones_like(chosen, dtype=torch.bool)
        pieces[rows, :, place + 1] = chosen.masked_fill(~is_open, end)
        unfinished = (is_open & (chosen != end)).any(1)
        if not bool(unfinished.any()):
            return pieces[:, :, : place + 2]
        if int(unfinished.sum()) <= STILL_WORTH_IT * len(rows):
            rows, mask, source, copy_keys = (part[unfinished] for part in (rows, mask, source, copy_keys))
            memories = [(keys[unfinished], values[unfinished]) for keys, values in memories]
            kept = [(own[0][unfinished], own[1][unfinished]) for own in kept if own is not None]
    return pieces


def train_generator(
    texts: TrainingTexts,
    data: str,
    folder: Path,
    config: GeneratorConfig,
    train: TrainConfig,
    *,
    device: torch.device,
    listener: Listener,
    announce: Callable[[int], None] = lambda steps: None,
    progress: Progress | None = None,
    stopping: Callable[[], bool] = lambda: False,
    cache: Path | None = None,
) -> TrainedGenerator:
    """Learn document -> query from the pairs, and save the generator in `folder`; goes on where it was stopped.

    `announce` hears the number of steps before the first.
    """
    origin = origin_of(texts, data, config, train)
    run = RunFolder(folder.with_name(f"{folder.name}.training"))
    if (folder / "manifest.json").exists():
        if read_manifest(folder).get("origin") != origin:
            raise ConfigError(f"{folder} was trained on other data or with other settings; choose another --out")
        return load_generator(folder, device)
    begun: dict[str, Any] = json.loads(run.run.read_text(encoding="utf-8")) if run.run.exists() else {}
    if begun and begun.get("origin") != origin:
        raise ConfigError(f"{run.path} belongs to another training; delete it, or choose another --out")
    run.path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(train.seed)
    encoder, tokenise = load_pretrained(config.encoder, config.max_length, device)
    used, rows = np.unique(texts.pairs[:, 1], return_inverse=True)
    documents = contents([texts.documents[row] for row in used])
    features = compute_features(
        encoder, tokenise(documents), keep_states=True, cache=cache or run.cache, progress=progress
    )
    queries = tokenise(texts.queries)
    config = replace(config, longest=suited_longest(queries))
    decoder = CopyDecoder(
        config, encoder.encoder.shape.width, np.unique(queries.ids).astype(np.int64), pieces_of(encoder)
    )
    decoder.start(encoder.encoder.words.weight.cpu())
    pairs = TrainingPairs(np.stack([texts.pairs[:, 0], rows], axis=1), train.seed, train.batch)
    start = None if tokenise.starts else int(queries.ids[-1])
    objective = ExpansionObjective(decoder.to(device), features, queries, pairs, train.lr, start)
    trainer = Trainer(objective, train, Processes(0, 1, device))
    steps: int = begun.get("steps") or min(planned_steps(trainer, train, started=None), most_steps(train, pairs))
    write_atomically(run.run, json.dumps({"origin": origin, "steps": steps}))
    announce(steps)
    started, to_do = time.monotonic(), steps - resumed_step(run)
    if not fit(trainer, steps, run, listener, stopping):
        raise Interrupted(f"the state is saved in {run.checkpoints}; run the same command again to go on")
    minutes = (time.monotonic() - started) / 60 * steps / max(1, to_do)  # of all steps, if some were done before
    cost = {"minutes": minutes, "steps": steps, "pairs": steps * pairs.batch}
    save_generator(folder, config, decoder, origin, cost)
    shutil.rmtree(run.path, ignore_errors=True)
    return TrainedGenerator(encoder, decoder, tokenise)


def origin_of(texts: TrainingTexts, data: str, config: GeneratorConfig, train: TrainConfig) -> dict[str, Any]:
    """What a generator depends on."""
    return {
        "data": data, "texts": texts.fingerprint(), "encoder": config.encoder, "max_length": config.max_length,
        "steps": train.steps, "minutes": train.minutes, "seed": train.seed,
    }  # fmt: skip


def suited_longest(queries: TokenisedTexts) -> int:
    """Word pieces that most of the queries need."""
    return min(LONGEST_QUERY, int(np.quantile(queries.lengths, WRITTEN_WHOLE)))


def most_steps(train: TrainConfig, pairs: TrainingPairs) -> int:
    """Minutes may be more than the pairs are good for."""
    return train.steps or max(LEAST_STEPS, MOST_EPOCHS * pairs.steps_per_epoch)


def pieces_of(encoder: Asi) -> int:
    return encoder.encoder.shape.vocabulary


def save_generator(
    folder: Path, config: GeneratorConfig, decoder: CopyDecoder, origin: dict[str, Any], cost: dict[str, float]
) -> None:
    weights = {name: weight.contiguous() for name, weight in decoder.state_dict().items()}
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    manifest = {"kind": KIND, **asdict(config), "origin": origin, "parameters": parameters, **cost}
    save_folder(folder, lambda beside: save_file(weights, beside / "decoder.safetensors"), manifest)


def load_generator(folder: Path, device: torch.device) -> TrainedGenerator:
    manifest = read_manifest(folder)
    weights = load_file(folder / "decoder.safetensors")
    known = manifest | {"longest": len(weights["positions"])}
    config = GeneratorConfig(**{f.name: known[f.name] for f in fields(GeneratorConfig)})
    encoder, tokenise = load_pretrained(config.encoder, config.max_length, device)
    vocabulary = weights["vocabulary"].numpy()
    decoder = CopyDecoder(config, encoder.encoder.shape.width, vocabulary, pieces_of(encoder))
    decoder.load_state_dict(weights)
    return TrainedGenerator(encoder, decoder.to(device), tokenise)
