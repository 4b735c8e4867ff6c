"""Files and folders that are replaced whole: written beside, then renamed. A lock for what processes make together."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

A_RENAME = 0.2  # seconds: far more than a process needs from one rename to the next
LOCK_POLL = 0.1  # seconds


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """The file has either its old or its new content, also after a crash."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    sync(beside)
    beside.replace(path)
    sync(path.parent)


def predecessor(folder: Path) -> Path:
    """Where a folder is while its successor takes its place."""
    return folder.parent / f".{folder.name}.old"


def folder_beside(folder: Path) -> Path:
    """Where the successor of `folder` is written, cleared of what an interrupted attempt left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    restore(folder)
    for left_over in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left_over)
    return folder.parent / f".{folder.name}.{os.getpid()}"


def put_in_place(beside: Path, folder: Path) -> None:
    """Rename a complete folder to its name, in the place of the one that has it."""
    replaced = predecessor(folder)
    if folder.exists():
        folder.rename(replaced)
    beside.rename(folder)
    sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def restore(folder: Path) -> None:
    """If a process was killed between the two renames that replace a folder, give the old one its name back."""
    if folder.exists() or not predecessor(folder).exists():
        return
    time.sleep(A_RENAME)  # perhaps the process lives
    if not folder.exists():
        predecessor(folder).rename(folder)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """One process at a time gets in; the others call `waiting` now and then. No lock outlives its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(LOCK_POLL)
        yield
