"""One study as a page, or all of them and the report of the default run."""

import datetime
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from asi.analysis.expansion_study import expansion_section
from asi.analysis.pages import Page, Section
from asi.analysis.report import build_report
from asi.analysis.studies import STUDIES, find_study, run_study
from asi.config import Config
from asi.datasets import Dataset
from asi.index import Index
from asi.judges import Judge
from asi.run import Reporter


def write_study(
    name: str,
    dataset: Dataset,
    splits: Sequence[str],
    config: Config,
    judge: Judge,
    out: Path,
    reporter: Reporter,
    *,
    stopping: Callable[[], bool] = lambda: False,
    device: str | None = None,
) -> Path:
    """Run what is missing and write the page; returns its HTML file."""
    shared = (dataset, splits, config, judge, out, reporter)
    parts: dict[str, Callable[[], Section]] = {
        study: partial(run_study, STUDIES[study], *shared, stopping=stopping, device=device) for study in STUDIES
    }
    parts["expansion"] = partial(expansion_section, *shared, stopping=stopping, device=device)
    if name != "all" and name not in parts:
        find_study(name)  # says which there are
    sections = [part() for study, part in parts.items() if name in ("all", study)]
    introduction = [f"`{dataset.name}`, {', '.join(splits)}, {datetime.date.today()}."]
    if name != "all":
        return Page(sections[0].title, introduction, sections).write(out / name)
    with Index.load(out / "runs" / "default", device) as opened:
        stage = partial(reporter.stage, total=0)
        report = build_report(opened, dataset, splits, judge, baselines=True, stage=stage)
    return Page(f"Studies on {dataset.name}", report.introduction, [*report.sections, *sections], report.data).write(
        out
    )
