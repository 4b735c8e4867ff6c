"""One study as a page, or all of them and the report of the default run."""

import datetime
from collections.abc import Callable
from functools import partial
from pathlib import Path

from asi.analysis.expansion_study import expansion_section
from asi.analysis.pages import Page, Section
from asi.analysis.report import build_report
from asi.analysis.studies import STUDIES, Bench, find_study, run_study
from asi.index import Index


def write_study(name: str, bench: Bench) -> Path:
    """Run what is missing and write the page; returns its HTML file."""
    parts: dict[str, Callable[[], Section]] = {study: partial(run_study, STUDIES[study], bench) for study in STUDIES}
    parts["expansion"] = partial(expansion_section, bench)
    if name != "all" and name not in parts:
        find_study(name)  # says which there are
    sections = [part() for study, part in parts.items() if name in ("all", study)]
    introduction = [f"`{bench.dataset.name}`, {', '.join(bench.splits)}, {datetime.date.today()}."]
    if name != "all":
        return Page(sections[0].title, introduction, sections).write(bench.out / name)
    with Index.load(bench.run_folder("default"), bench.device) as opened:
        stage = partial(bench.reporter.stage, total=0)
        report = build_report(opened, bench.dataset, bench.splits, bench.judge, baselines=True, stage=stage)
    title = f"Studies on {bench.dataset.name}"
    return Page(title, report.introduction, [*report.sections, *sections], report.data).write(bench.out)
