"""Systems on equal terms: train what needs training, measure all in one way, and write one table."""

import datetime
import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asi.analysis.fingerprint import data_fingerprint
from asi.analysis.pages import Cell, Page, Section, Table
from asi.errors import AsiError, ConfigError, Interrupted
from asi.evaluation import DEPTH, QUERIES_PER_CALL, Run, answer_all, calls_of, evaluate_documents, judged_queries
from asi.folders import write_atomically
from asi.metrics import Buckets, Report, docid_health, docid_scores, perplexity, reciprocal_ranks, relevant_keys
from asi.significance import holm, randomisation_test
from asi.systems.table import System
from asi.systems.workplace import WHOLE_TEXT, Built, DocidLevel, Workplace
from asi.trec import write_trec_run

OURS = "asi"
ASKED_ALONE = 50  # queries, to measure the time of a single one
COLUMNS = (
    "system", "docid R@1", "docid R@5", "docid R@10", "R@1", "R@5", "R@10", "MRR@10", "p against asi", "D/Q",
    "D/ID", "parameters", "training min", "bytes / document", "ms / query, alone", "ms / query, of 32", "takes new",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What is known of one system when it has been run; kept as JSON."""

    reports: dict[str, Report]  # by split
    ranks: dict[str, list[float]]  # by split: the reciprocal rank of each judged query
    parameters: int
    minutes: float  # of training
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
        "minutes": workplace.minutes,
        "seed": workplace.seed,
        "encoder": workplace.encoder_name,
        "max_length": workplace.max_length,
        "splits": list(splits),
    }
    if file.exists():
        if json.loads(file.read_text(encoding="utf-8")) != settings:
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
    measured: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    seconds: list[float] = []
    files = {system.name: workplace.folder(system.name) / "measured.json" for system in systems}
    to_do = sum(not file.exists() for file in files.values())
    for number, system in enumerate(systems):
        file = files[system.name]
        if (found := Measured.load(file)) is not None:
            measured[system.name] = found
            continue
        about = f", about {to_do * np.mean(seconds) / 60:.0f} min left" if seconds else ""
        workplace.reporter.message(f"{system.name}, system {number + 1} of {len(systems)}{about}")
        started = time.monotonic()
        try:
            measured[system.name] = run_system(system, workplace, splits)
            measured[system.name].save(file)
            seconds.append(time.monotonic() - started)
        except Interrupted:
            raise
        except Exception as error:  # one system's failure must not cost the others
            failed[system.name] = str(error) if isinstance(error, AsiError) else f"{type(error).__name__}: {error}"
            workplace.reporter.warning(f"{system.name} failed: {failed[system.name]}")
        to_do -= 1
        gc.collect()  # a system's model and index go before the next one's come
    if not measured:
        raise AsiError(f"no system could be run; the last one said: {next(reversed(failed.values()))}")
    return comparison_page(systems, measured, failed, workplace, splits).write(workplace.out)


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
    workplace.folder(system.name).mkdir(parents=True, exist_ok=True)
    write_trec_run(workplace.folder(system.name) / "run.trec", run, system.name)
    return Measured(
        reports,
        ranks,
        built.parameters,
        built.minutes,
        built.bytes_per_document,
        single_query_ms(built, workplace, splits),
    )


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
    introduction = [
        f"`{workplace.dataset.name}`, {datetime.date.today()}: {len(workplace.keys):,} documents, of which "
        f"{len(workplace.known):,} have training queries. Encoder {workplace.encoder_name}, frozen for all; "
        f"{workplace.minutes:g} minutes of training each, what the encoder makes of texts and the pseudo queries not "
        "counted; seed " + f"{workplace.seed}.",
        "Documents of test_unseen have no training query: a system that can't take new documents can't find them. "
        "p: paired randomisation test over the queries on MRR@10 against asi, Holm's correction for all systems in "
        "the table; it says nothing about other seeds. Docid-level recall is easier the more documents share a docid "
        "(D/ID).",
        f"The encoder reads the first {workplace.max_length} tokens of a text. From all of it come the words of BM25 "
        f"and DocT5Query, the spans and terms that some are trained on besides, and the sentences of GERE; the n-grams "
        f"of SEAL and MINDER come from its first {WHOLE_TEXT} tokens. Bytes are those of codes (one or two each), "
        "vectors, postings or n-grams; texts and trees are not counted.",
    ]
    sections = [Section(split, tables=[split_table(systems, measured, split)]) for split in splits]
    facts = Table(
        "How ours differ from the originals",
        ("system", "mechanism", "paper", "differs"),
        [[system.name, system.mechanism, system.paper, system.differs] for system in systems],
    )
    sections.append(Section("The systems", tables=[facts]))
    if failed:
        rows: list[list[Cell]] = [[name, error] for name, error in failed.items()]
        sections.insert(0, Section("Systems that failed", tables=[Table("", ("system", "error"), rows)]))
    return Page(f"Systems on {workplace.dataset.name}", introduction, sections)


def split_table(systems: Sequence[System], measured: Mapping[str, Measured], split: str) -> Table:
    chances = p_values(measured, split)
    rows: list[list[Cell]] = []
    for system in systems:
        if system.name not in measured:
            continue
        own = measured[system.name]
        report = own.reports[split]
        docid, document = report.docid or {}, report.document or {}
        rows.append(
            [
                system.name,
                *(docid.get(name) for name in ("R@1", "R@5", "R@10")),
                *(document.get(name) for name in ("R@1", "R@5", "R@10", "MRR@10")),
                chances.get(system.name),
                report.d_per_q,
                report.d_per_id,
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
