"""What a comparison found, as a page: a table of all systems for every split, with significance."""

import datetime
import json
from collections.abc import Mapping, Sequence

import numpy as np

from asi.analysis.pages import Cell, Page, Section, Table
from asi.analysis.side_by_side import threads_of
from asi.analysis.system_measures import TRAINED_QUERIES, Measured
from asi.significance import holm, randomisation_test
from asi.systems.table import System
from asi.systems.workplace import WHOLE_TEXT, Workplace

OURS = "asi"
COLUMNS = (
    "system", "docid R@1", "docid R@5", "docid R@10", "docid MRR@10", "expected R@10", "R@1", "R@5", "R@10", "MRR@10",
    "p against asi", "D/Q", "D/ID", "invalid", "parameters", "training min", "bytes / document", "ms / query, alone",
    "ms / query, of 32", "takes new",
)  # fmt: skip
TRAINING_COLUMNS = ("system", "steps", "pairs seen", "R@10 of trained queries")


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
        f"frozen for all; {terms.minutes:g} minutes of training each (planned from the speed of the first steps; the "
        "table has what it took), what the encoder makes of texts and the pseudo queries not counted; seed "
        f"{terms.seed}. {side}",
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
                *(docid.get(name) for name in ("R@1", "R@5", "R@10", "MRR@10")),
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
