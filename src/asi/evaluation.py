"""Search the queries of a split and measure the answers: the same way for ASI and for every baseline."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from asi.metrics import (
    Buckets,
    DocidHealth,
    Report,
    accuracy,
    docid_health,
    docid_scores,
    document_level,
    relevant_keys,
)
from asi.records import Docid, Hit, Qrel, Query, Retriever
from asi.search import Searcher

QUERIES_PER_CALL = 32
DEPTH = 10  # docids and documents that the measures look at

Run = dict[str, list[Hit]]


def answer_all(retriever: Retriever, queries: Sequence[Query], k: int = DEPTH) -> tuple[Run, float]:
    """Hits for every query, and milliseconds per query when asked 32 at a time."""
    run: Run = {}
    start = time.perf_counter()
    for part in parts_of(queries, QUERIES_PER_CALL):
        answers = retriever.search([query.text for query in part], k)
        run.update(zip((query.key for query in part), answers, strict=True))
    return run, 1000 * (time.perf_counter() - start) / max(1, len(queries))


def parts_of(queries: Sequence[Query], size: int) -> list[Sequence[Query]]:
    return [queries[start : start + size] for start in range(0, len(queries), size)]


def evaluate_documents(retriever: Retriever, queries: Sequence[Query], qrels: Sequence[Qrel]) -> tuple[Report, Run]:
    """The measures that every system has."""
    judged = judged_queries(queries, qrels)
    run, milliseconds = answer_all(retriever, judged)
    return Report(queries=len(judged), document=document_level(run, qrels), ms_per_query=milliseconds), run


def judged_queries(queries: Sequence[Query], qrels: Sequence[Qrel]) -> list[Query]:
    texts = {query.key: query for query in queries}
    return [texts[key] for key in relevant_keys(qrels)]


class DocidMap:
    """The docids of the whole corpus by key, read once for all evaluations."""

    def __init__(self, searcher: Searcher) -> None:
        stored = list(searcher.store.stored_documents())
        self.rows = {item.document.key: row for row, item in enumerate(stored)}
        self.docids: NDArray[np.int64] = np.array([item.docid for item in stored], dtype=np.int64)
        self.buckets = Buckets.of(self.docids)
        self.health: DocidHealth = docid_health(self.docids)


def evaluate_searcher(
    searcher: Searcher, queries: Sequence[Query], qrels: Sequence[Qrel], docid_map: DocidMap | None = None
) -> tuple[Report, Run]:
    """The measures of a system with docids: docid-level, in expectation, document-level, and the docids' health."""
    docid_map = docid_map or DocidMap(searcher)
    report, run = evaluate_documents(searcher, queries, qrels)
    judged = judged_queries(queries, qrels)
    relevant = [
        [docid_map.rows[key] for key in keys if key in docid_map.rows] for keys in relevant_keys(qrels).values()
    ]
    scores = docid_scores(docid_map.buckets, all_docids(searcher, judged), relevant)
    own = searcher.head_docids([query.text for query in judged])
    pairs = [(i, row) for i, rows in enumerate(relevant) for row in rows]
    acc = accuracy(own[[i for i, _ in pairs]], docid_map.docids[[row for _, row in pairs]]) if pairs else 0.0
    return report.with_docids(scores, docid_map.health, acc), run


def all_docids(searcher: Searcher, queries: Sequence[Query]) -> list[list[Docid]]:
    found: list[list[Docid]] = []
    for part in parts_of(queries, QUERIES_PER_CALL):
        found += searcher.docids([query.text for query in part], DEPTH)
    return found


Progress = Callable[[str], None]
