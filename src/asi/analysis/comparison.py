"""Systems on equal terms: train what needs training, measure all in one way, and write one table."""

import datetime
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asi.analysis.fingerprint import data_fingerprint
from asi.analysis.pages import Cell, Page, Section, Table
from asi.analysis.side_by_side import Task, side_by_side, threads_of
from asi.datasets import Dataset
from asi.errors import AsiError, ConfigError, Interrupted, one_line
from asi.evaluation import DEPTH, QUERIES_PER_CALL, Run, answer_all, calls_of, evaluate_documents, judged_queries
from asi.folders import write_atomically
from asi.metrics import Buckets, Report, docid_health, docid_scores, perplexity, reciprocal_ranks, relevant_keys
from asi.records import Qrel, Query
from asi.run import Reporter
from asi.significance import holm, randomisation_test
from asi.systems.table import BY_NAME, ROWS, System
from asi.systems.workplace import WHOLE_TEXT, Built, DocidLevel, Terms, Workplace
from asi.trec import write_trec_run

OURS = "asi"
ASKED_ALONE = 50  # queries, to measure the time of a single one
FORMER_TERMS = {"jobs": 1}  # of comparisons that were begun when there was no choice
TRAINED_QUERIES = 200  # of the training, that are asked to see what was learnt by heart
COLUMNS = (
    "system", "docid R@1", "docid R@5", "docid R@10", "expected R@10", "R@1", "R@5", "R@10", "MRR@10", "p against asi",
    "D/Q", "D/ID", "invalid", "parameters", "training min", "bytes / document", "ms / query, alone",
    "ms / query, of 32", "takes new",
)  # fmt: skip
TRAINING_COLUMNS = ("system", "steps", "pairs seen", "R@10 of trained queries")


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


def open_comparison(workplace: Workplace, splits: Sequence[str], *, resume: bool) -> None:
    """Refuse splits that the data has not, a folder with another comparison, or with this one if it is not to be
    continued."""
    file = workplace.out / "compare.json"
    settings = {
        "data": workplace.dataset.name,
        "texts": data_fingerprint(workplace.texts, workplace.dataset, splits),
        **asdict(workplace.terms),
        "splits": list(splits),
    }
    if file.exists():
        if FORMER_TERMS | json.loads(file.read_text(encoding="utf-8")) != settings:
            raise ConfigError(f"{workplace.out} holds a comparison with other settings or data; choose another --out")
        if not resume:
            raise ConfigError(f"{workplace.out} holds a comparison already; continue it with --resume")
        return
    if workplace.out.exists() and any(workplace.out.iterdir()):
        raise ConfigError(f"{workplace.out} is not empty and holds no comparison; choose another --out")
    _ = workplace.pretrained  # an encoder that can't be loaded must not take the folder
    workplace.out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(settings, indent=1))


def compare(systems: Sequence[System], workplace: Workplace, splits: Sequence[str]) -> Path:
    """Run what is missing and write the page; a system that fails has its error in the place of its row."""
    found = {system.name: Measured.load(measures_file(workplace, system)) for system in ROWS}  # of earlier calls too
    measured = {name: own for name, own in found.items() if own is not None}
    to_do = [system for system in systems if system.name not in measured]
    progress = Progress(to_do, len(systems) - len(to_do), workplace)
    failed: dict[str, str] = {}
    run_all = one_by_one if workplace.terms.jobs == 1 else in_processes
    for name, error in run_all(to_do, workplace, splits, progress):
        progress.end(name)
        own = Measured.load(measures_file(workplace, BY_NAME[name]))
        if error is None and own is not None:
            measured[name] = own
        else:
            failed[name] = error or "its measures can't be read back"
            workplace.reporter.warning(f"{name} failed: {failed[name]}")
    if not measured:
        raise AsiError(f"no system could be run; the last one said: {next(reversed(failed.values()))}")
    shown = [system for system in ROWS if system.name in measured]
    return comparison_page(shown, measured, failed, workplace, splits).write(workplace.out)


class Progress:
    """Says which system begins, and how long all that are left will take."""

    def __init__(self, to_do: Sequence[System], done: int, workplace: Workplace) -> None:
        self.left = {system.name: system for system in to_do}
        self.begun: dict[str, float] = {}  # monotonic time
        self.in_all = done + len(to_do)
        self.done = done
        self.overheads: list[float] = []  # minutes beside training, of the systems that have ended
        self.workplace = workplace

    def begin(self, name: str) -> None:
        terms = self.workplace.terms
        left = minutes_left(list(self.left.values()), terms.minutes, self.overheads) / terms.jobs
        self.begun[name] = time.monotonic()
        place = self.done + len(self.begun)
        self.workplace.reporter.message(f"{name}, system {place} of {self.in_all}, about {left:.0f} min left")

    def end(self, name: str) -> None:
        minutes = (time.monotonic() - self.begun[name]) / 60
        self.overheads.append(minutes - (self.workplace.terms.minutes if self.left.pop(name).trains else 0))


def one_by_one(
    systems: Sequence[System], workplace: Workplace, splits: Sequence[str], progress: Progress
) -> Iterator[tuple[str, str | None]]:
    """Run the systems; the name of each as it ends, and what went wrong."""
    for system in systems:
        progress.begin(system.name)
        try:
            run_and_keep(system, workplace, splits)
            yield system.name, None
        except Interrupted:
            raise
        except Exception as error:  # one system's failure must not cost the others
            yield system.name, one_line(error)
        gc.collect()  # a system's model and index go before the next one's come


