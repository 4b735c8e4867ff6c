"""The paper's comparisons of variants, docid lengths and docid ranges: runs that differ in one setting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path

from asi.analysis import figures
from asi.analysis.bench import Bench, measured_run
from asi.analysis.pages import Cell, Figure, Section, Table
from asi.analysis.report import PAPER_COLUMNS, docid_cells
from asi.config import PAPER_OBJECTIVE, VARIANTS, Config, with_overrides
from asi.errors import ConfigError
from asi.judges import Judge
from asi.metrics import Report

NOISE = 0.01  # a smaller difference between two runs may be their seeds'
NOISE_OF_A_QUERY = 0.5  # by the root of their number: about the standard error of a difference on the same queries
COLLAPSE = 10  # times as many documents per docid


@dataclass(frozen=True)
class Study:
    """Runs by name, each with the settings that make it different."""

    title: str
    introduction: str
    label: str  # what the runs differ in
    base: Sequence[str]  # settings of all its runs, if the user has no others
    runs: Mapping[str, Sequence[str]]
    findings: Callable[["Results"], list[str]]
    as_lines: bool = False  # the runs' names are numbers in order, so that lines can be drawn over them


Results = Mapping[str, Mapping[str, Mapping[str, Report]]]  # run -> way -> split -> report


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
    results = {
        name: measured_run(bench, f"{study.title}: {name}", folder, bench.dataset, config)
        for name, (folder, config) in study_runs(study, bench).items()
    }
    return study_section(study, results, bench.splits, bench.config, bench.judge)


def study_section(study: Study, results: Results, splits: Sequence[str], config: Config, judge: Judge) -> Section:
    tables = [
        Table(
            f"{split}: {title}; judge: {judge.name}",
            (study.label, *PAPER_COLUMNS, "invalid", "largest bucket", "R@10, ranked", "MRR@10, ranked"),
            [study_row(name, by[way][split]) for name, by in results.items()],
        )
        for split in splits
        for way, title in (("beam", "plain beam, as in the paper"), ("constrained", "constrained beam"))
    ]
    text = (
        f"{study.introduction} Each run: {config.train.steps} steps, seed {config.train.seed}, nothing ranked by "
        "tokens. Documents ranked behind the constrained beam are of the nearest buckets too, whatever is generated: "
        f"they say more about vectors than about docids. What the paper found, on {splits[0]} by the plain beam:"
    )
    pictures = [study_figure(study, results, splits[0])] if study.as_lines else []
    return Section(study.title, [text, *study.findings(results)], tables, pictures)


def study_row(name: str, report: Report) -> list[Cell]:
    document = report.document or {}
    invalid = (report.invalid or {}).get("all")
    return [name, *docid_cells(report), invalid, report.largest_bucket, document.get("R@10"), document.get("MRR@10")]


def study_figure(study: Study, results: Results, split: str) -> Figure:
    reports = [by["beam"][split] for by in results.values()]

    def line(value: Callable[[Report], float | None]) -> list[float | None]:
        return [value(report) for report in reports]

    panels: dict[str, figures.Lines] = {
        "Recall, docid level": {k: line(lambda r, k=k: (r.docid or {}).get(k)) for k in ("R@1", "R@5", "R@10")},  # type: ignore[misc]
        "Quality score": {
            "Mi-QS": line(lambda r: (r.quality or {}).get("micro")),
            "Ma-QS": line(lambda r: (r.quality or {}).get("macro")),
        },
        "Documents per docid": {"D/ID": line(lambda r: r.d_per_id)},
        "Documents per query": {"D/Q": line(lambda r: r.d_per_q)},
    }
    picture = figures.lines_figure(panels, [int(name) for name in results], study.label)
    return Figure(f"{study.title}, {split}", file_name(study), picture)


# What the paper found, held against the results -----------------------------------------------------------------------


def verdict(claim: str, margins: Sequence[float], figures_: str, queries: int) -> str:
    """A claim holds if all its margins are beyond the noise, and not if one is as far below; between them one run of
    each on so many queries is not enough to tell."""
    least, noise = min(margins), max(NOISE, NOISE_OF_A_QUERY / sqrt(queries))
    word = "holds here" if least > noise else "does not hold here" if least < -noise else "too close to tell here"
    return f"{claim}: {word} ({figures_})."


def coarser(report: Report, other: Report) -> float:
    """How much larger D/ID is, as a share."""
    return (report.d_per_id or 0.0) / (other.d_per_id or 1.0) - 1


def first_split(results: Results, run: str, way: str = "beam") -> Report:
    return next(iter(results[run][way].values()))


def recall_of(report: Report, k: int) -> float:
    return (report.docid or {})[f"R@{k}"]


def variant_findings(results: Results) -> list[str]:
    whole, no_contrastive, no_reverse = (
        first_split(results, run) for run in ("unique", "no-contrastive", "no-reverse")
    )
    separate = first_split(results, "no-reparameterization")
    together = [first_split(results, run) for run in ("unique", "share", "no-reverse")]
    joint = [recall_of(report, 1) - (report.acc or 0) for report in together]
    random = first_split(results, "random-docids")
    return [
        verdict(
            f"Without the contrastive loss the docids collapse (D/ID {COLLAPSE} times as large)",
            [coarser(no_contrastive, whole) + 1 - COLLAPSE],
            f"D/ID {no_contrastive.d_per_id:.1f} against {whole.d_per_id:.2f}",
            whole.queries,
        ),
        verdict(
            "Without reverse cross-entropy there is more recall, and buckets are coarser",
            [recall_of(no_reverse, 10) - recall_of(whole, 10), coarser(no_reverse, whole)],
            f"R@10 {recall_of(no_reverse, 10):.3f} against {recall_of(whole, 10):.3f}, "
            f"D/ID {no_reverse.d_per_id:.2f} against {whole.d_per_id:.2f}",
            whole.queries,
        ),
        verdict(
            "Without reparameterization R@1 is below Acc, and with it above",
            [(separate.acc or 0) - recall_of(separate, 1), *joint],
            f"without: R@1 {recall_of(separate, 1):.3f}, Acc {separate.acc:.3f}; with (unique, share, no-reverse): "
            + "; ".join(f"{recall_of(report, 1):.3f}, {report.acc:.3f}" for report in together),
            whole.queries,
        ),
        verdict(
            "Learned docids are easier to generate than random ones (our control)",
            [recall_of(whole, 10) - recall_of(random, 10)],
            f"R@10 {recall_of(whole, 10):.3f} against {recall_of(random, 10):.3f}",
            whole.queries,
        ),
    ]


def trend(values: Sequence[float]) -> str:
    steps = [later - earlier for earlier, later in pairwise(values)]
    if not any(steps):
        return "stays"
    if all(step >= 0 for step in steps):
        return "rises"
    if all(step <= 0 for step in steps):
        return "falls"
    if values[-1] == values[0]:
        return "wavers"
    return "rises overall" if values[-1] > values[0] else "falls overall"


def size_findings(results: Results) -> list[str]:
    """The paper: longer or wider docids give better quality, less recall and smaller buckets."""
    reports = [first_split(results, run) for run in results]
    recalls = [recall_of(report, 10) for report in reports]
    qualities = [(report.quality or {}).get("micro", 0.0) for report in reports]
    sizes = [report.d_per_id or 0.0 for report in reports]
    claims = {
        "R@10 falls": (recalls[0] - recalls[-1], recalls),
        "Mi-QS rises": (qualities[-1] - qualities[0], qualities),
        "D/ID falls": (coarser(reports[0], reports[-1]), sizes),
    }
    return [
        verdict(
            f"{claim} as docids grow",
            [margin],
            f"it {trend(values)}: {', '.join(f'{value:.3g}' for value in values)}",
            reports[0].queries,
        )
        for claim, (margin, values) in claims.items()
    ]


STUDIES: dict[str, Study] = {
    "variants": Study(
        "Variants",
        "The paper's variants: docids of 4 codes out of 256, shaped by its three losses alone. What is ours: the "
        "frozen encoder with a residual layer that a softmax on vectors trains, and the schedule (straight-through "
        "from .3 of the run on, docids frozen at the end). Random docids: the same decoder on docids that mean "
        "nothing.",
        "variant",
        PAPER_OBJECTIVE,
        VARIANTS,
        variant_findings,
    ),
    "length": Study(
        "Docid length",
        "The default objective with docids of 2 to 6 codes out of 256, as in the paper.",
        "length",
        ("model.V=256",),
        {str(m): (f"model.m={m}",) for m in range(2, 7)},
        size_findings,
        as_lines=True,
    ),
    "range": Study(
        "Docid range",
        "The default objective with 4 codes out of 32 to 512, as in the paper.",
        "codes per position",
        ("model.m=4",),
        {str(V): (f"model.V={V}",) for V in (32, 64, 128, 256, 512)},
        size_findings,
        as_lines=True,
    ),
}


def find_study(name: str) -> Study:
    if name not in STUDIES:
        raise ConfigError(f"unknown study {name!r}; studies are {', '.join(STUDIES)}, expansion and all")
    return STUDIES[name]
