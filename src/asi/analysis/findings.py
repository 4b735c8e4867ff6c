"""What the paper found, held against runs on the user's data: holds here, does not hold, or too close to tell."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import hypot, sqrt
from typing import NamedTuple

from asi.metrics import Report

NOISE = 0.01  # a smaller difference between shares of two runs may be their seeds'
COARSENESS_NOISE = 0.1  # likewise of D/ID, as a share of it: it varies by 1% to 4% with the seed
ERROR_OF_A_QUERY = 0.5  # by the root of their number: about the standard error of a difference on the same queries
ERRORS = 2  # so many standard errors are beyond chance
COLLAPSE = 10  # times as many documents per docid
LEAST_PERPLEXITY, LARGEST_BUCKET, MOST_D_PER_ID = 1 / 3, 0.01, 6.0  # of V, of the corpus: docids in good health
INSENSITIVE = 0.1  # a recall that changes by less is not very sensitive
Results = Mapping[str, Mapping[str, Mapping[str, Report]]]  # run -> way -> split -> report


class Margin(NamedTuple):
    """By how much a claim holds, and how much of that may be chance."""

    value: float
    noise: float = NOISE

    def turned(self) -> "Margin":
        """Of the opposite claim."""
        return Margin(-self.value, self.noise)


def of_queries(value: float, queries: int) -> Margin:
    """A margin of shares of so many queries."""
    return Margin(value, max(NOISE, ERRORS * ERROR_OF_A_QUERY / sqrt(queries)))


def verdict(claim: str, margins: Sequence[Margin], figures_: str) -> str:
    """A claim holds if all its margins are beyond the noise, and not if one is as far below; between them one run of
    each is not enough to tell."""
    word = "too close to tell here"
    if all(margin.value > margin.noise for margin in margins):
        word = "holds here"
    elif any(margin.value < -margin.noise for margin in margins):
        word = "does not hold here"
    return f"{claim}: {word} ({figures_})."


def coarser(report: Report, other: Report) -> Margin:
    """How much larger D/ID is, as a share; it is of the whole corpus, however many queries there are."""
    return Margin((report.d_per_id or 0.0) / (other.d_per_id or 1.0) - 1, COARSENESS_NOISE)


def better(report: Report, other: Report) -> Margin:
    """How much larger Mi-QS is, and twice the error that the spread of the queries' own scores leaves."""
    mine, its = report.quality or {}, other.quality or {}
    error = hypot(mine.get("deviation", 0.0), its.get("deviation", 0.0)) / sqrt(report.queries)
    return Margin(mine.get("micro", 0.0) - its.get("micro", 0.0), ERRORS * error)


def above_heads(report: Report) -> Margin:
    """By how much the decoder's first docid is right more often than the heads' own, counted in the same way."""
    return of_queries(recall_of(report, 1) - (report.heads or 0.0), report.queries)


def collapsed_from(report: Report) -> float:
    """D/ID from which on docids count as collapsed beside a run's: a small corpus has no room for many times as
    much."""
    return min(COLLAPSE * (report.d_per_id or 1.0), documents_of(report) / 2)


def documents_of(report: Report) -> float:
    return (report.docids or 0) * (report.d_per_id or 0.0)


def first_split(results: Results, run: str) -> Report:
    return next(iter(results[run]["beam"].values()))


def recall_of(report: Report, k: int) -> float:
    return (report.docid or {})[f"R@{k}"]


def expected_of(report: Report, k: int) -> float:
    return (report.expectation or {})[f"R@{k}"]


