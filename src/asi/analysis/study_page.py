"""One study as a page, or all of them and the report of the default run."""

import datetime
from collections.abc import Callable
from functools import partial
from pathlib import Path

from asi.analysis.bench import Bench
from asi.analysis.expansion_study import EXPANSION_RUNS, expansion_section
from asi.analysis.pages import Page, Section
from asi.analysis.report import build_report
from asi.analysis.studies import STUDIES, find_study, run_study, study_runs
from asi.index import Index


def write_study(name: str, bench: Bench) -> Path:
    """Run what is missing and write the page; returns its HTML file."""
    if name not in ("all", "expansion"):
        find_study(name)  # says which there are
    parts: list[Callable[[], Section]] = []
    for study_name, study in STUDIES.items():
        if name in ("all", study_name):
            bench.plan(folder for folder, _ in study_runs(study, bench).values())
            parts.append(partial(run_study, study, bench))
    if name in ("all", "expansion"):
        bench.plan(map(bench.run_folder, EXPANSION_RUNS))
        parts.append(partial(expansion_section, bench))
    sections = [part() for part in parts]
    introduction = [f"`{bench.dataset.name}`, {', '.join(bench.splits)}, {datetime.date.today()}."]
    if name != "all":
        return Page(sections[0].title, introduction, sections).write(bench.out / name)
    with Index.load(bench.run_folder("default"), bench.device) as opened:
        stage = partial(bench.reporter.stage, total=0)
        report = build_report(opened, bench.dataset, bench.splits, bench.judge, baselines=True, stage=stage)
    title = f"Studies on {bench.dataset.name}"
    return Page(title, report.introduction, [*report.sections, *sections], report.data).write(bench.out)
