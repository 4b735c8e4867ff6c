"""The paper's comparisons of variants, docid lengths and docid ranges: runs that differ in one setting."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asi.analysis import figures
from asi.analysis.bench import Bench, measured_run
from asi.analysis.findings import Results, health_text, length_findings, range_findings, variant_findings
from asi.analysis.pages import Cell, Figure, Section, Table
from asi.analysis.report import PAPER_COLUMNS, docid_cells
from asi.config import PAPER_OBJECTIVE, VARIANTS, Config, with_overrides
from asi.judges import Judge
from asi.metrics import Report


@dataclass(frozen=True)
class Study:
    """Runs by name, each with the settings that make it different."""

    title: str
    introduction: str
    label: str  # what the runs differ in
    base: Sequence[str]  # settings of all its runs, if the user has no others
    runs: Mapping[str, Sequence[str]]
    findings: Callable[[Results], list[str]]
    as_lines: bool = False  # the runs' names are numbers in order, so that lines can be drawn over them


def study_runs(study: Study, bench: Bench) -> dict[str, tuple[Path, Config]]:
    """The folder and settings of each run; runs with the same settings are shared by all studies."""
    folders = {bench.config: "default"}
    for other in STUDIES.values():
        for name, config in configs_of(other, bench).items():
            folders.setdefault(config, f"{file_name(other)}-{name}")
    return {name: (bench.run_folder(folders[config]), config) for name, config in configs_of(study, bench).items()}


def configs_of(study: Study, bench: Bench) -> dict[str, Config]:
    return {
        name: with_overrides(bench.config, [*study.base, *bench.settings, *overrides])
        for name, overrides in study.runs.items()
    }


def file_name(study: Study) -> str:
    return study.title.lower().replace(" ", "-")


def run_study(study: Study, bench: Bench) -> Section:
    """Train and measure what is missing."""
    runs = study_runs(study, bench)
    results = {
        name: measured_run(bench, f"{study.title}: {name}", folder, bench.dataset, config)
        for name, (folder, config) in runs.items()
    }
    return study_section(study, results, bench.splits, [config for _, config in runs.values()], bench.judge)


def study_section(
    study: Study, results: Results, splits: Sequence[str], configs: Sequence[Config], judge: Judge
) -> Section:
    tables = [
        Table(
            f"{split}: {title}; judge: {judge.name}",
            (study.label, *PAPER_COLUMNS, *MORE_COLUMNS),
            [study_row(name, by[way][split]) for name, by in results.items()],
        )
        for split in splits
        for way, title in (("beam", "plain beam, as in the paper"), ("constrained", "constrained beam"))
    ]
    text = (
        f"{study.introduction} Docids of {span(c.model.m for c in configs)} codes out of "
        f"{span(c.model.V for c in configs)}; each run: {configs[0].train.steps} steps, seed {configs[0].train.seed}, "
        "nothing ranked by tokens. Documents ranked behind the constrained beam are of the nearest buckets too, "
        "whatever is generated: they say more about vectors than about docids."
    )
    found = f"What the paper found, on {splits[0]} by the plain beam (Acc and R@1: of any relevant document):"
    pictures = [study_figure(study, results, splits[0], judge)] if study.as_lines else []
    health = health_text(results, {name: config.model.V for name, config in zip(results, configs, strict=True)})
    paragraphs = [text, *health, found, *study.findings(results)]
    return Section(study.title, paragraphs, tables, pictures)


def span(values: Iterable[int]) -> str:
    """
    >>> span([2, 4, 3]), span([4, 4])
    ('2 to 4', '4')
    """
    ordered = sorted(values)
    return f"{ordered[0]}" if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


MORE_COLUMNS = (
    "expected R@10", "invalid", "least perplexity", "largest bucket", "R@10, ranked", "MRR@10, ranked",
)  # fmt: skip


def study_row(name: str, report: Report) -> list[Cell]:
    document, health = report.document or {}, [min(report.perplexity or [0.0]), report.largest_bucket]
    shares = [(report.expectation or {}).get("R@10"), (report.invalid or {}).get("all")]
    return [name, *docid_cells(report), *shares, *health, document.get("R@10"), document.get("MRR@10")]


def study_figure(study: Study, results: Results, split: str, judge: Judge) -> Figure:
    reports = [by["beam"][split] for by in results.values()]

    def line(value: Callable[[Report], float | None]) -> list[float | None]:
        return [value(report) for report in reports]

    panels: dict[str, figures.Lines] = {
        "Recall, docid level": {k: line(lambda r, k=k: (r.docid or {}).get(k)) for k in ("R@1", "R@5", "R@10")},  # type: ignore[misc]
        f"Quality score by {judge.name}": {
            "Mi-QS": line(lambda r: (r.quality or {}).get("micro")),
            "Ma-QS": line(lambda r: (r.quality or {}).get("macro")),
        },
        "Documents per docid": {"D/ID": line(lambda r: r.d_per_id)},
        "Documents per query": {"D/Q": line(lambda r: r.d_per_q)},
    }
    picture = figures.lines_figure(panels, [int(name) for name in results], study.label)
    return Figure(f"{study.title}, {split}, plain beam", file_name(study), picture)


STUDIES: dict[str, Study] = {
    "variants": Study(
        "Variants",
        "The paper's variants, docids shaped by its three losses alone; heads and decoder learn together to the end. "
        "What is ours: the frozen encoder with a residual layer, which a softmax on vectors trains and the docids' "
        "losses do not, and straight-through from .3 of the run on. Random docids: the same decoder on docids that "
        "mean nothing.",
        "variant",
        (*PAPER_OBJECTIVE, "train.freeze_docids=1.0"),
        VARIANTS,
        variant_findings,
    ),
    "length": Study(
        "Docid length",
        "The default objective with docids of several lengths.",
        "length",
        ("model.V=256",),
        {str(m): (f"model.m={m}",) for m in range(2, 7)},
        length_findings,
        as_lines=True,
    ),
    "range": Study(
        "Docid range",
        "The default objective with fewer and with more codes to choose from.",
        "codes per position",
        ("model.m=4",),
        {str(V): (f"model.V={V}",) for V in (32, 64, 128, 256, 512)},
        range_findings,
        as_lines=True,
    ),
}
