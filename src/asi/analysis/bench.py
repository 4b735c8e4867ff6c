"""Runs of a study: each trained for the same number of steps from the same frozen features, then measured.

The measures are kept in the run's folder: a study that was stopped goes on where it was.
"""

import datetime
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asi.analysis.fingerprint import data_fingerprint
from asi.batches import training_texts
from asi.checkpoint import FORMAT_VERSION
from asi.config import Config, to_dict
from asi.datasets import Dataset
from asi.folders import write_atomically
from asi.index import Index
from asi.judges import Judge
from asi.metrics import Report, as_json, from_json
from asi.run import Reporter, check_same_run, train
from asi.ways import evaluate_ways

STUDIED_WAYS: dict[str, dict[str, Any]] = {"beam": {"mode": "beam"}, "constrained": {"mode": "constrained"}}
Measures = dict[str, dict[str, Report]]  # way -> split -> report


@dataclass(frozen=True)
class Bench:
    """What all runs of a study share."""

    dataset: Dataset
    splits: Sequence[str]
    config: Config  # the number of steps, and everything that the runs do not change
    settings: Sequence[str]  # of the user, which are in it too: a study's own are below them
    judge: Judge
    out: Path
    reporter: Reporter
    stopping: Callable[[], bool] = lambda: False
    device: str | None = None
    fingerprints: dict[int, str] = field(default_factory=dict)  # by the identity of the data set
    unmeasured: set[Path] = field(default_factory=set)  # the runs that are still to come
    also: list[str] = field(default_factory=list)  # what is to come beside the runs
    seconds: list[float] = field(default_factory=list)  # what runs took, those of earlier days too
    dates: set[str] = field(default_factory=set)  # on which runs were measured

    def plan(self, folders: Iterable[Path], also: Sequence[str] = ()) -> None:
        """Say which runs will be asked for, and what else takes its time, so that the time left can be told."""
        self.also.extend(also)
        self.unmeasured.update(folder for folder in folders if not measures_file(folder).exists())

    def fingerprint(self, dataset: Dataset) -> str:
        if id(dataset) not in self.fingerprints:
            self.fingerprints[id(dataset)] = data_fingerprint(training_texts(dataset), dataset, self.splits)
        return self.fingerprints[id(dataset)]

    def run_folder(self, name: str) -> Path:
        return self.out / "runs" / name

    @property
    def cache(self) -> Path:
        return self.out / "cache"


def measures_file(folder: Path) -> Path:
    return folder / "study.json"


def measured_run(bench: Bench, label: str, folder: Path, dataset: Dataset, config: Config) -> Measures:
    """The measures of a run: read from its folder, or trained for."""
    check_same_run(folder, config, dataset.name)
    kept = measures_file(folder)
    wanted = {
        "judge": bench.judge.source,
        "splits": list(bench.splits),
        "data": bench.fingerprint(dataset),
        "settings": to_dict(config),
        "format": FORMAT_VERSION,
    }
    if kept.exists():
        saved = json.loads(kept.read_text(encoding="utf-8"))
        if "date" in saved and {name: saved.get(name) for name in wanted} == wanted:
            bench.reporter.message(f"{label}: measured already")
            return known_measures(bench, saved)
    bench.unmeasured.add(folder)
    bench.reporter.message(f"{label}, {time_left(bench)}")
    started, is_new = time.monotonic(), not folder.exists()
    train(
        dataset, folder, config, resume=True, device=bench.device, cache=bench.cache,
        reporter=bench.reporter, stopping=bench.stopping,
    )  # fmt: skip
    bench.reporter.stage("measuring", 0)
    with Index.load(folder, bench.device, config.search) as opened:
        reports, _ = evaluate_ways(opened, dataset, bench.splits, STUDIED_WAYS, bench.judge)
    found: dict[str, Any] = {"date": str(datetime.date.today()), "reports": as_json(reports)}
    if is_new:  # what a run that goes on takes says nothing about a whole one
        found["seconds"] = time.monotonic() - started
    write_atomically(kept, json.dumps(wanted | found, indent=1))
    bench.unmeasured.discard(folder)
    return known_measures(bench, found)


def known_measures(bench: Bench, found: Mapping[str, Any]) -> Measures:
    """The measures, from what is kept of a run; the bench remembers when and how long it ran."""
    bench.dates.add(found["date"])
    bench.seconds.extend([found["seconds"]] if "seconds" in found else [])
    return from_json(found["reports"])


def time_left(bench: Bench) -> str:
    runs = len(bench.unmeasured)
    text = f"{runs} run{'s' if runs > 1 else ''} to go"
    if bench.seconds:
        text += f", about {runs * sum(bench.seconds) / len(bench.seconds) / 60:.0f} min"
    return " and ".join([text, *bench.also])
