"""Search the queries of a split and measure the answers: the same way for ASI and for every baseline."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from asi.errors import DataError
from asi.judges import Judge, Quality, quality_score
from asi.metrics import (
    Buckets,
    DocidHealth,
    Report,
    accuracy,
    collapse_warning,
    docid_health,
    docid_scores,
    document_level,
    opened_buckets,
    opened_documents,
    relevant_keys,
)
from asi.records import Docid, Hit, Qrel, Query, Retriever
from asi.search import Searcher

QUERIES_PER_CALL = 32
QUERIES_ENCODED_AT_ONCE = 1024
QUERIES_JUDGED_AT_ONCE = 64
DEPTH = 10  # docids and documents that the measures look at, if no more are asked for

Run = dict[str, list[Hit]]
T = TypeVar("T")


def answer_all(
    retriever: Retriever, queries: Sequence[Query], k: int = DEPTH, size: int = QUERIES_PER_CALL
) -> tuple[Run, float]:
    """Hits for every query, and milliseconds per query when asked `size` at a time."""
    run: Run = {}
    for part in calls_of(queries, size)[:1]:
        retriever.search([query.text for query in part], k)  # what happens once
    start = time.perf_counter()
    for part in calls_of(queries, size):
        answers = retriever.search([query.text for query in part], k)
        run.update(zip((query.key for query in part), answers, strict=True))
    return run, 1000 * (time.perf_counter() - start) / max(1, len(queries))


def calls_of(queries: Sequence[T], size: int) -> list[Sequence[T]]:
    return [queries[start : start + size] for start in range(0, len(queries), size)]


def evaluate_documents(
    retriever: Retriever, queries: Sequence[Query], qrels: Sequence[Qrel], k: int = DEPTH
) -> tuple[Report, Run]:
    """The measures that every system has, as far as k hits for each query tell them."""
    judged = judged_queries(queries, qrels)
    run, milliseconds = answer_all(retriever, judged, k)
    return Report(queries=len(judged), document=document_level(run, qrels, k), ms_per_query=milliseconds), run


def judged_queries(queries: Sequence[Query], qrels: Sequence[Qrel]) -> list[Query]:
    texts = {query.key: query for query in queries}
    return [texts[key] for key in relevant_keys(qrels)]


def evaluate_retriever(
    retriever: Retriever,
    queries: Sequence[Query],
    qrels: Sequence[Qrel],
    docid_map: "DocidMap",
    judge: Judge | None = None,
    k: int = DEPTH,
) -> Report:
    """The measures of a system without docids on the same corpus; with a judge also the quality of its first hits."""
    report, run = evaluate_documents(retriever, queries, qrels, k)
    if judge is None:
        return report
    judged = judged_queries(queries, qrels)
    found = [docid_map.rows_of([hit.key for hit in run[query.key][:DEPTH]]) for query in judged]
    pairs = np.array([(i, row) for i, rows in enumerate(found) for row in rows], dtype=np.int64).reshape(-1, 2)
    quality = quality_score(judge, [query.text for query in judged], docid_map.contents, [pairs])
    return replace(report, quality=quality._asdict(), d_per_q=len(pairs) / len(judged))


class DocidMap:
    """The docids of the whole corpus by key, read once for all evaluations."""

    def __init__(self, searcher: Searcher) -> None:
        stored = list(searcher.store.stored_documents())
        self.rows = {item.document.key: row for row, item in enumerate(stored)}
        self.documents = [item.document for item in stored]
        self.contents = [document.content for document in self.documents]
        self.docids: NDArray[np.int64] = np.array([item.docid for item in stored], dtype=np.int64).reshape(
            len(stored), searcher.model.config.m
        )
        self.buckets = Buckets.of(self.docids)
        self.health: DocidHealth = docid_health(self.docids)

    def rows_of(self, keys: Sequence[str]) -> list[int]:
        """Rows of those documents that the corpus has."""
        return [self.rows[key] for key in keys if key in self.rows]


def evaluate_searchers(
    searchers: Mapping[str, Searcher],
    queries: Sequence[Query],
    qrels: Sequence[Qrel],
    docid_map: DocidMap,
    judge: Judge | None = None,
    k: int = DEPTH,
) -> tuple[dict[str, Report], dict[str, Run]]:
    """The measures of ways to search one index: docid-level, in expectation, document-level, health of the docids.

    The docids of all ways come from one encoding of the queries; the time per query is that of whole searches.
    With a judge also the quality of what the docids open.
    """
    relevant = [docid_map.rows_of(keys) for keys in relevant_keys(qrels).values()]
    if not any(relevant):
        raise DataError(
            "the index has none of the documents that these queries ask for: evaluate with the data that was indexed, "
            "or index its documents (asi index RUN DATA)"
        )
    reports, runs = {}, {}
    for name, searcher in searchers.items():
        reports[name], runs[name] = evaluate_documents(searcher, queries, qrels, k)
    texts = [query.text for query in judged_queries(queries, qrels)]
    by_heads, found = found_docids(searchers, texts, k)
    acc = share_of_equal_docids(by_heads, docid_map.docids, relevant)
    heads = docid_scores(docid_map.buckets, [[tuple(docid)] for docid in by_heads.tolist()], relevant).docid["R@1"]
    collapsed = collapse_warning(docid_map.health, one_of(searchers).model.config.V)
    for name, (docids, ranked) in found.items():
        scores = docid_scores(docid_map.buckets, docids, relevant)
        report = reports[name].with_docids(scores, docid_map.health, acc)
        most = {"mean": float(ranked.mean()), "most": float(ranked.max())}
        reports[name] = replace(report, heads=heads, collapsed=collapsed, ranked=most)
        if judge is not None:
            quality = quality_of_docids(judge, texts, docids, docid_map)
            reports[name] = replace(reports[name], quality=quality._asdict())
    return reports, runs


def one_of(searchers: Mapping[str, Searcher]) -> Searcher:
    """Any of them: they search one index with one model, and encode alike."""
    return next(iter(searchers.values()))


class Found(NamedTuple):
    docids: list[list[Docid]]  # of each query, best first
    ranked: NDArray[np.int64]  # (Q,) documents that are ranked for it


def found_docids(
    searchers: Mapping[str, Searcher], queries: Sequence[str], k: int
) -> tuple[NDArray[np.int64], dict[str, Found]]:
    """The docids (Q, m) that the heads give the queries themselves, and what each searcher finds."""
    one = one_of(searchers)
    by_heads = []
    found: dict[str, list[Found]] = {name: [] for name in searchers}
    for part in calls_of(queries, QUERIES_ENCODED_AT_ONCE):
        encoded = one.encode(part)
        by_heads.append(one.head_docids(encoded))
        for name, searcher in searchers.items():
            found[name].append(Found(*searcher.docids_and_ranked(encoded, DEPTH, k)))
    return np.concatenate(by_heads), {
        name: Found([own for part in parts for own in part.docids], np.concatenate([part.ranked for part in parts]))
        for name, parts in found.items()
    }


def quality_of_docids(
    judge: Judge, queries: Sequence[str], docids: Sequence[Sequence[Docid]], docid_map: DocidMap
) -> Quality:
    """Mi-QS and Ma-QS of the documents that each query's docids open."""
    opened = opened_buckets(docid_map.buckets, docids)  # (Q, TOP)
    parts = (
        opened_documents(docid_map.buckets, opened[start : start + QUERIES_JUDGED_AT_ONCE]) + np.array([start, 0])
        for start in range(0, len(opened), QUERIES_JUDGED_AT_ONCE)
    )
    return quality_score(judge, queries, docid_map.contents, parts)


def share_of_equal_docids(own: NDArray[np.int64], docids: NDArray[np.int64], relevant: list[list[int]]) -> float | None:
    """Acc over all (query, relevant document) pairs; None if no relevant document is in the corpus."""
    pairs = [(i, row) for i, rows in enumerate(relevant) for row in rows]
    if not pairs:
        return None
    return accuracy(own[[i for i, _ in pairs]], docids[[row for _, row in pairs]])
