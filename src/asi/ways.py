"""Several systems on the same splits with the same measures: the ways to search an index, and the plain baselines."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asi.datasets import Dataset
from asi.evaluation import DEPTH, DocidMap, Run, evaluate_documents, evaluate_searchers
from asi.index import Index
from asi.judges import Judge
from asi.metrics import Reports
from asi.pretrained import pretrained_embedding
from asi.records import Retriever
from asi.systems.exact import ExactRetriever
from asi.systems.lexical import LexicalRetriever
from asi.trec import write_trec_run

# The ways to search that are compared; settings as in SearchConfig.
WAYS: dict[str, dict[str, Any]] = {
    "asi": {"mode": "constrained"},
    "asi-beam": {"mode": "beam"},
    "asi-one-pass": {"mode": "one-pass", "ranking": "vector", "candidates": 100},
    "asi-one-pass-docids": {"mode": "one-pass", "ranking": "docid"},
}
NAME_OF_MODE = {"constrained": "asi", "beam": "asi-beam", "one-pass": "asi-one-pass"}


def possible_ways(opened: Index) -> dict[str, dict[str, Any]]:
    """Those that the run has what it takes for: not all have a decoder and vectors."""
    return {name: way for name, way in WAYS.items() if opened.configured(**way).lacks() is None}


def evaluate_ways(
    opened: Index,
    dataset: Dataset,
    splits: Sequence[str],
    ways: Mapping[str, Mapping[str, Any]],
    judge: Judge | None = None,
    k: int = DEPTH,
) -> tuple[Reports, dict[str, Run]]:
    """Ways to search one index, k hits a query; the answers of each way to the queries of all splits come along."""
    searchers = {name: opened.configured(**settings) for name, settings in ways.items()}
    docid_map = DocidMap(opened.searcher)
    reports: Reports = {name: {} for name in ways}
    answers: dict[str, Run] = {name: {} for name in ways}
    for split in splits:
        found, runs = evaluate_searchers(searchers, *dataset.judged(split), docid_map, judge, k)
        for name in ways:
            reports[name][split] = found[name]
            answers[name] |= runs[name]
    return reports, answers


def evaluate_index(
    opened: Index,
    dataset: Dataset,
    splits: Sequence[str],
    settings: Mapping[str, Any],
    *,
    baselines: bool = False,
    run_file: Path | None = None,
    k: int = DEPTH,
    stage: Callable[[str], None] = lambda name: None,
) -> Reports:
    """One way to search, and the baselines if asked for; the answers go to a TREC run file if one is named."""
    way = opened.configured(**settings).config
    name = NAME_OF_MODE[way.mode] + ("-docids" if way.ranking == "docid" else "")
    stage("asking the queries")
    reports, answers = evaluate_ways(opened, dataset, splits, {name: settings}, k=k)
    if run_file is not None:
        write_trec_run(run_file, answers[name], name)
    if not baselines:
        return reports
    stage("BM25 and the untrained encoder")
    return reports | evaluate_baselines(baselines_of(opened), dataset, splits, k)


def baselines_of(opened: Index, cache: Path | None = None) -> dict[str, Retriever]:
    """BM25 and the untrained encoder's exact search, over the documents of the index.

    `cache` is that of the training run, if it was kept: the documents need not be encoded again.
    """
    documents = [stored.document for stored in opened.store.stored_documents()]
    model = opened.loaded.model
    config = model.config
    embed = pretrained_embedding(config.encoder, opened.loaded.tokenise.max_length, model.device, config.pooling)
    vectors = embed([document.content for document in documents], cache)
    return {
        "bm25": LexicalRetriever(documents),
        "encoder": ExactRetriever([document.key for document in documents], vectors, embed),
    }


def evaluate_baselines(
    systems: Mapping[str, Retriever], dataset: Dataset, splits: Sequence[str], k: int = DEPTH
) -> Reports:
    """The measures that every system has."""
    judged = {split: dataset.judged(split) for split in splits}
    return {
        name: {split: evaluate_documents(system, *judged[split], k)[0] for split in splits}
        for name, system in systems.items()
    }
