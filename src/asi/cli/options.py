"""What commands share: the application, their options, and small helpers."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asi.errors import AsiError

if TYPE_CHECKING:
    from asi.config import Config
    from asi.datasets import BadRecords, Dataset

app = typer.Typer(
    help="Search by generated, learned document identifiers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a trained run", show_default=False)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="count and leave out bad records instead of stopping")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Wait = Annotated[float, typer.Option(help="seconds to wait for another process that is writing")]
Mode = Annotated[str | None, typer.Option(help="beam, constrained or one-pass")]
Ranking = Annotated[str | None, typer.Option(help="order of the candidates: docid, vector or sum")]
SearchSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="a setting of search, e.g. search.centre_share=.1"),
]
JudgeName = Annotated[str, typer.Option("--judge", help="wordllama, tfidf, or a Hugging Face encoder or cross-encoder")]
Beams = Annotated[int | None, typer.Option(help="docids that are generated for a query")]
NumberOfCandidates = Annotated[int | None, typer.Option("--candidates", help="documents that are ranked, at the most")]
BucketCap = Annotated[int | None, typer.Option(help="documents of one bucket in an answer, at the most")]


def resolve_config(preset: str, path: Path | None, variant: str | None, overrides: list[str]) -> "Config":
    from asi.config import VARIANTS, load_config, with_overrides
    from asi.config import preset as find_preset
    from asi.errors import ConfigError

    config = find_preset(preset)
    if path is not None:
        config = load_config(path, config)
    if variant is not None:
        if variant not in VARIANTS:
            raise ConfigError(f"unknown variant {variant!r}; variants are {', '.join(VARIANTS)}")
        config = with_overrides(config, VARIANTS[variant])
    return with_overrides(config, overrides)


def search_settings(overrides: list[str] | None, **options: Any) -> dict[str, Any]:
    """How to search, by the names of SearchConfig: what --set says, and what other options say."""
    from asi.config import parse_overrides
    from asi.errors import ConfigError

    changes = parse_overrides(overrides or [])
    if others := sorted(changes.keys() - {"search"}):
        raise ConfigError(f"--set takes settings of search here; [{others[0]}] is fixed when a run is trained")
    return changes.get("search", {}) | {name: value for name, value in options.items() if value is not None}


def splits_to_measure(dataset: "Dataset") -> list[str]:
    from asi.datasets import measured_splits

    found = measured_splits(dataset)
    if not found:
        raise AsiError(f"{dataset.name} has no test split (it has {', '.join(dataset.splits)}); name one with --split")
    return found


def bad_records(skip: bool) -> "BadRecords | None":
    from asi.datasets import BadRecords

    return BadRecords() if skip else None


def report_skipped(bad: "BadRecords | None") -> None:
    if bad is not None and bad.counts:
        kinds = ", ".join(f"{count} {kind}" for kind, count in bad.counts.items())
        typer.echo(f"skipped bad records: {kinds}; the first: {bad.first}", err=True)


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and the first Ctrl-C ask the run to save and leave; the second ends it wherever it is."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, _: object) -> None:
        received.append(number)
        restore()  # the next one ends the process at once

    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, ask)
    try:
        yield lambda: bool(received)
    finally:
        restore()