def in_processes(
    systems: Sequence[System], workplace: Workplace, splits: Sequence[str], progress: Progress
) -> Iterator[tuple[str, str | None]]:
    """The same, several at a time."""
    own = (workplace.dataset, workplace.out, workplace.terms, workplace.device)
    tasks = [Task(one.name, partial(run_elsewhere, one.name, own, tuple(splits)), one.after) for one in systems]
    return side_by_side(
        tasks, workplace.terms.jobs, workplace.reporter, workplace.stopping, lambda task: progress.begin(task.name)
    )


def run_elsewhere(
    name: str,
    place: tuple[Dataset, Path, Terms, torch.device],
    splits: Sequence[str],
    reporter: Reporter,
    stopping: Callable[[], bool],
) -> None:
    """In a process that has nothing yet."""
    run_and_keep(BY_NAME[name], Workplace(*place, reporter, stopping), splits)


def run_and_keep(system: System, workplace: Workplace, splits: Sequence[str]) -> None:
    run_system(system, workplace, splits).save(measures_file(workplace, system))


def measures_file(workplace: Workplace, system: System) -> Path:
    return workplace.folder(system.name) / "measured.json"


def minutes_left(to_do: Sequence[System], minutes: float, overheads: Sequence[float]) -> float:
    """Of training, and of what came on top of it so far: encoding, indexing, measuring."""
    each = max(0.0, float(np.mean(overheads))) if overheads else 0.0
    return sum(minutes * system.trains + each for system in to_do)


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


def comparison_page(
    systems: Sequence[System],
    measured: Mapping[str, Measured],
    failed: Mapping[str, str],
    workplace: Workplace,
    splits: Sequence[str],
) -> Page:
    terms = workplace.terms
    side = (
        "One system at a time."
        if terms.jobs == 1
        else (
            f"{terms.jobs} systems at a time, each with {threads_of(terms.jobs)} of the processor's threads, also when "
            "its milliseconds are measured."
        )
    )
    introduction = [
        f"`{workplace.dataset.name}`, {datetime.date.today()}: {len(workplace.keys):,} documents, of which "
        f"{len(np.unique(workplace.texts.pairs[:, 1])):,} have training queries. Encoder {terms.encoder}, "
        f"frozen for all; {terms.minutes:g} minutes of training each, what the encoder makes of texts and the "
        f"pseudo queries not counted; seed {terms.seed}. {side}",
        f"The {len(workplace.keys) - len(workplace.known):,} documents of test_unseen (and of other splits so named) "
        "have no training query and are new when training has ended: a system that can't take new documents can't find "
        "them. All others may be learnt, from their texts and pseudo queries too. "
        "p: paired randomisation test over the queries on MRR@10 against asi, Holm's correction for all systems in "
        "the table; it says nothing about other seeds. Docid-level recall is easier the more documents share a docid "
        "(D/ID).",
        f"The encoder reads the first {terms.max_length} tokens of a text. From all of it come the words of BM25 "
        f"and DocT5Query, the spans and terms that some are trained on besides, and the sentences of GERE; the n-grams "
        f"of SEAL and MINDER come from its first {WHOLE_TEXT} tokens. Bytes are those of codes (one or two each), "
        "vectors, postings or n-grams; texts and trees are not counted.",
    ]
    sections = [Section(split, tables=[split_table(systems, measured, split)]) for split in splits]
    sections.append(
        Section(
            "Training",
            [
                "Pairs seen: steps by pairs in a step. Recall of queries that were trained on tells what has been "
                f"learnt at all from what carries over to others; {TRAINED_QUERIES} of them are asked. (ASI ranks "
                "known documents by their training queries too, so it has seen the answers.)"
            ],
            [training_table(systems, measured)],
        )
    )
    facts = Table(
        "How ours differ from the originals",
        ("system", "mechanism", "paper", "differs"),
        [[system.name, system.mechanism, system.paper, system.differs] for system in systems],
    )
    sections.append(Section("The systems", tables=[facts]))
    if failed:
        rows: list[list[Cell]] = [[name, error] for name, error in failed.items()]
        sections.insert(0, Section("Systems that failed", tables=[Table("", ("system", "error"), rows)]))
    settings = json.loads((workplace.out / "compare.json").read_text(encoding="utf-8"))
    data = {"date": str(datetime.date.today()), "settings": settings}
    return Page(f"Systems on {workplace.dataset.name}", introduction, sections, data)


def training_table(systems: Sequence[System], measured: Mapping[str, Measured]) -> Table:
    rows: list[list[Cell]] = []
    for system in systems:
        own = measured[system.name]
        rows.append([system.name, own.steps, own.pairs, own.trained_recall])
    return Table("What was trained", TRAINING_COLUMNS, rows)


def split_table(systems: Sequence[System], measured: Mapping[str, Measured], split: str) -> Table:
    chances = p_values(measured, split)
    rows: list[list[Cell]] = []
    for system in systems:
        own = measured[system.name]
        report = own.reports[split]
        docid, document = report.docid or {}, report.document or {}
        rows.append(
            [
                system.name,
                *(docid.get(name) for name in ("R@1", "R@5", "R@10")),
                (report.expectation or {}).get("R@10"),
                *(document.get(name) for name in ("R@1", "R@5", "R@10", "MRR@10")),
                chances.get(system.name),
                report.d_per_q,
                report.d_per_id,
                (report.invalid or {}).get("all"),
                own.parameters,
                own.minutes,
                own.bytes_per_document,
                own.ms_alone,
                report.ms_per_query,
                "yes" if system.takes_new else "no",
            ]
        )
    return Table("All systems", COLUMNS, rows)


def p_values(measured: Mapping[str, Measured], split: str) -> dict[str, float]:
    """Of each system's difference from ours, corrected; nothing if ours is not among them."""
    if OURS not in measured:
        return {}
    ours = np.array(measured[OURS].ranks[split])
    return holm(
        {name: randomisation_test(ours, np.array(own.ranks[split])) for name, own in measured.items() if name != OURS}
    )
