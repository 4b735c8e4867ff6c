"""Arrays that took long to compute, kept in files: a file that has its name is whole."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class ArrayCache:
    """The arrays of a folder by their keys. Without a folder, new arrays are in memory and nothing is found."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def find(self, key: str, *, mapped: bool) -> NDArray[Any] | None:
        """In memory, or `mapped`: left in its file, from which it is read where it is looked at."""
        if self.folder is None or not (file := self.file(self.folder, key)).exists():
            return None
        found: NDArray[Any] = np.load(file, mmap_mode="r" if mapped else None)
        return found

    def new(self, key: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Room for an array: in a file beside that of its name, because memory may not hold that of a large corpus."""
        if self.folder is None:
            return np.empty(shape, dtype)
        self.folder.mkdir(parents=True, exist_ok=True)
        room: NDArray[Any] = np.lib.format.open_memmap(
            self.beside(self.folder, key), mode="w+", dtype=np.dtype(dtype), shape=shape
        )
        return room

    def keep(self, key: str, array: NDArray[Any], *, mapped: bool) -> NDArray[Any]:
        """Give an array of `new`, which is filled now, its name: what `find` gives from now on. If another process was
        faster, its file is replaced by one with the same content."""
        if self.folder is None:
            return array
        assert isinstance(array, np.memmap)
        array.flush()
        self.beside(self.folder, key).replace(self.file(self.folder, key))
        kept = self.find(key, mapped=mapped)
        assert kept is not None
        return kept

    @staticmethod
    def file(folder: Path, key: str) -> Path:
        return folder / f"{key}.npy"

    @staticmethod
    def beside(folder: Path, key: str) -> Path:
        return folder / f".{key}.{os.getpid()}.npy"
