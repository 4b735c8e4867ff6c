"""Systems on equal terms: train what needs training, measure all in one way, and write one table."""

import gc
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from asi.analysis.comparison_page import comparison_page
from asi.analysis.fingerprint import data_fingerprint
from asi.analysis.side_by_side import Task, side_by_side
from asi.analysis.system_measures import Measured, run_system
from asi.datasets import Dataset
from asi.errors import AsiError, ConfigError, Interrupted, one_line
from asi.folders import write_atomically
from asi.run import Reporter
from asi.systems.table import BY_NAME, ROWS, System
from asi.systems.workplace import Terms, Workplace

FORMER_TERMS = {"jobs": 1}  # of comparisons that were begun when there was no choice


def open_comparison(workplace: Workplace, splits: Sequence[str], *, resume: bool) -> None:
    """Refuse splits that the data has not, a folder with another comparison, or with this one if it is not to be
    continued."""
    file = workplace.out / "compare.json"
    settings = {
        "data": workplace.dataset.name,
        "texts": data_fingerprint(workplace.texts, workplace.dataset, splits),
        **asdict(workplace.terms),
        "splits": list(splits),
    }
    if file.exists():
        if FORMER_TERMS | json.loads(file.read_text(encoding="utf-8")) != settings:
            raise ConfigError(f"{workplace.out} holds a comparison with other settings or data; choose another --out")
        if not resume:
            raise ConfigError(f"{workplace.out} holds a comparison already; continue it with --resume")
        return
    if workplace.out.exists() and any(workplace.out.iterdir()):
        raise ConfigError(f"{workplace.out} is not empty and holds no comparison; choose another --out")
    _ = workplace.pretrained  # an encoder that can't be loaded must not take the folder
    workplace.out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(settings, indent=1))


def compare(systems: Sequence[System], workplace: Workplace, splits: Sequence[str]) -> Path:
    """Run what is missing and write the page; a system that fails has its error in the place of its row."""
    set_aside_former(workplace)
    found = {system.name: Measured.load(measures_file(workplace, system)) for system in ROWS}  # of earlier calls too
    measured = {name: own for name, own in found.items() if own is not None}
    to_do = [system for system in systems if system.name not in measured]
    for system in to_do:
        keep_settings(system, workplace)
    progress = Progress(to_do, len(systems) - len(to_do), workplace)
    failed: dict[str, str] = {}
    run_all = one_by_one if workplace.terms.jobs == 1 else in_processes
    for name, error in run_all(to_do, workplace, splits, progress):
        progress.end(name)
        own = Measured.load(measures_file(workplace, BY_NAME[name]))
        if error is None and own is not None:
            measured[name] = own
        else:
            failed[name] = error or "its measures can't be read back"
            workplace.reporter.warning(f"{name} failed: {failed[name]}")
    if not measured:
        raise AsiError(f"no system could be run; the last one said: {next(reversed(failed.values()))}")
    shown = [system for system in ROWS if system.name in measured]
    return comparison_page(shown, measured, failed, workplace, splits).write(workplace.out)


def set_aside_former(workplace: Workplace) -> None:
    """Move away what was trained and measured with other settings than a system has in the table now."""
    for system in ROWS:
        folder, file = workplace.folder(system.name), settings_file(workplace, system)
        if not folder.exists() or (file.exists() and json.loads(file.read_text(encoding="utf-8")) == system.settings):
            continue
        former = folder.with_name(f"{folder.name}.former")
        shutil.rmtree(former, ignore_errors=True)
        folder.rename(former)
        workplace.reporter.message(f"{system.name} was run with other settings; that is in {former} now")


def keep_settings(system: System, workplace: Workplace) -> None:
    """For all that its folder will hold; also in those of systems that it may train beside itself."""
    for own in (system, *(BY_NAME[name] for name in system.after)):
        file = settings_file(workplace, own)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(own.settings, indent=1))


class Progress:
    """Says which system begins, and how long all that are left will take."""

    def __init__(self, to_do: Sequence[System], done: int, workplace: Workplace) -> None:
        self.left = {system.name: system for system in to_do}
        self.begun: dict[str, float] = {}  # monotonic time
        self.in_all = done + len(to_do)
        self.done = done
        self.overheads: list[float] = []  # minutes beside training, of the systems that have ended
        self.workplace = workplace

    def begin(self, name: str) -> None:
        terms = self.workplace.terms
        left = minutes_left(list(self.left.values()), terms.minutes, self.overheads) / terms.jobs
        self.begun[name] = time.monotonic()
        place = self.done + len(self.begun)
        self.workplace.reporter.message(f"{name}, system {place} of {self.in_all}, about {left:.0f} min left")

    def end(self, name: str) -> None:
        minutes = (time.monotonic() - self.begun[name]) / 60
        self.overheads.append(minutes - (self.workplace.terms.minutes if self.left.pop(name).trains else 0))


def one_by_one(
    systems: Sequence[System], workplace: Workplace, splits: Sequence[str], progress: Progress
) -> Iterator[tuple[str, str | None]]:
    """Run the systems; the name of each as it ends, and what went wrong."""
    for system in systems:
        progress.begin(system.name)
        try:
            run_and_keep(system, workplace, splits)
            yield system.name, None
        except Interrupted:
            raise
        except Exception as error:  # one system's failure must not cost the others
            yield system.name, one_line(error)
        gc.collect()  # a system's model and index go before the next one's come


def in_processes(
    systems: Sequence[System], workplace: Workplace, splits: Sequence[str], progress: Progress
) -> Iterator[tuple[str, str | None]]:
    """The same, several at a time."""
    own = (workplace.dataset, workplace.out, workplace.terms, workplace.device)
    tasks = [Task(one.name, partial(run_elsewhere, one.name, own, tuple(splits)), one.after) for one in systems]
    return side_by_side(
        tasks, workplace.terms.jobs, workplace.reporter, workplace.stopping, lambda task: progress.begin(task.name)
    )


def run_elsewhere(
    name: str,
    place: tuple[Dataset, Path, Terms, torch.device],
    splits: Sequence[str],
    reporter: Reporter,
    stopping: Callable[[], bool],
) -> None:
    """In a process that has nothing yet."""
    run_and_keep(BY_NAME[name], Workplace(*place, reporter, stopping), splits)


def run_and_keep(system: System, workplace: Workplace, splits: Sequence[str]) -> None:
    run_system(system, workplace, splits).save(measures_file(workplace, system))


def measures_file(workplace: Workplace, system: System) -> Path:
    return workplace.folder(system.name) / "measured.json"


def settings_file(workplace: Workplace, system: System) -> Path:
    return workplace.folder(system.name) / "settings.json"


def minutes_left(to_do: Sequence[System], minutes: float, overheads: Sequence[float]) -> float:
    """Of training, and of what came on top of it so far: encoding, indexing, measuring."""
    each = max(0.0, float(np.mean(overheads))) if overheads else 0.0
    return sum(minutes * system.trains + each for system in to_do)
