"""What all systems of a comparison share: data, the frozen encoder and what it makes of texts, minutes, a folder."""

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from asi.batches import TrainingPairs, TrainingTexts, contents, training_texts
from asi.checkpoint import RunFolder, read_manifest, save_folder
from asi.config import TrainConfig
from asi.datasets import Dataset, open_dataset
from asi.distributed import Processes
from asi.encoder import TextTokeniser, TokenisedTexts
from asi.errors import ConfigError, Interrupted
from asi.expansion import generator_training, pseudo_queries_file, queries_by_document
from asi.features import Features, JoinedStates, compute_features
from asi.folders import locked
from asi.generator import GeneratorConfig
from asi.memory import keep_freed_memory
from asi.model import Asi, Encoded
from asi.planning import planned_steps
from asi.pretrained import load_pretrained
from asi.records import Docid, Retriever
from asi.run import Reporter
from asi.texts import words
from asi.training import Objective, Trainer, fit

NEW_DOCUMENTS = "unseen"  # how the name of a split ends whose documents come when training has ended
PSEUDO_QUERIES = 5  # of a document
SPANS = 2  # of a document: random parts of its text
SPAN_WORDS = 16
HEAVIEST = 8  # terms of a document
WHOLE_TEXT = 512  # tokens
BEGINNING = 32  # tokens of a document, which DSI learns from

Model = TypeVar("Model", bound=nn.Module)


class DocidLevel(Protocol):
    """The docid-level side of a system that has docids."""

    @property
    def of_documents(self) -> NDArray[np.int64]:
        """Each document's docid (N, any width); a row of -1 for documents that have none."""

    def docids(self, queries: Sequence[str], count: int) -> list[list[Docid]]:
        """The docids that are found for each query, best first."""


class Training(NamedTuple):
    """What it took."""

    minutes: float = 0.0
    steps: int = 0
    pairs: int = 0  # that were seen, again and again

    def and_also(self, other: "Training") -> "Training":
        return Training(self.minutes + other.minutes, self.steps + other.steps, self.pairs + other.pairs)


@dataclass(frozen=True)
class Built:
    """A system that is ready to answer, and what it costs."""

    retriever: Retriever
    parameters: int  # that were trained
    training: Training
    bytes_per_document: float  # of what the answers are looked up in: codes, vectors, postings, n-grams; no texts
    docids: DocidLevel | None = None
    close: Callable[[], None] = lambda: None  # what the retriever holds open


class Source(NamedTuple):
    """Texts, and the documents that they stand for."""

    texts: list[str]
    pairs: NDArray[np.int64]  # (n, 2): text, document
    tokens: int | None = None  # of a text that are read, if not as many as of all others


class Reading(NamedTuple):
    """Several sources as one list of texts, with what the encoder makes of them."""

    features: Features
    sources: dict[str, Source]
    offsets: dict[str, int]  # row of each source's first text

    def pairs(self, name: str) -> NDArray[np.int64]:
        """(n, 2): the row of each pair's text, and its document."""
        pairs: NDArray[np.int64] = self.sources[name].pairs + np.array([self.offsets[name], 0])
        return pairs

    @property
    def all_pairs(self) -> NDArray[np.int64]:
        return np.concatenate([self.pairs(name) for name in self.sources])


@dataclass(frozen=True)
class Terms:
    """The equal terms of a comparison."""

    minutes: float  # of training, for every system that is trained
    encoder: str
    max_length: int  # tokens of a text that the encoder reads
    seed: int = 0
    jobs: int = 1  # systems at a time; each has its share of the processor's cores

    def __post_init__(self) -> None:
        if not 0 < self.minutes < float("inf"):
            raise ConfigError(f"--minutes must be positive, got {self.minutes}")
        if self.jobs < 1:
            raise ConfigError(f"--jobs must be at least 1, got {self.jobs}")


