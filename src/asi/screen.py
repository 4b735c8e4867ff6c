"""What a person sees: progress on stderr, tables and answers on stdout."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from asi.metrics import DocidHealth
from asi.records import Document, Hit
from asi.training import StepReport

LINE_EVERY = 15.0  # seconds between lines where no bar can be drawn


class Lane:
    """A progress bar on a terminal, a line now and then elsewhere if wanted, for one thing at a time."""

    def __init__(self, console: Console, bar: Progress, label: str = "", *, lines: bool = True) -> None:
        self.console = console
        self.bar = bar
        self.label = label
        self.lines = lines and not console.is_terminal
        self.task: TaskID | None = None
        self.name, self.total, self.begun, self.said = "", 0, time.monotonic(), 0.0
        self.losses, self.docids = "", ""

    def stage(self, name: str, total: int) -> None:
        self.end_stage()
        name = f"{self.label}: {name}" if self.label else name
        self.task = self.bar.add_task(name, total=total or None, note="")
        self.name, self.total, self.begun, self.said = name, total, time.monotonic(), time.monotonic()
        self.losses, self.docids = "", ""
        self.line(f"{name}" + (f": {total}" if total else ""))

    def end_stage(self) -> None:
        if self.task is not None:  # one bar at a time: a long study would push the newest off the screen
            self.bar.remove_task(self.task)
            self.task = None
            if self.lines or self.console.is_terminal:
                self.message(f"{self.name} took {time.monotonic() - self.begun:.0f} s")

    def advance(self, done: int, note: str = "") -> None:
        if self.task is not None:
            self.bar.update(self.task, completed=done, note=note)
        if time.monotonic() - self.said > LINE_EVERY:
            self.said = time.monotonic()
            left = (self.said - self.begun) / max(done, 1) * (self.total - done)
            self.line(f"{self.name}: {done}/{self.total}, {left:.0f} s left{', ' + note if note else ''}")

    def step(self, report: StepReport) -> None:
        if report.losses is not None:
            self.losses = " ".join(f"{name} {value:.3g}" for name, value in report.losses.items())
        if report.health is not None:
            self.docids = short_health(report.health)
        note = f"{report.pairs_per_second:.0f} pairs/s  {self.losses}  {self.docids}"
        self.advance(report.step, note.strip())

    def message(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True)

    def warning(self, text: str) -> None:
        self.console.print(f"[bold yellow]Warning:[/] {escape(text)}", soft_wrap=True)

    def line(self, text: str) -> None:
        if self.lines:
            self.console.print(escape(text), soft_wrap=True)

    @contextmanager
    def lane(self, label: str) -> Iterator["Lane"]:
        """A bar beside this one."""
        beside = Lane(self.console, self.bar, label, lines=self.lines)
        try:
            yield beside
        finally:
            beside.end_stage()


class ScreenReporter(Lane):
    """What the progress of a command is told to; within `with` it is drawn."""

    def __init__(self, console: Console | None = None, *, lines: bool = True) -> None:
        console = console or Console(stderr=True, highlight=False)
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True)),  # what room is left
            console=console, disable=not console.is_terminal, expand=True,
        )  # fmt: skip
        super().__init__(console, bar, lines=lines)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


def short_health(health: DocidHealth) -> str:
    return f"docids {health.docids} (D/ID {health.d_per_id:.2f}, largest {health.largest_bucket})"


def table_text(rows: Sequence[Sequence[str]], texts: int = 2) -> str:
    """Rows as aligned columns, the first row being the titles: the same on a terminal and in a file.

    The first `texts` columns are aligned to the left.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def print_hits(found: Sequence[tuple[Hit, Document]]) -> None:
    if not found:
        sys.stdout.write("nothing found\n")
        return
    table = Table(box=None, pad_edge=False, show_header=True, header_style="bold")
    for title in ("", "score", "docid", "key", "document"):
        table.add_column(title, justify="right" if title in ("", "score") else "left", no_wrap=title != "document")
    for place, (hit, document) in enumerate(found, start=1):
        docid = ",".join(map(str, hit.docid or ()))
        table.add_row(str(place), f"{hit.score:.3f}", docid, escape(hit.key), escape(preview(document)))
    Console(highlight=False).print(table)


def preview(document: Document, length: int = 110) -> str:
    text = " ".join(document.content.split())
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def health_rows(health: DocidHealth) -> list[list[str]]:
    return [
        ["measure", "value"],
        ["documents", str(health.documents)],
        ["docids in use", str(health.docids)],
        ["documents per docid (D/ID)", f"{health.d_per_id:.2f}"],
        ["largest bucket", f"{health.largest_bucket} ({health.largest_share:.2%} of the corpus)"],
        ["perplexity per position", " ".join(f"{value:.1f}" for value in health.perplexity)],
    ]
