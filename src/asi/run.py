"""A training run from data set to searchable folder: settings, texts, frozen features, training, model, index."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asi.batches import TrainingPairs, TrainingTexts, contents, training_texts
from asi.checkpoint import RunFolder, load_model, resumed_step, save_model, saved_config, saved_steps
from asi.config import Config, to_dict, to_toml
from asi.datasets import Dataset
from asi.distributed import Processes, choose_device, joined_processes
from asi.encoder import TextTokeniser, TokenisedTexts, find_encoder, load_encoder, load_tokeniser
from asi.errors import CheckpointError, ConfigError, Interrupted
from asi.features import Features, compute_features
from asi.folders import write_atomically
from asi.indexing import CorpusFeatures, build_store, counted
from asi.lengths import suited_length
from asi.matching import matched_tokens, start_matcher
from asi.memory import keep_freed_memory
from asi.metrics import collapse_warning
from asi.model import Asi
from asi.objective import AsiObjective
from asi.planning import planned_steps
from asi.training import StepReport, Trainer, fit


class Reporter(Protocol):
    """Told about the progress of a run; the command line draws it."""

    def stage(self, name: str, total: int) -> None: ...
    def advance(self, done: int) -> None: ...
    def step(self, report: StepReport) -> None: ...
    def message(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
    def lane(self, label: str) -> AbstractContextManager["Reporter"]: ...  # for one of several things at a time


class Silence:
    """The reporter of a caller who wants none."""

    def stage(self, name: str, total: int) -> None: ...
    def advance(self, done: int) -> None: ...
    def step(self, report: StepReport) -> None: ...
    def message(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...

    def lane(self, label: str) -> AbstractContextManager[Reporter]:
        return nullcontext(self)


@dataclass(frozen=True)
class RunState:
    """What a run must remember from its first moment on: a resumed run is the same run."""

    config: Config
    data: str
    steps: int | None = None  # until the speed is measured
    texts: str | None = None  # fingerprint of the training texts, when they have been read
    more_pairs: int = 0  # that were trained on besides the data set's own

    def save(self, folder: RunFolder) -> None:
        values = vars(self) | {"config": to_dict(self.config)}
        write_atomically(folder.run, json.dumps(values, indent=1))

    @classmethod
    def load(cls, folder: RunFolder) -> "RunState":
        try:
            values = json.loads(folder.run.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder.run}, which says what the run is, can't be read ({error})") from error
        return cls(**(values | {"config": saved_config(values["config"], folder.path)}))

    def check_texts(self, texts: TrainingTexts, path: Path) -> None:
        """Refuse to go on with, or to measure, a run that was begun on other texts."""
        if self.texts not in (None, texts.fingerprint()):
            raise ConfigError(f"the texts of {self.data!r} have changed since {path} was begun; choose another folder")


@dataclass(frozen=True)
class Prepared:
    """Everything that training starts from."""

    config: Config  # with the length of texts that suits the data, if none was given
    texts: TrainingTexts
    queries: Features
    documents: Features
    model: Asi
    tokenise: TextTokeniser
    trainer: Trainer


def open_run(path: Path, config: Config, data: str, *, resume: bool) -> tuple[RunFolder, RunState]:
    """The folder of a new run, or of one that goes on with the settings it began with."""
    folder = RunFolder(path)
    if resume and folder.run.exists():
        state = RunState.load(folder)
        if state.data != data:
            raise ConfigError(f"{path} was trained on {state.data!r}, not on {data!r}; choose another folder")
        return folder, state
    if folder.run.exists():
        raise ConfigError(f"{path} holds a run already; continue it with --resume, or choose another folder")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is not empty and holds no run; choose another folder")
    path.mkdir(parents=True, exist_ok=True)
    state = RunState(config, data)
    state.save(folder)
    return folder, state


def check_same_run(path: Path, config: Config, data: str) -> None:
    """Refuse a folder with a run that was trained or indexed with other settings, or on other data.

    How it is searched is not looked at: whoever measures it opens it with the search settings that are wanted.
    """
    folder = RunFolder(path)
    if folder.run.exists():
        state = RunState.load(folder)
        if (replace(state.config, search=config.search), state.data) != (config, data):
            raise ConfigError(f"{path} holds a run with other settings or other data; choose another folder")


def train(
    dataset: Dataset,
    path: Path,
    config: Config,
    *,
    data: str | None = None,
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
    stopping: Callable[[], bool] = lambda: False,
    cache: Path | None = None,
    all_counts: bool = True,
) -> RunFolder:
    """Train on a data set's `train` split and index its documents. Raises Interrupted if `stopping` says so.

    `data` is the name under which the run remembers its data. In the folder `cache` the output of the frozen layers is
    kept for other runs on the same texts; without one it is kept only until the run is finished. A run's minutes
    include reading and encoding; if not `all_counts`, they are for the steps alone.
    """
    started = time.monotonic()
    keep_freed_memory()
    reporter = reporter or Silence()
    chosen = choose_device(device)
    with joined_processes(chosen) as processes:
        if processes.is_main:
            folder, state = open_run(path, config, data or dataset.name, resume=resume)
        folder, state = processes.agree((folder, state) if processes.is_main else None)
        reporter = reporter if processes.is_main else Silence()
        if resume and state.config != config:
            reporter.message("resuming with the settings that the run began with")
        if is_finished(folder):
            state.check_texts(training_texts(dataset), path)
            reporter.message(f"{path} is trained already")
            return folder
        reporter.message(to_toml(state.config))
        prepared = prepare(dataset, cache or folder.cache, state.config, chosen, processes, reporter, stopping)
        texts = prepared.texts
        state.check_texts(texts, path)
        steps = state.steps or planned_steps(
            prepared.trainer, state.config.train, started if all_counts else None, reporter.warning
        )
        if processes.is_main and state.steps is None:
            more_pairs = len(texts.pairs) - texts.own
            RunState(state.config, state.data, steps, texts.fingerprint(), more_pairs).save(folder)
        reporter.stage("training", steps)
        if processes.is_main:
            trim_log(folder, resumed_step(folder))
        with run_log(folder, reporter, state.config.model.V, active=processes.is_main) as listener:
            finished = fit(prepared.trainer, steps, folder, listener, stopping)
        if not finished:
            raise Interrupted(
                f"the state is saved in {folder.checkpoints}; continue with --resume (asi study: run it again)"
            )
        if processes.is_main:
            finish(folder, prepared, reporter)
    return folder


def prepare(
    dataset: Dataset,
    cache: Path,
    config: Config,
    device: torch.device,
    processes: Processes,
    reporter: Reporter,
    stopping: Callable[[], bool] = lambda: False,
) -> Prepared:
    """Load the texts and the encoder, and run the frozen layers once over all texts."""

    def advance(done: int, _: int) -> None:
        reporter.advance(done)
        if processes.count == 1 and stopping():  # one of several processes can't leave by itself
            raise Interrupted("training had not begun; go on with --resume (asi study: run it again)")

    reporter.stage("reading", 0)
    texts = training_texts(dataset)
    source = find_encoder(config.model.encoder)
    if (max_length := config.model.max_length) is None:
        max_length = suited_length(config.model.encoder, texts.documents)
        config = replace(config, model=replace(config.model, max_length=max_length))
        reporter.message(f"the first {max_length} tokens of a text are read")
    torch.manual_seed(config.train.seed)
    model = Asi(load_encoder(source, config.model.frozen_layers, config.model.precision), config.model).to(device)
    tokenise = load_tokeniser(source, max_length)

    def encoded(name: str, tokens: TokenisedTexts, keep: bool, of_tokens: NDArray[np.bool_] | None = None) -> Features:
        reporter.stage(f"encoding {name}", len(tokens))
        with processes.main_first():
            return compute_features(model, tokens, keep_states=keep, of_tokens=of_tokens, cache=cache, progress=advance)

    queries = encoded("queries", tokenise(texts.queries), keep=True)
    tokens = tokenise(contents(texts.documents))
    start_matcher(model, tokens, np.unique(texts.pairs[:, 1]))
    keep = not model.encoder.is_frozen or model.matcher is not None
    documents = encoded("documents", tokens, keep, matched_tokens(model, tokens))
    train = config.train
    pairs = TrainingPairs(texts.pairs, train.seed, train.batch, texts.own, train.more_share)
    if pairs.batch < train.batch:
        reporter.message(f"the data has {len(texts.pairs)} training pairs: batches have {pairs.batch} of them")
    possible = config.model.V**config.model.m
    if possible < 2 * len(texts.documents):
        reporter.message(f"only {possible} docids for {len(texts.documents)} documents; consider a larger model.m")
    objective = AsiObjective(model, queries, documents, pairs, config)
    trainer = Trainer(objective, train, processes)
    return Prepared(config, texts, queries, documents, model, tokenise, trainer)


def finish(folder: RunFolder, prepared: Prepared, reporter: Reporter) -> None:
    """Save the model, index the corpus with what is computed already, and clear up."""
    save_model(folder.model, prepared.model, prepared.tokenise, prepared.config)
    loaded = load_model(folder.model, prepared.model.device)
    reporter.stage("indexing", len(prepared.texts.documents))
    documents, queries = prepared.documents, prepared.queries._replace(states=None)
    if not prepared.model.encoder.is_frozen:
        # From the texts, as a new document would be: kept states are rounded, and a docid could come out otherwise.
        documents = documents._replace(states=None)
    corpus = CorpusFeatures(documents, queries, prepared.texts.own_pairs)
    build_store(folder, loaded, prepared.texts.documents, corpus, counted(reporter.advance))
    shutil.rmtree(folder.cache, ignore_errors=True)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)


def is_finished(folder: RunFolder) -> bool:
    """Checkpoints are removed last, when model and store are in place."""
    return folder.model.exists() and folder.store.exists() and not saved_steps(folder)


def trim_log(folder: RunFolder, step: int) -> None:
    """Drop what was logged after the checkpoint that the run goes on from: those steps are done again."""
    if folder.log.exists():
        lines = folder.log.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        write_atomically(folder.log, "".join(f"{line}\n" for line in kept))


@contextmanager
def run_log(folder: RunFolder, reporter: Reporter, V: int, *, active: bool) -> Iterator[Callable[[StepReport], None]]:
    """A listener that passes reports on, keeps them as JSON lines, and warns when docids collapse."""
    if not active:
        yield lambda report: None
        return
    file = folder.log.open("a", encoding="utf-8")
    board = tensorboard_writer(folder)
    warned = False

    def listen(report: StepReport) -> None:
        nonlocal warned
        reporter.step(report)
        if report.losses is None and report.health is None:
            return
        record: dict[str, Any] = {"step": report.step, "steps": report.steps, "time": round(time.time(), 3)}
        if report.losses is not None:
            record |= {"losses": report.losses, "pairs_per_second": round(report.pairs_per_second, 1)}
        if report.health is not None:
            record["health"] = report.health._asdict()
            warning = collapse_warning(report.health, V) if report.step > report.steps // 10 else None
            if warning and (not warned or report.step == report.steps):
                reporter.warning(warning)
                warned = True
            if warning:
                record["warning"] = warning
        file.write(json.dumps(record) + "\n")
        file.flush()
        if board is not None:
            for name, value in scalars(record):
                board.add_scalar(name, value, report.step)

    try:
        yield listen
    finally:
        file.close()
        if board is not None:
            board.close()


def scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a log record that make a curve, by name."""
    for name, value in record.get("losses", {}).items():
        yield f"loss/{name}", value
    for name in ("docids", "d_per_id", "largest_bucket"):
        if "health" in record:
            yield f"health/{name}", record["health"][name]


def tensorboard_writer(folder: RunFolder) -> Any | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder.tensorboard))
