"""The folder of a run as one object: the whole library behind load, add, delete, search, evaluate."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np

from asi.batches import TooFewPairs, TrainingTexts, contents, training_texts
from asi.checkpoint import LoadedModel, RunFolder, damaged_files, load_model, read_manifest
from asi.config import SearchConfig, with_settings
from asi.datasets import Dataset
from asi.distributed import choose_device
from asi.errors import AsiError, StoreError
from asi.evaluation import DocidMap, Run, evaluate_searchers
from asi.features import compute_features
from asi.indexing import (
    DOCUMENTS_PER_BATCH,
    Added,
    CorpusFeatures,
    add_documents,
    assign_texts,
    build_store,
    counted,
    replace_store,
)
from asi.matching import matched_tokens
from asi.metrics import DocidHealth, Report, docid_health
from asi.records import Docid, Document, Hit
from asi.run import Reporter, Silence
from asi.search import Searcher
from asi.store import Store, StoredDocument, only_writer

DOCUMENTS_ASKED_AGAIN = 64  # by the doctor: does the model give them the docids that the store has?
STATES = ".states-"


class Index:
    """A trained model and its store. Searching sees changes that other processes make, from the next call on."""

    def __init__(self, folder: RunFolder, device: str | None = None, search: SearchConfig | None = None) -> None:
        self.folder = folder
        self.search_config = search
        self.loaded = load_model(folder.model, choose_device(device))
        self.replaced: list[Store] = []  # others may be reading them still
        self.open_store()

    def open_store(self) -> None:
        self.store = Store.open(self.folder.store, fingerprint=self.loaded.fingerprint)
        self.searcher = Searcher(self.loaded, self.store, self.search_config)

    def follow(self) -> None:
        """Turn to the store that has taken the place of ours, if one has: `asi index` was run meanwhile."""
        if self.store.is_replaced():
            self.replaced.append(self.store)
            self.open_store()

    @classmethod
    def load(cls, path: str | Path, device: str | None = None, search: SearchConfig | None = None) -> Self:
        """Open a run's folder; it is searched with these settings, or else with those that it was saved with."""
        folder = RunFolder(Path(path))
        if not folder.path.is_dir():
            raise StoreError(f"there is no folder {path}; run: asi train DATA --out {path}")
        return cls(folder, device, search)

    def close(self) -> None:
        for store in (*self.replaced, self.store):
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        self.follow()
        return len(self.store)

    def add(
        self,
        documents: Iterable[Document],
        *,
        added: Added | None = None,
        batch: int = DOCUMENTS_PER_BATCH,
        wait: float = 0,
    ) -> int:
        """Add documents, or replace those with a known key: searchable and durable when this returns.

        Documents become visible `batch` at a time; `added` is called with each batch that is durable.
        """
        with Store.open(self.folder.store, fingerprint=self.loaded.fingerprint, writable=True, wait=wait) as store:
            return add_documents(self.loaded, store, documents, added, batch)

    def delete(self, keys: Sequence[str], *, wait: float = 0) -> None:
        """Delete documents: all of them, or none if a key is unknown."""
        delete_documents(self.folder, keys, wait=wait)

    def configured(self, **settings: Any) -> Searcher:
        """A searcher with other search settings, by the names that they have in SearchConfig."""
        self.follow()
        config: SearchConfig = with_settings(self.searcher.config, "search", settings)
        return Searcher(self.loaded, self.store, config, self.searcher.views)

    def search(self, queries: Sequence[str], k: int = 10, **settings: Any) -> list[list[Hit]]:
        return self.configured(**settings).search(queries, k)

    def evaluate(self, dataset: Dataset, split: str, **settings: Any) -> tuple[Report, Run]:
        """The measures and the answers for a split."""
        searchers = {"asi": self.configured(**settings)}
        reports, runs = evaluate_searchers(searchers, *dataset.judged(split), DocidMap(self.searcher))
        return reports["asi"], runs["asi"]

    def lookup(self, key: str) -> StoredDocument:
        self.follow()
        if (found := self.store.lookup(key)) is None:
            raise StoreError(f"no document has the key {key!r}")
        return found

    def bucket(self, docid: Docid) -> list[Document]:
        self.follow()
        numbers = self.store.snapshot().bucket(docid)
        return [document for document in self.store.documents(numbers.tolist()) if document is not None]

    def health(self) -> DocidHealth:
        self.follow()
        snapshot = self.store.snapshot()
        return docid_health(np.repeat(snapshot.codes, np.diff(snapshot.offsets), axis=0).astype(np.int64))


