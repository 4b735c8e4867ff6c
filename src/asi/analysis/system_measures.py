"""One system of a comparison, measured: the same way for all of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asi.errors import AsiError
from asi.evaluation import DEPTH, QUERIES_PER_CALL, Run, answer_all, calls_of, evaluate_documents, judged_queries
from asi.folders import write_atomically
from asi.metrics import Buckets, Report, docid_health, docid_scores, perplexity, reciprocal_ranks, relevant_keys
from asi.records import Qrel, Query
from asi.systems.table import System
from asi.systems.workplace import Built, DocidLevel, Workplace
from asi.trec import write_trec_run

ASKED_ALONE = 50  # queries, to measure the time of a single one
TRAINED_QUERIES = 200  # of the training, that are asked to see what was learnt by heart


@dataclass(frozen=True)
class Measured:
    """What is known of one system when it has been run; kept as JSON."""

    reports: dict[str, Report]  # by split
    ranks: dict[str, list[float]]  # by split: the reciprocal rank of each judged query
    parameters: int
    minutes: float  # of training
    steps: int
    pairs: int  # that were seen
    trained_recall: float  # R@10 of queries that it was trained on
    bytes_per_document: float
    ms_alone: float

    def save(self, file: Path) -> None:
        values = dict(self.__dict__) | {"reports": {split: report.to_dict() for split, report in self.reports.items()}}
        write_atomically(file, json.dumps(values, indent=1))

    @classmethod
    def load(cls, file: Path) -> "Measured | None":
        """None if the system has not been measured, or by a version with other measures."""
        if not file.exists():
            return None
        values = json.loads(file.read_text(encoding="utf-8"))
        try:
            reports = {split: Report.from_dict(own) for split, own in values["reports"].items()}
            return cls(**values | {"reports": reports})
        except (AsiError, KeyError, TypeError):
            return None


def run_system(system: System, workplace: Workplace, splits: Sequence[str]) -> Measured:
    built = system.build(workplace)
    try:
        return measure(system, built, workplace, splits)
    finally:
        built.close()


def measure(system: System, built: Built, workplace: Workplace, splits: Sequence[str]) -> Measured:
    workplace.reporter.stage("measuring", 0)
    reports: dict[str, Report] = {}
    ranks: dict[str, list[float]] = {}
    run: Run = {}
    for split in splits:
        queries, qrels = workplace.dataset.judged(split)
        reports[split], found = evaluate_documents(built.retriever, queries, qrels)
        ranks[split] = list(reciprocal_ranks(found, qrels).values())
        run |= found
        if built.docids is not None:
            asked = [query.text for query in judged_queries(queries, qrels)]
            reports[split] = with_docid_level(reports[split], built.docids, asked, relevant_rows(workplace, split))
    trained, _ = evaluate_documents(built.retriever, *some_trained_queries(workplace))
    workplace.folder(system.name).mkdir(parents=True, exist_ok=True)
    write_trec_run(workplace.folder(system.name) / "run.trec", run, system.name)
    return Measured(
        reports,
        ranks,
        built.parameters,
        *built.training,
        (trained.document or {})["R@10"],
        built.bytes_per_document,
        single_query_ms(built, workplace, splits),
    )


def some_trained_queries(workplace: Workplace) -> tuple[list[Query], list[Qrel]]:
    queries, qrels = workplace.dataset.judged("train")
    judged = judged_queries(queries, qrels)
    drawn = np.random.default_rng(0).permutation(len(judged))[:TRAINED_QUERIES].tolist()
    keys = {judged[i].key for i in drawn}
    return [judged[i] for i in drawn], [qrel for qrel in qrels if qrel.query in keys]


def relevant_rows(workplace: Workplace, split: str) -> list[list[int]]:
    rows = {key: row for row, key in enumerate(workplace.keys)}
    relevant = relevant_keys(workplace.dataset.judged(split)[1])
    return [[rows[key] for key in keys if key in rows] for keys in relevant.values()]


def with_docid_level(
    report: Report, docids: DocidLevel, queries: Sequence[str], relevant: Sequence[Sequence[int]]
) -> Report:
    """The report with the docid-level measures; a document without a docid has one of its own that nothing finds."""
    found = [own for part in calls_of(queries, QUERIES_PER_CALL) for own in docids.docids(part, DEPTH)]
    given = docids.of_documents
    has_docid = given[:, :1] >= 0
    codes = np.where(has_docid, split_codes(given), 0)
    alone = np.where(
        has_docid, 0, split_codes(2**16 + np.arange(len(given))[:, None])
    )  # a number of its own, never 0 0
    retrieved = [[(*split_docid(docid), 0, 0) for docid in own] for own in found]
    scores = docid_scores(Buckets.of(np.concatenate([codes, alone], axis=1)), retrieved, relevant)
    known = has_docid[:, 0]
    health = docid_health(codes[known])._replace(perplexity=[perplexity(column) for column in given[known].T])
    return report.with_docids(scores, health)


def split_codes(docids: Any) -> Any:
    """Codes (N, w) of any size as codes of sixteen bits (N, 2 w)."""
    return np.stack([docids // 2**16, docids % 2**16], axis=2).reshape(len(docids), -1)


def split_docid(docid: Sequence[int]) -> list[int]:
    return [part for code in docid for part in divmod(code, 2**16)]


def single_query_ms(built: Built, workplace: Workplace, splits: Sequence[str]) -> float:
    queries = judged_queries(*workplace.dataset.judged(splits[0]))[:ASKED_ALONE]
    return answer_all(built.retriever, queries, size=1)[1]
