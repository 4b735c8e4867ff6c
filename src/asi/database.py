"""The LMDB database of a store: shared within a process, growing by itself, one writer at a time, errors in words.

The store above it knows what the tables mean; this module knows what LMDB allows.
"""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import lmdb

from asi.errors import StoreError

DATA, WRITER_LOCK = "data.mdb", "writer.lock"
INITIAL_MAP_SIZE = 64 * 2**20  # bytes of address space, not of disk; doubled whenever it is too small
MAX_READERS = 1_024  # read transactions at the same time, over all processes
LOCK_POLL = 0.02  # seconds between two attempts to become the writer

DAMAGED = "the store is damaged, run asi index again"
DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.NotFoundError,  # a table is missing
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
REMEDIES = {
    errno.EACCES: "check the permissions of the folder and its files",
    errno.EIO: "the disk may be full or failing",  # LMDB's word for a write that was cut short
    errno.EDQUOT: "free some disk space and try again",
    errno.ENOSPC: "free some disk space and try again",
    errno.EROFS: "copy it to a disk that can be written",
}

T = TypeVar("T")
Transaction: TypeAlias = "lmdb.Transaction[bytes]"


class Tables(NamedTuple):
    meta: Any  # what the store is, and its next free number
    keys: Any  # key -> number
    documents: Any  # number -> record
    postings: Any  # docid -> numbers, a sorted set


class Database:
    """An LMDB environment, shared by all stores of this process on the same files: LMDB forbids a second one.

    LMDB also forbids resizing and reopening while a transaction runs: `_alone` waits for the running ones and holds up
    new ones. So transactions must be short, and a thread must not begin one inside another.
    """

    _shared: ClassVar[dict[tuple[int, int], "Database"]] = {}  # by device and inode of data.mdb
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: Path, identity: tuple[int, int]) -> None:
        self._lmdb, self._tables = open_lmdb(folder, readonly=True)
        self._identity = identity
        self._users = 0
        self._gate = threading.Condition()
        self._gate_open = True
        self._running = 0  # transactions

    @classmethod
    def join(cls, folder: Path) -> "Database":
        """The database in `folder`, opened if it is not open in this process. To be paired with `leave`."""
        with cls._shared_lock:
            status = (folder / DATA).stat()
            identity = (status.st_dev, status.st_ino)
            if identity not in cls._shared:
                cls._shared[identity] = cls(folder, identity)
            cls._shared[identity]._users += 1
            return cls._shared[identity]

    def leave(self) -> None:
        with self._shared_lock:
            self._users -= 1
            if not self._users:
                del self._shared[self._identity]
                with self._alone():
                    self._lmdb.close()

    def reopen(self, folder: Path, *, sync: bool) -> None:
        """Make the database writable, with or without a sync to disk at each commit: for the writer only.

        Readers open it read-only, as opening the tables for writing would wait for a writer in another process.
        """
        with self._alone():
            self._lmdb.close()
            try:
                self._lmdb, self._tables = open_lmdb(folder, readonly=False, sync=sync)
            except BaseException:
                self._lmdb, self._tables = open_lmdb(folder, readonly=True)  # other stores of this process go on
                raise
            self._lmdb.reader_check()  # readers that were killed would keep old pages from being used again

    def sync(self) -> None:
        self._lmdb.sync(True)

    def last_transaction(self) -> int:
        """The number of the last change, by whatever process."""
        with self._gate:
            return self._lmdb.info()["last_txnid"]

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[tuple[Transaction, Tables]]:
        txn = self._begin(write)
        try:
            with txn:
                yield txn, self._tables
        finally:
            self._end()

    def write(self, change: Callable[[Transaction, Tables], T]) -> T:
        """Run `change` in a write transaction, from its start again whenever the map was too small for it."""
        while True:
            try:
                with self.transaction(write=True) as (txn, tables):
                    return change(txn, tables)
            except lmdb.MapFullError:
                with self._alone():
                    self._lmdb.set_mapsize(2 * self._lmdb.info()["map_size"])

    def _begin(self, write: bool) -> Transaction:
        while True:
            with self._gate:
                self._gate.wait_for(lambda: self._gate_open)
                self._running += 1
            try:
                return self._lmdb.begin(write=write)
            except lmdb.MapResizedError:  # another process has written beyond the end of our map
                self._end()
                with self._alone():
                    self._lmdb.set_mapsize(0)
            except BaseException:
                self._end()
                raise

    def _end(self) -> None:
        with self._gate:
            self._running -= 1
            self._gate.notify_all()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._gate:
            self._gate.wait_for(lambda: self._gate_open)
            self._gate_open = False
            try:
                self._gate.wait_for(lambda: self._running == 0)
                yield
            finally:
                self._gate_open = True
                self._gate.notify_all()


def open_lmdb(folder: Path, *, readonly: bool, sync: bool = True) -> tuple["lmdb.Environment", Tables]:
    path = folder / DATA
    if path.stat().st_size == 0:
        raise StoreError(f"{path} is empty: {DAMAGED}")
    environment = lmdb.open(
        str(folder),
        map_size=0,  # stands for the size that the last writer had
        max_dbs=len(Tables._fields),
        max_readers=MAX_READERS,
        create=False,
        readonly=readonly,
        sync=sync,
    )
    try:
        # Beyond the end of a shortened file, LMDB would not raise but kill the process.
        needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        if (found := path.stat().st_size) < needed:
            raise StoreError(f"{path} has {found} bytes of {needed}: {DAMAGED}")
        return environment, Tables(*(environment.open_db(name.encode(), create=False) for name in Tables._fields))
    except BaseException:
        environment.close()
        raise


def create_lmdb(folder: Path, meta: Mapping[bytes, bytes]) -> None:
    """The files of a database whose tables are empty but for `meta`."""
    with lmdb.open(str(folder), map_size=INITIAL_MAP_SIZE, max_dbs=len(Tables._fields)) as environment:
        tables = Tables(*(environment.open_db(name.encode(), dupfixed=name == "postings") for name in Tables._fields))
        with environment.begin(db=tables.meta, write=True) as txn:
            for name, value in meta.items():
                txn.put(name, value)


def lock_writer(folder: Path, wait: float) -> IO[str]:
    """An open file that stands for the right to write. The kernel closes it with the process: no lock outlives that.

    Raises StoreError if another writer is still at work after `wait` seconds.
    """
    path, deadline = folder / WRITER_LOCK, time.monotonic() + wait
    while True:
        with ExitStack() as closing:
            file = closing.enter_context(path.open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    writer = f"process {file.read() or 'unknown'}"
                    raise StoreError(f"{folder} is being written by {writer}: wait for it or pass --wait") from None
            else:
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else the folder was replaced meanwhile
                    file.truncate(0)
                    file.write(str(os.getpid()))
                    file.flush()
                    closing.pop_all()
                    return file
        time.sleep(LOCK_POLL)


@contextmanager
def explained(action: str, folder: Path) -> Iterator[None]:
    """Turn what LMDB and the operating system raise into one line for a person."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        code = (error.errno if isinstance(error, OSError) else error.code) or 0
        reason = os.strerror(code) if code > 0 else str(error)
        remedy = DAMAGED if isinstance(error, DAMAGE) else REMEDIES.get(code)
        raise StoreError(f"cannot {action} {folder}: {reason}" + (f"; {remedy}" if remedy else "")) from error