def rebuild(
    path: Path, dataset: Dataset, *, device: str | None = None, reporter: Reporter | None = None, wait: float = 0.0
) -> int:
    """Replace a run's store by one of this data set's documents, ranked by its training queries too if it has any."""
    folder = RunFolder(path)
    reporter = reporter or Silence()
    loaded = load_model(folder.model, choose_device(device))
    if (texts := texts_with_queries(dataset, loaded)) is None:
        reporter.stage("indexing", 0)
        return build_store(folder, loaded, dataset.documents(), added=counted(reporter.advance), wait=wait)

    def advance(done: int, _: int) -> None:
        reporter.advance(done)

    with only_writer(folder.store, wait), states_folder(path) as cache:
        tokens = loaded.tokenise(contents(texts.documents))
        matched = matched_tokens(loaded.model, tokens)
        reporter.stage("encoding documents", len(tokens))
        documents = compute_features(
            loaded.model, tokens, keep_states=matched is not None, of_tokens=matched, cache=cache, progress=advance
        )
        reporter.stage("encoding queries", len(texts.queries))
        queries = compute_features(loaded.model, loaded.tokenise(texts.queries), keep_states=False, progress=advance)
        corpus = CorpusFeatures(documents, queries, texts.own_pairs)
        reporter.stage("indexing", len(tokens))
        return replace_store(folder, loaded, texts.documents, corpus, counted(reporter.advance))


def texts_with_queries(dataset: Dataset, loaded: LoadedModel) -> TrainingTexts | None:
    """The data set's texts, if documents are ranked by their training queries and it has some."""
    if "train" not in dataset.splits or not loaded.config.index.known_queries:
        return None
    try:
        return training_texts(dataset)
    except TooFewPairs:
        return None


@contextmanager
def states_folder(path: Path) -> Iterator[Path]:
    """A folder for the states of tokens, which memory may not hold; what a killed process left of its own goes."""
    for left_over in path.glob(f"{STATES}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with TemporaryDirectory(prefix=STATES, dir=path) as folder:
        yield Path(folder)


def delete_documents(folder: RunFolder, keys: Sequence[str], *, wait: float = 0) -> None:
    """Needs no model: deleting is quick."""
    with Store.open(folder.store, writable=True, wait=wait) as store:
        store.delete(keys)


def examine(path: Path) -> Iterator[tuple[str, list[str]]]:
    """What the doctor looks at, one part after the other: its name and the problems found there."""
    folder = RunFolder(path)
    if not path.is_dir():
        raise StoreError(f"there is no folder {path}")
    yield "model", problems(lambda: damaged_files(folder.model, read_manifest(folder.model, verify=False)))
    for checkpoint in sorted(folder.checkpoints.glob("step-*")):
        yield checkpoint.name, problems(lambda c=checkpoint: damaged_files(c, read_manifest(c, verify=False)))  # type: ignore[misc]
    yield "store", problems(lambda: check_store(folder))


def check_store(folder: RunFolder) -> list[str]:
    """The store's own consistency, and that this model made it: a sample of its documents gets the same docids.

    Hardware that computes at another precision may have given them, so either precision may be right.
    """
    loaded = load_model(folder.model, choose_device(None))
    with Store.open(folder.store, fingerprint=loaded.fingerprint) as store:
        found = store.check()
        sample = list(islice(store.stored_documents(), DOCUMENTS_ASKED_AGAIN))
        tokens = loaded.tokenise([item.document.content for item in sample])
        other = {item.document.key for item in sample}
        for precision in ("float32", "bfloat16"):
            loaded.model.encoder.precision = precision
            docids = map(tuple, assign_texts(loaded.model, tokens).docids.tolist())
            other -= {item.document.key for item, docid in zip(sample, docids, strict=True) if item.docid == docid}
        if other:
            found.append(f"the model gives {len(other)} of {len(sample)} documents another docid, e.g. {min(other)!r}")
        return found


def problems(look: Callable[[], list[str]]) -> list[str]:
    try:
        return look()
    except AsiError as error:
        return [str(error)]
