"""ASI and its variants as systems of a comparison, and SimCSE over ASI's docids, the paper's control."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from asi.checkpoint import RunFolder
from asi.config import Config, with_overrides
from asi.errors import CheckpointError
from asi.evaluation import DocidMap
from asi.index import Index
from asi.indexing import row_shape
from asi.metrics import Buckets
from asi.records import Docid, Hit
from asi.run import Reporter, train
from asi.search import Searcher
from asi.systems.dense import DenseRetriever, DenseSettings, build_dense
from asi.systems.workplace import Built, Training, Workplace, parameters_of


class SearcherDocids:
    """The docid-level side of an ASI index."""

    def __init__(self, searcher: Searcher, keys: Sequence[str]) -> None:
        self.searcher = searcher
        docid_map = DocidMap(searcher)
        self.of_documents: NDArray[np.int64] = docid_map.docids[[docid_map.rows[key] for key in keys]]

    def docids(self, queries: Sequence[str], count: int) -> list[list[Docid]]:
        return self.searcher.docids(self.searcher.encode(queries), count)


class WithoutMessages:
    """A reporter that shows progress and warnings, but not a run's settings."""

    def __init__(self, reporter: Reporter) -> None:
        self.stage, self.advance, self.step = reporter.stage, reporter.advance, reporter.step
        self.warning, self.lane = reporter.warning, reporter.lane

    def message(self, text: str) -> None: ...


def build_asi(workplace: Workplace, name: str, config: Config) -> Built:
    """Train ASI as `asi train` does, with what the encoder made of the texts taken from the common cache."""
    terms = [
        f"model.encoder={workplace.terms.encoder}",
        f"model.max_length={workplace.terms.max_length}",
        f"train.minutes={workplace.terms.minutes}",
        f"train.seed={workplace.terms.seed}",
    ]
    workplace.features(workplace.texts.queries)  # the minutes are for training alone, as for all systems
    _ = workplace.documents
    folder = train(
        workplace.dataset, workplace.folder(name) / "run", with_overrides(config, terms), resume=True,
        device=str(workplace.device), reporter=WithoutMessages(workplace.reporter), stopping=workplace.stopping,
        cache=workplace.cache, all_counts=False,
    )  # fmt: skip
    return open_asi(workplace, folder)


def trained_run(workplace: Workplace, name: str) -> RunFolder:
    """The run of another system, which must be there already."""
    folder = RunFolder(workplace.folder(name) / "run")
    if not folder.model.exists():
        raise CheckpointError(f"it needs the run of the system {name}; compare {name} too")
    return folder


def build_searched(workplace: Workplace, of: str, settings: Mapping[str, Any]) -> Built:
    """The run of the system `of`, searched in another way."""
    return open_asi(workplace, trained_run(workplace, of), settings)


def open_asi(workplace: Workplace, folder: RunFolder, settings: Mapping[str, Any] | None = None) -> Built:
    index = Index.load(folder.path, str(workplace.device))
    searcher = index.configured(**settings or {})
    model, config = index.loaded.model, index.loaded.config
    trained = parameters_of(
        model.adapter,
        model.heads if config.model.docids == "learned" else None,
        model.matcher,
        model.decoder if config.loss.generation else None,
    )
    docids = SearcherDocids(searcher, workplace.keys)
    each = float(index.store.meta.docid_bytes)
    if config.index.vectors:
        each += row_shape(model).whole
        view = searcher.current_view()
        if searcher.looks_at_centres and (centres := view.centres) is not None:
            each += centres.vectors.nbytes / len(workplace.keys)
        needs_codes = searcher.looks_at_codes and searcher.all_centres(view) is None
        if needs_codes and (codes := view.code_vectors) is not None:
            each += codes.vectors.nbytes / len(workplace.keys)
    batch = workplace.pairs(workplace.texts.pairs, config.train.batch).batch
    return Built(searcher, trained, training_of(folder, batch), each, docids, index.close)


def training_of(folder: RunFolder, batch: int) -> Training:
    """All steps together, without what lay between them if the run was broken off."""
    records = [json.loads(line) for line in folder.log.read_text(encoding="utf-8").splitlines()]
    timed = [(record["step"], record["pairs_per_second"]) for record in records if "pairs_per_second" in record]
    steps = np.diff([0, *(step for step, _ in timed)])
    minutes = float(sum(steps * batch / [speed for _, speed in timed])) / 60
    return Training(minutes, int(steps.sum()), int(steps.sum()) * batch)


class BucketRetriever:
    """Docids ranked by the mean of their documents' vectors, then opened: no decoder."""

    def __init__(self, dense: DenseRetriever, of_documents: NDArray[np.int64]) -> None:
        self.dense = dense
        self.of_documents = of_documents
        buckets = Buckets.of(of_documents)
        self.codes: list[Docid] = [tuple(docid) for docid in buckets.docids.tolist()]
        sums = np.zeros((len(buckets.docids), dense.vectors.shape[1]), dtype=np.float32)
        np.add.at(sums, buckets.of_document, dense.vectors)
        self.centres = F.normalize(torch.from_numpy(sums), dim=-1)
        self.documents = buckets.documents

    def ranked(self, queries: Sequence[str], count: int) -> tuple[list[list[int]], list[list[float]]]:
        vectors = torch.from_numpy(self.dense.query_vectors(queries))
        scores, rows = (vectors @ self.centres.T).topk(min(count, len(self.centres)), dim=1)
        return rows.tolist(), scores.tolist()

    def docids(self, queries: Sequence[str], count: int) -> list[list[Docid]]:
        return [[self.codes[row] for row in own] for own in self.ranked(queries, count)[0]]

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """A docid stands for its documents in the order of the corpus, as in the paper."""
        answers = []
        for rows, scores in zip(*self.ranked(queries, k), strict=True):
            hits = [
                Hit(self.dense.workplace.keys[document], score, self.codes[row])
                for row, score in zip(rows, scores, strict=True)
                for document in self.documents.members(row).tolist()
            ]
            answers.append(hits[:k])
        return answers


def build_simcse_docid(workplace: Workplace, asi: str, dense: str, settings: DenseSettings) -> Built:
    """Docids of the system `asi`, which must be there already; vectors of the system `dense`, trained if need be."""
    folder = trained_run(workplace, asi)
    vectors = build_dense(workplace, dense, settings)
    assert isinstance(vectors.retriever, DenseRetriever)
    ours = open_asi(workplace, folder)
    ours.close()
    docids = ours.docids
    assert docids is not None
    retriever = BucketRetriever(vectors.retriever, docids.of_documents)
    per_document = retriever.centres.numel() * 4 / len(workplace.keys)
    return Built(
        retriever,
        vectors.parameters + ours.parameters,
        vectors.training.and_also(ours.training),
        per_document + 2 * docids.of_documents.shape[1],
        retriever,
    )