def variant_findings(results: Results) -> list[str]:
    whole, no_contrastive, no_reverse, separate, random = (
        first_split(results, run)
        for run in ("unique", "no-contrastive", "no-reverse", "no-reparameterization", "random-docids")
    )
    if whole.collapsed:
        return [
            f"The docids of unique have collapsed, so there is nothing to hold the others against: {whole.collapsed}."
        ]
    together = [first_split(results, run) for run in ("unique", "share", "no-reverse")]
    queries = whole.queries
    collapse = Margin((no_contrastive.d_per_id or 0.0) / collapsed_from(whole) - 1)
    return [
        verdict(
            f"Without the contrastive loss the docids collapse (D/ID {COLLAPSE} times as large, or half the corpus)",
            [collapse],
            f"D/ID {no_contrastive.d_per_id:.1f} against {whole.d_per_id:.2f}",
        ),
        verdict(
            "Without reverse cross-entropy there is more recall",
            [of_queries(recall_of(no_reverse, 10) - recall_of(whole, 10), queries)],
            f"R@10 {recall_of(no_reverse, 10):.3f} against {recall_of(whole, 10):.3f}",
        ),
        verdict(
            "Without reverse cross-entropy buckets are coarser",
            [coarser(no_reverse, whole)],
            f"D/ID {no_reverse.d_per_id:.2f} against {whole.d_per_id:.2f}",
        ),
        verdict(
            "Without reparameterization R@1 is below Acc",
            [above_heads(separate).turned()],
            f"R@1 {recall_of(separate, 1):.3f}, Acc {separate.heads or 0:.3f}",
        ),
        verdict(
            "With it R@1 is above Acc, whether unique, share or without reverse cross-entropy",
            [above_heads(report) for report in together],
            "; ".join(f"R@1 {recall_of(report, 1):.3f}, Acc {report.heads or 0:.3f}" for report in together),
        ),
        verdict(
            "Docids learned with the paper's losses are easier to generate than random ones, also where one document "
            "stands for each docid (our control)",
            [of_queries(level(whole, 10) - level(random, 10), queries) for level in (recall_of, expected_of)],
            f"R@10 {recall_of(whole, 10):.3f} against {recall_of(random, 10):.3f}, of one document for each docid "
            f"{expected_of(whole, 10):.3f} against {expected_of(random, 10):.3f}; "
            f"D/ID {whole.d_per_id:.2f} against {random.d_per_id:.2f}",
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


def length_findings(results: Results, what_grows: str = "docids grow") -> list[str]:
    """The paper: longer docids give better quality, less recall and smaller buckets."""
    reports = [first_split(results, run) for run in results]
    recalls = [recall_of(report, 10) for report in reports]
    qualities = [(report.quality or {}).get("micro", 0.0) for report in reports]
    sizes = [report.d_per_id or 0.0 for report in reports]
    claims = {
        "R@10 falls": (of_queries(recalls[0] - recalls[-1], reports[0].queries), recalls),
        "Mi-QS rises": (better(reports[-1], reports[0]), qualities),
        "D/ID falls": (coarser(reports[0], reports[-1]), sizes),
    }
    return [
        verdict(
            f"{claim} as {what_grows}", [margin],
            f"it {trend(values)}: {', '.join(f'{value:.3g}' for value in values)}",
        )
        for claim, (margin, values) in claims.items()
    ]  # fmt: skip


def range_findings(results: Results) -> list[str]:
    """The paper: the same is seen with more codes to choose from, but it changes little."""
    recalls = [recall_of(first_split(results, run), 10) for run in results]
    spread, queries = max(recalls) - min(recalls), first_split(results, next(iter(results))).queries
    little = of_queries(INSENSITIVE - spread, queries)
    claim = f"R@10 is not very sensitive to the range (changes by less than {INSENSITIVE})"
    alike = length_findings(results, "codes per position grow in number")
    return [*alike, verdict(claim, [little], f"from {min(recalls):.3f} to {max(recalls):.3f}")]


def health_text(results: Results, V: Mapping[str, int]) -> list[str]:
    """Which runs have collapsed, and which others have docids of which less can be said; V codes by run."""
    reports = {run: first_split(results, run) for run in results}
    collapsed = [run for run, report in reports.items() if report.collapsed]
    weak = [run for run, report in reports.items() if run not in collapsed and not is_healthy(report, V[run])]
    found = []
    if collapsed:
        found.append(f"Collapsed, so that recall at docid level means nothing: {', '.join(collapsed)}.")
    if weak:
        found.append(
            f"Coarse or uneven docids (D/ID above {MOST_D_PER_ID:g}, a bucket of more than {LARGEST_BUCKET:.0%} of the "
            f"corpus, or a position whose perplexity is below a third of its codes): {', '.join(weak)}. Their recall "
            "owes much to large buckets, and more steps may change what is found here."
        )
    return found


def is_healthy(report: Report, V: int) -> bool:
    return (
        min(report.perplexity or [0.0]) >= LEAST_PERPLEXITY * V
        and (report.largest_bucket or 0) <= max(1, LARGEST_BUCKET * documents_of(report))
        and (report.d_per_id or 0.0) <= MOST_D_PER_ID
    )
