"""The demonstration: the main job from beginning to end on a built-in corpus."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from asi.checkpoint import RunFolder
from asi.config import Config
from asi.corpora import BUILTIN
from asi.errors import ConfigError
from asi.index import Index
from asi.metrics import as_json, report_rows
from asi.records import Document, Hit
from asi.run import Reporter, RunState, train
from asi.ways import WAYS, baselines_of, evaluate_baselines, evaluate_ways

NAME = "demo:"  # begins the name under which a demo's run remembers its data
SPLITS = ("test", "test_unseen")
QUERIES = {
    "hpo": ("can't sleep at night", "heart beats too fast", "fingers are unusually long and thin"),
    "pydoc": ("copy a whole directory tree", "turn a string into a date", "wait until a thread has finished"),
}


class DemoResult(NamedTuple):
    rows: list[list[str]]
    answers: list[tuple[str, list[tuple[Hit, Document]]]]
    summary: str


def run_demo(
    data: str, out: Path, minutes: float, reporter: Reporter, stopping: Callable[[], bool], device: str | None
) -> DemoResult:
    """Train, index, evaluate beside the baselines, answer three queries; writes the report into the run's folder."""
    if data not in BUILTIN:
        raise ConfigError(f"the demo runs on a built-in corpus: {', '.join(BUILTIN)}; got {data!r}")
    begun = time.monotonic()
    remove_demo(out)
    config = Config()
    config = replace(config, train=replace(config.train, minutes=minutes))
    dataset = BUILTIN[data]()
    with TemporaryDirectory() as name:
        cache = Path(name)
        folder = train(
            dataset,
            out,
            config,
            data=f"{NAME} {data}",
            device=device,
            reporter=reporter,
            stopping=stopping,
            cache=cache,
        )  # fmt: skip
        trained = time.monotonic()
        reporter.stage("evaluating", 0)
        with Index.load(out, device) as index:
            reports, _ = evaluate_ways(index, dataset, SPLITS, WAYS)
            reports |= evaluate_baselines(baselines_of(index, cache), dataset, SPLITS)
            answers = [(query, index.searcher.search_documents([query], 3)[0]) for query in QUERIES[data]]
    folder.report.write_text(json.dumps(as_json(reports), indent=1), encoding="utf-8")
    summary = (
        f"training and indexing took {trained - begun:.0f} s, evaluation {time.monotonic() - trained:.0f} s; "
        f'the measures are in {folder.report}; try: asi search {out} "your own query"'
    )
    return DemoResult(report_rows(reports), answers, summary)


def remove_demo(path: Path) -> None:
    """Delete the run of an earlier demo, and nothing else."""
    folder = RunFolder(path)
    if not folder.run.exists():
        return
    if not RunState.load(folder).data.startswith(NAME):
        raise ConfigError(f"{path} holds a run that is not a demo's; choose another --out")
    shutil.rmtree(path)
