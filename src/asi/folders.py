"""Files and folders that are replaced whole: written beside, then renamed."""

import os
import shutil
import time
from pathlib import Path

A_RENAME = 0.2  # seconds: far more than a process needs from one rename to the next


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
