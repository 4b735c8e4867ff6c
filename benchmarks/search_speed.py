"""How fast a run answers: cold start, milliseconds per query by mode and batch, documents added per second.

    python benchmarks/search_speed.py [RUN]      (default runs/demo; `make demo` makes it)

Prints its table and writes it beside the run as bench.json, with the machine it came from.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kept import keep

from asi import Document, Index
from asi.screen import table_text

BATCHES = (1, 32)
MODES = ("beam", "constrained", "one-pass")
QUERIES = 256


def seconds(action: Callable[[], object], repeats: int = 1) -> float:
    """The median time of an action."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def cold_start(run: Path) -> float:
    command = [sys.executable, "-m", "asi", "search", str(run), "can't sleep at night"]
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True), repeats=3)


def query_milliseconds(index: Index, queries: list[str], mode: str, batch: int) -> float:
    searcher = index.configured(mode=mode)
    searcher.search(queries[:batch], 10)
    parts = [queries[start : start + batch] for start in range(0, len(queries), batch)]
    return 1000 * seconds(lambda: [searcher.search(part, 10) for part in parts]) / len(queries)


def added_per_second(run: Path, documents: list[Document]) -> float:
    with tempfile.TemporaryDirectory() as name, Index.load(shutil.copytree(run, Path(name) / "run")) as index:
        return len(documents) / seconds(lambda: index.add(documents))


def main(run: Path) -> None:
    results: dict[str, float] = {"cold start of asi search, s": cold_start(run)}
    with Index.load(run) as index:
        stored = [item.document for item, _ in zip(index.store.stored_documents(), range(QUERIES), strict=False)]
        queries = [document.title or document.text[:60] for document in stored]
        for mode in MODES:
            for batch in BATCHES:
                results[f"{mode}, batch {batch}, ms per query"] = query_milliseconds(index, queries, mode, batch)
    new = [Document(f"new {i}", document.text, document.title) for i, document in enumerate(stored)]
    results["documents added per second"] = added_per_second(run, new)
    print(table_text([["measure", "value"], *([name, f"{value:.2f}"] for name, value in results.items())]))
    keep(run / "bench.json", results)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
