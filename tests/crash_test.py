"""kill -9 during `asi add`, again and again: no acknowledged document may be lost, none may be half there.

python tests/crash_test.py --kills 200
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from toy import COLOURS, THINGS, toy_settings, train_toy, write_beir, write_encoder

from asi.index import Index

BATCH = 20


def text_of(key: str) -> str:
    draw = random.Random(key)
    return f"a {draw.choice(THINGS)} that is {draw.choice(COLOURS)}"


def feed(pipe, name: str) -> None:
    """New documents without end, until the reader is dead."""
    try:
        for i in range(1_000_000):
            key = f"{name}-{i}"
            pipe.write(json.dumps({"_id": key, "text": text_of(key)}) + "\n")
    except OSError:
        pass
    finally:
        with suppress(OSError):  # closing flushes what the dead reader will not read
            pipe.close()


def killed_add(run: Path, name: str, seconds: float) -> list[str]:
    """Start adding, kill -9 `seconds` after the first acknowledgement; returns the acknowledged keys."""
    command = [sys.executable, "-m", "asi", "add", str(run), "-", "--print-keys", "--batch", str(BATCH)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    feeder = threading.Thread(target=feed, args=(process.stdin, name), daemon=True)
    feeder.start()
    keys = [process.stdout.readline()]
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    keys += process.stdout.readlines()  # to the end of the pipe: what was acknowledged before the kill
    process.wait()
    feeder.join()
    timer.join()
    process.stdout.close()
    assert process.returncode == -9, f"asi add ended by itself with {process.returncode}"
    return [key.rstrip("\n") for key in keys if key.endswith("\n")]


def verify(run: Path, acknowledged: set[str], before: int) -> int:
    """Everything acknowledged is there and whole; batches are there whole or not at all."""
    with Index.load(run) as index:
        assert index.store.check() == []
        stored = {item.document.key: item.document.text for item in index.store.stored_documents()}
        lost = acknowledged - stored.keys()
        assert not lost, f"lost: {sorted(lost)[:5]}"
        wrong = [key for key, text in stored.items() if "-" in key and text != text_of(key)]
        assert not wrong, f"half there: {wrong[:5]}"
        assert (len(stored) - before) % BATCH == 0, "part of a batch is there"
        some = random.choice(sorted(acknowledged))
        assert some in {document.key for document in index.bucket(index.lookup(some).docid)}
        [hits] = index.search([text_of(some)], k=10)
        assert len(hits) == 10
        return len(stored)


def crash(run: Path, kills: int, seed: int = 0) -> int:
    """Kill `kills` times and verify after each; returns the number of acknowledged documents."""
    draw = random.Random(seed)
    with Index.load(run) as index:
        before = len(index)
    acknowledged: set[str] = set()
    start = time.monotonic()
    for i in range(kills):
        acknowledged |= set(killed_add(run, f"r{i}", draw.uniform(0, 0.5)))
        stored = verify(run, acknowledged, before)
        if i % 10 == 9 or i == kills - 1:
            elapsed = time.monotonic() - start
            print(
                f"{i + 1} kills, {len(acknowledged)} acknowledged, {stored} stored, none lost, {elapsed:.0f} s",
                flush=True,
            )
    return len(acknowledged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("beir", "encoder"):
            (folder / part).mkdir()
        write_beir(folder / "beir")
        write_encoder(folder / "encoder")
        train_toy(folder / "run", folder / "beir", toy_settings(folder / "encoder"))
        crash(folder / "run", parser.parse_args().kills)
