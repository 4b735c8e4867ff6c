"""One study as a page, or all of them and the report of the default run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from asi.analysis import figures
from asi.analysis.bench import Bench
from asi.analysis.expansion_study import EXPANSION_RUNS, QUERIES_PER_DOCUMENT, expansion_section
from asi.analysis.pages import Page, Section
from asi.analysis.report import build_report, stranger_text
from asi.analysis.studies import STUDIES, run_study, study_runs
from asi.config import to_dict
from asi.errors import ConfigError
from asi.expansion import pseudo_queries_path
from asi.index import Index


def write_study(name: str, bench: Bench) -> Path:
    """Run what is missing and write the page; returns its HTML file."""
    names = (*STUDIES, "expansion", "all")
    if name not in names:
        raise ConfigError(f"unknown study {name!r}; studies are {', '.join(names)}")
    parts: list[Callable[[], Section]] = []
    for study_name, study in STUDIES.items():
        if name in ("all", study_name):
            bench.plan(folder for folder, _ in study_runs(study, bench).values())
            parts.append(partial(run_study, study, bench))
    if name in ("all", "expansion"):
        is_there = pseudo_queries_path(bench.out, QUERIES_PER_DOCUMENT).exists()
        bench.plan(map(bench.run_folder, EXPANSION_RUNS), [] if is_there else ["a generator of pseudo queries"])
        parts.append(partial(expansion_section, bench))
    figures.check_packages()
    title = f"Studies on {bench.dataset.name}"
    sections: list[Section] = []
    data = {"judge": bench.judge.name, "splits": list(bench.splits), "settings": settings_of_runs(name, bench)}
    for part in parts:
        sections.append(part())
        introduction = [
            f"`{bench.dataset.name}`, {', '.join(bench.splits)}, measured {' and '.join(sorted(bench.dates))}.",
            *stranger_text(bench.judge, bench.config.model.encoder),
        ]
        whole = Page(title if name == "all" else sections[0].title, introduction, sections, data)
        page = whole.write(bench.out if name == "all" else bench.out / name)  # what is done can be read
    if name != "all":
        return page
    with Index.load(bench.run_folder("default"), bench.device, bench.config.search) as opened:
        stage = partial(bench.reporter.stage, total=0)
        report = build_report(opened, bench.dataset, bench.splits, bench.judge, baselines=True, stage=stage)
    introduction = list(dict.fromkeys([*introduction, *report.introduction]))  # both may warn of the judge
    return Page(title, introduction, [*report.sections, *sections], data | report.data).write(bench.out)


def settings_of_runs(name: str, bench: Bench) -> dict[str, dict[str, Any]]:
    """What each run was trained with, by the name of its folder; runs that studies share once."""
    runs = {bench.run_folder("default").name: bench.config} if name in ("all", "expansion") else {}
    for study_name, study in STUDIES.items():
        if name in ("all", study_name):
            runs |= {folder.name: config for folder, config in study_runs(study, bench).values()}
    return {run: to_dict(config) for run, config in runs.items()}