class Workplace:
    def __init__(
        self,
        dataset: Dataset,
        out: Path,
        terms: Terms,
        device: torch.device,
        reporter: Reporter,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        keep_freed_memory()
        self.dataset = dataset
        self.out = out
        self.terms = terms
        self.device = device
        self.reporter = reporter
        self.stopping = stopping

    def folder(self, name: str) -> Path:
        return self.out / "systems" / name

    @property
    def cache(self) -> Path:
        return self.out / "cache"

    @cached_property
    def texts(self) -> TrainingTexts:
        return training_texts(self.dataset)

    @cached_property
    def pretrained(self) -> tuple[Asi, TextTokeniser]:
        return load_pretrained(self.terms.encoder, self.terms.max_length, self.device)

    @property
    def encoder(self) -> Asi:
        return self.pretrained[0]

    @property
    def tokenise(self) -> TextTokeniser:
        return self.pretrained[1]

    @cached_property
    def tokenise_whole(self) -> TextTokeniser:
        """For texts that are looked up, and not read by the encoder."""
        return self.tokenise.cut_at(WHOLE_TEXT)

    @cached_property
    def known(self) -> NDArray[np.int64]:
        """The documents that there are when systems are trained, ascending.

        The others come when training has ended: those that a split of new documents asks for, and no training pair.
        """
        unseen = [name for name in self.dataset.splits if name.endswith(NEW_DOCUMENTS)]
        asked = {qrel.document for name in unseen for qrel in self.dataset.judged(name)[1]}
        is_new = np.array([key in asked for key in self.keys])
        is_new[self.texts.pairs[:, 1]] = False
        return np.flatnonzero(~is_new)

    @cached_property
    def keys(self) -> list[str]:
        return [document.key for document in self.texts.documents]

    def advance(self, done: int, _: int = 0) -> None:
        """Tell how far something is, and leave it if the comparison is to stop."""
        self.reporter.advance(done)
        self.leave_if_stopping()

    def leave_if_stopping(self) -> None:
        if self.stopping():
            raise self.interrupted()

    def interrupted(self) -> Interrupted:
        return Interrupted(f"what is finished is kept in {self.out}; go on with --resume")

    def features(self, texts: Sequence[str], length: int | None = None) -> Features:
        """What the encoder makes of texts, token states included; computed once for all systems."""
        tokenise = self.tokenise if length is None else self.tokenise.cut_at(min(length, self.terms.max_length))
        tokens = tokenise(texts)
        with locked(self.cache / "encoding.lock", self.leave_if_stopping):
            self.reporter.stage("encoding", len(tokens))
            return compute_features(self.encoder, tokens, keep_states=True, cache=self.cache, progress=self.advance)

    @cached_property
    def documents(self) -> Features:
        return self.features(contents(self.texts.documents))

    def encode(self, tokens: TokenisedTexts) -> Encoded:
        """Queries that are being asked."""
        ids, mask = tokens.padded(np.arange(len(tokens)))
        with torch.inference_mode():
            return self.encoder.encode(ids.to(self.device), mask.to(self.device))

    # What generative systems learn to read ----------------------------------------------------------------------------

    @cached_property
    def pseudo_queries(self) -> list[list[str]]:
        """Sampled queries of every document, from a generator that is trained on the pairs once for all systems."""
        with locked(self.cache / "generator.lock", self.leave_if_stopping):
            file = pseudo_queries_file(
                self.dataset, self.out, generator_training(self.terms.seed, minutes=self.terms.minutes), PSEUDO_QUERIES,
                self.device, self.reporter, self.stopping, self.cache,
                GeneratorConfig(self.terms.encoder, self.terms.max_length),
            )  # fmt: skip
        if not file.stat().st_size:
            raise ConfigError(
                f"the generator in {file.parent} has written no query; does the encoder know the language of the texts?"
            )
        found = queries_by_document(open_dataset(str(file)))
        return [found.get(key, []) for key in self.keys]

    @property
    def generator_cost(self) -> tuple[int, Training]:
        """Parameters and training of the generator of the pseudo queries."""
        _ = self.pseudo_queries
        origin = read_manifest(self.out / "generator")
        return origin["parameters"], Training(origin["minutes"], origin["steps"], origin["pairs"])

    def source(self, name: str) -> Source:
        """Texts of the known documents, by name: queries, pseudo, documents, beginnings (of these), spans or terms."""
        makers: dict[str, Callable[[], list[list[str]]]] = {
            "pseudo": lambda: [self.pseudo_queries[row] for row in self.known],
            "documents": lambda: [[text] for text in self.known_contents],
            "beginnings": lambda: [[text] for text in self.known_contents],
            "spans": lambda: random_spans(self.known_contents, self.terms.seed),
            "terms": lambda: [[text] for text in rarest_terms(self.known_contents)],
        }
        if name == "queries":
            return Source(self.texts.queries, self.texts.pairs)
        numbers: dict[str, int] = {}  # of the texts: one that several documents have is the same text of all of them
        pairs = [
            (numbers.setdefault(text, len(numbers)), document)
            for texts, document in zip(makers[name](), self.known.tolist(), strict=True)
            for text in dict.fromkeys(texts)
        ]
        tokens = BEGINNING if name == "beginnings" else None
        return Source(list(numbers), np.array(pairs, dtype=np.int64).reshape(-1, 2), tokens)

    def reading(self, names: Sequence[str]) -> Reading:
        sources = {name: self.source(name) for name in names}
        starts = np.cumsum([0, *(len(source.texts) for source in sources.values())]).tolist()
        features = joined([self.features(source.texts, source.tokens) for source in sources.values()])
        return Reading(features, sources, dict(zip(sources, starts, strict=False)))

    @property
    def known_contents(self) -> list[str]:
        return [self.texts.documents[row].content for row in self.known]

    # Training ---------------------------------------------------------------------------------------------------------

    def new_model(self, make: Callable[[], Model]) -> Model:
        """A model whose random start depends on the comparison's seed alone, not on what ran before."""
        torch.manual_seed(self.terms.seed)
        return make().to(self.device)

    def pairs(self, pairs: NDArray[np.int64], batch: int) -> TrainingPairs:
        return TrainingPairs(pairs, self.terms.seed, batch)

    def train(self, name: str, objective: Objective, codes: NDArray[np.int64] | None = None) -> Training:
        """Train for the comparison's minutes, not counting what all systems share. Finished weights are read instead,
        if they were trained for the docids `codes` that there are now.

        A system is trained in one go: what a broken-off training left is thrown away.
        """
        place = self.folder(name) / "weights"
        docids = "" if codes is None else hashlib.sha256(np.ascontiguousarray(codes).tobytes()).hexdigest()
        if place.exists() and (kept := read_manifest(place)).get("docids") == docids:
            objective.model.load_state_dict(load_file(place / "weights.safetensors", device=str(self.device)))
            return Training(kept["minutes"], kept["steps"], kept["pairs"])
        run = RunFolder(self.folder(name) / "training")
        shutil.rmtree(run.path, ignore_errors=True)
        run.path.mkdir(parents=True)
        config = TrainConfig(
            minutes=self.terms.minutes, batch=objective.pairs.batch, chunk=objective.pairs.batch, checkpoint_every=10**9
        )
        trainer = Trainer(objective, config, Processes(0, 1, self.device))
        self.reporter.stage("measuring the speed", 0)
        steps = planned_steps(trainer, config, started=None)
        self.reporter.stage("training", steps)
        started = time.monotonic()

        if not fit(trainer, steps, run, self.reporter.step, self.stopping):
            raise self.interrupted()
        weights = {name: weight.detach().contiguous() for name, weight in objective.model.state_dict().items()}
        training = Training((time.monotonic() - started) / 60, steps, steps * objective.pairs.batch)
        manifest = training._asdict() | {"docids": docids}
        save_folder(place, lambda beside: save_file(weights, beside / "weights.safetensors"), manifest)
        shutil.rmtree(run.path)
        return training


def joined(parts: Sequence[Features]) -> Features:
    """The features of several lists of texts as those of one."""
    tokens = TokenisedTexts(
        np.concatenate([part.tokens.ids for part in parts]),
        np.append(0, np.cumsum(np.concatenate([part.tokens.lengths for part in parts]))),
        parts[0].tokens.pad,
    )
    pooled = [part.pooled for part in parts if part.pooled is not None]
    states = [part.states for part in parts if isinstance(part.states, np.ndarray)]
    return Features(tokens, np.concatenate(pooled), JoinedStates(states))


def parameters_of(*parts: nn.Module | None) -> int:
    return sum(parameter.numel() for part in parts if part is not None for parameter in part.parameters())


def random_spans(texts: Sequence[str], seed: int) -> list[list[str]]:
    """Parts of each text, at random places."""
    draw = np.random.default_rng(seed)
    found = []
    for text in texts:
        parts = text.split()
        starts = draw.integers(0, max(1, len(parts) - SPAN_WORDS + 1), size=SPANS)
        found.append([" ".join(parts[start : start + SPAN_WORDS]) for start in starts])
    return found


def rarest_terms(texts: Sequence[str]) -> list[str]:
    """The terms of each text that weigh most in TF-IDF, heaviest first."""
    counted = [np.unique(words(text), return_counts=True) for text in texts]
    frequency = Counter(term for terms, _ in counted for term in terms.tolist())
    found = []
    for terms, counts in counted:
        weights = counts * np.log(len(texts) / np.array([frequency[term] for term in terms.tolist()] or [1]))
        found.append(" ".join(terms[np.argsort(-weights, kind="stable")[:HEAVIEST]].tolist()))
    return found


def require_faiss() -> None:
    try:
        import faiss  # noqa: F401
    except ImportError:
        raise ConfigError("this system needs faiss; run: pip install 'auto-search-indexer[compare]'") from None
