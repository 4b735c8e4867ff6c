"""The store: a folder that maps docids to documents, for one writer and any number of readers at the same time.

    data.mdb, lock.mdb   LMDB: docid -> document numbers, key -> number, number -> document, and what the store is
    vectors.i8           one byte per dimension, row = document number: mapped into memory, read for ranking only
    writer.lock          held by the one `Store` that may write, with its process number inside

A number is never given to a second document: what a reader remembers may vanish, but it never means something else.
"""

import json
import mmap
import os
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from asi.database import DAMAGED, DATA, Database, Tables, Transaction, create_lmdb, explained, lock_writer
from asi.errors import DataError, StoreError
from asi.folders import restore, sync
from asi.records import Docid, Document
from asi.snapshot import MAX_CODES, Snapshot

FORMAT_VERSION = 3
VECTORS = "vectors.i8"
MAX_LENGTH = 32  # m
MAX_KEY_BYTES = 400  # LMDB refuses keys of more than 511 bytes
MAX_NUMBERS = 2**32 - 1  # a number is four bytes
WALK = 1_000  # documents per read transaction in a walk through the store

NUMBER = struct.Struct(">I")  # big-endian, like docids, so that byte order is number order
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class StoreMeta:
    """What stays the same for the life of a store."""

    m: int
    V: int
    width: int  # of the vectors; 0 if there are none
    fingerprint: str  # of the model that made docids and vectors
    format_version: int = FORMAT_VERSION

    @property
    def code(self) -> str:
        """The kind of number that a code is, by its letter in `struct`: one byte if that is enough, or two."""
        return "B" if self.V <= 256 else "H"

    @cached_property
    def docid_bytes(self) -> int:
        return struct.calcsize(f">{self.m}{self.code}")

    @cached_property
    def head(self) -> struct.Struct:
        """The start of a document's record: its docid, the bytes of its key, the bytes of its title."""
        return struct.Struct(f">{self.m}{self.code}HI")


class StoredDocument(NamedTuple):
    number: int
    docid: Docid
    document: Document


class Store:
    """An open store, to be read from any number of threads. A writable one is the only writer until it is closed.

    An add or delete is durable when it returns; a reader sees the whole of it or nothing.
    """

    def __init__(self, folder: Path, meta: StoreMeta, database: Database, vectors: int) -> None:
        self.folder = folder
        self.meta = meta
        self._database = database
        self._vectors = vectors  # a file descriptor: it stays right when the folder is renamed
        self._rows = np.empty((0, meta.width), np.int8)  # of that file, as far as it is mapped
        self._snapshot: Snapshot | None = None
        self._snapshot_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._state = "open for reading only"
        self._sync = True
        self._opened = ExitStack()  # what close() undoes

    @classmethod
    def create(cls, folder: Path, *, m: int, V: int, width: int, fingerprint: str) -> "Store":
        """A new and empty store, open for writing. Other files in the folder are left alone."""
        if not (1 <= m <= MAX_LENGTH and 1 <= V <= MAX_CODES and width >= 0):
            limits = f"m from 1 to {MAX_LENGTH}, V from 1 to {MAX_CODES} and vectors of no negative length"
            raise StoreError(f"a store takes {limits}, got m = {m}, V = {V} and {width} dimensions")
        with explained("create a store in", folder):
            folder.mkdir(parents=True, exist_ok=True)
            with lock_writer(folder, wait=0):
                if (folder / DATA).exists():
                    raise StoreError(f"there is a store in {folder} already: remove it or choose another folder")
                create_files(folder, StoreMeta(m, V, width, fingerprint))
        return cls.open(folder, writable=True)

    @classmethod
    def open(
        cls, folder: Path, *, fingerprint: str | None = None, writable: bool = False, wait: float = 0.0
    ) -> "Store":
        """The store in `folder`; with a `fingerprint`, only if that model made it.

        A writable one waits up to `wait` seconds for another writer to finish (`math.inf`: as long as it takes).
        """
        folder = folder.resolve()
        restore(folder)
        if not folder.is_dir():
            raise StoreError(f"there is no folder {folder}: make a store with asi index")
        if not (folder / DATA).is_file():
            raise StoreError(f"there is no store in {folder}: make one with asi index")
        with explained("open the store in", folder), ExitStack() as opened:
            if writable:
                opened.enter_context(lock_writer(folder, wait))
            database = Database.join(folder)
            opened.callback(database.leave)
            with database.transaction() as (txn, tables):
                meta = read_meta(folder, txn, tables)
                rows = next_number(txn, tables)
            if fingerprint is not None and fingerprint != meta.fingerprint:
                models = f"{meta.fingerprint[:12]}, this model is {fingerprint[:12]}"
                raise StoreError(f"the store in {folder} was made by another model ({models}): run asi index again")
            if not (folder / VECTORS).exists():
                raise StoreError(f"there is no {VECTORS} in {folder}: {DAMAGED}")
            vectors = os.open(folder / VECTORS, os.O_RDWR if writable else os.O_RDONLY)
            opened.callback(os.close, vectors)
            store = cls(folder, meta, database, vectors)
            if (found := store._rows_on_disk()) < rows:
                raise StoreError(f"{folder / VECTORS} has {found} vectors of {rows}: {DAMAGED}")
            if writable:
                database.reopen(folder, sync=True)
                store._state = "writable"
            store._opened = opened.pop_all()
            return store

    def close(self) -> None:
        self._state = "closed"
        self._rows = self._rows[:0].copy()  # lets go of the map
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with self._reading() as (txn, tables):
            return txn.stat(tables.documents)["entries"]

    def snapshot(self) -> Snapshot:
        """The docid map as it is now: the same object for as long as nobody, in whatever process, changes the store."""
        with self._snapshot_lock:
            self._refuse_closed()
            known = self._snapshot
            if known is None or known.transaction != self._database.last_transaction():
                with self._reading() as (txn, tables):
                    known = self._snapshot = read_snapshot(txn, tables, self.meta)
            return known

    def documents(self, numbers: Iterable[int]) -> list[Document | None]:
        """The documents with these numbers, None where one was deleted or replaced."""
        with self._reading() as (txn, tables):
            records = [(number, txn.get(NUMBER.pack(number), db=tables.documents)) for number in numbers]
        return [unpack(self.meta, number, record).document if record else None for number, record in records]

    def lookup(self, key: str) -> StoredDocument | None:
        with self._reading() as (txn, tables):
            number = find(txn, tables, key)
            record = txn.get(number, db=tables.documents) if number else None
        return unpack(self.meta, int.from_bytes(number), record) if number and record else None

    def stored_documents(self) -> Iterator[StoredDocument]:
        """All documents in the order of their numbers; those that are added or replaced meanwhile come last."""
        start = 0
        while True:
            with self._reading() as (txn, tables), txn.cursor(tables.documents) as cursor:
                records = list(islice(cursor, WALK)) if cursor.set_range(NUMBER.pack(start)) else []
            for number, record in records:
                yield unpack(self.meta, int.from_bytes(number), record)
            if not records:
                return
            start = int.from_bytes(records[-1][0]) + 1

    def vectors(self, numbers: NDArray[np.integer[Any]], part: slice = slice(None)) -> NDArray[np.int8]:
        """The vectors (n, width) of these documents, or a part of each, be they deleted or replaced meanwhile."""
        needed = int(numbers.max()) + 1 if len(numbers) else 0
        rows = self._rows
        if len(rows) < needed:
            rows = self._rows = self._map_rows()
        if len(rows) < needed:
            raise StoreError(f"{self.folder / VECTORS} has no vector of document number {needed - 1}")
        return rows[numbers, part]  # np.take would first copy the whole of a part

    def is_replaced(self) -> bool:
        """Whether another store has taken the place of this one."""
        try:
            return not os.path.samestat(os.fstat(self._vectors), (self.folder / VECTORS).stat())
        except FileNotFoundError:
            return False  # not yet

    def check(self) -> list[str]:
        """Every inconsistency in the store, in words. Reads all of it in one transaction."""
        with self._reading() as (txn, tables):
            found = list(problems(self.meta, txn, tables))
            if (rows := self._rows_on_disk()) < (needed := next_number(txn, tables)):
                found.append(f"{VECTORS} has {rows} vectors of {needed}")
        return found

    def add(self, documents: Sequence[Document], docids: NDArray[np.uint16], vectors: NDArray[np.int8]) -> None:
        """Store documents with their docids (n, m) and vectors (n, width).

        A document with a known key replaces the old one; of several with the same key, the last one counts.
        """
        assert docids.shape == (len(documents), self.meta.m), docids.shape
        assert docids.dtype == np.uint16, docids.dtype
        assert vectors.shape == (len(documents), self.meta.width), vectors.shape
        assert vectors.dtype == np.int8, vectors.dtype
        if not documents:
            return
        if docids.max() >= self.meta.V:
            raise StoreError(f"code {docids.max()} is not below {self.meta.V}, the V of the store in {self.folder}")
        rows = sorted({document.key: row for row, document in enumerate(documents)}.values())
        packed = [pack(self.meta, documents[row], docids[row].tolist()) for row in rows]
        with self._writing() as database:
            with database.transaction() as (txn, tables):
                first = next_number(txn, tables)
            if first + len(packed) > MAX_NUMBERS:
                raise StoreError(f"the store in {self.folder} has run out of document numbers: run asi index again")
            # Vectors go first: if what follows fails, nobody knows these numbers and the next writer takes them again.
            self._write_rows(first, vectors[rows])
            database.write(lambda txn, tables: insert(self.meta, txn, tables, first, packed))

    def delete(self, keys: Sequence[str]) -> list[str]:
        """Delete the documents with these keys; nothing if one of the keys is unknown. Returns the keys, each once."""
        wanted = list(dict.fromkeys(keys))

        def change(txn: Transaction, tables: Tables) -> None:
            numbers = {key: number for key in wanted if (number := find(txn, tables, key))}
            if unknown := [key for key in wanted if key not in numbers]:
                named = ", ".join(map(repr, unknown[:3])) + (f" and {len(unknown) - 3} more" if unknown[3:] else "")
                raise StoreError(f"no document in {self.folder} has the key {named}: nothing was deleted")
            for key in wanted:
                txn.delete(key.encode(), db=tables.keys)
            remove(self.meta, txn, tables, numbers.values())

        with self._writing() as database:
            database.write(change)
        return wanted

    @contextmanager
    def bulk(self) -> Iterator[None]:
        """Sync once, at the end, and not at each add: for a store that is built aside and then moved into place.

        If the machine stops before the end, the store may be damaged.
        """
        with self._writing() as database:
            database.reopen(self.folder, sync=False)
            self._sync = False
        try:
            yield
        finally:
            with self._writing() as database:
                os.fsync(self._vectors)
                database.sync()
                database.reopen(self.folder, sync=True)
                self._sync = True

    @contextmanager
    def _reading(self) -> Iterator[tuple[Transaction, Tables]]:
        with explained("read the store in", self.folder):
            self._refuse_closed()
            with self._database.transaction() as running:
                yield running

    @contextmanager
    def _writing(self) -> Iterator[Database]:
        with self._write_lock, explained("write to the store in", self.folder):
            if self._state != "writable":
                raise StoreError(f"the store in {self.folder} is {self._state}")
            yield self._database

    def _refuse_closed(self) -> None:
        if self._state == "closed":
            raise StoreError(f"the store in {self.folder} is closed")

    def _rows_on_disk(self) -> int:
        return os.fstat(self._vectors).st_size // self.meta.width if self.meta.width else MAX_NUMBERS

    def _map_rows(self) -> NDArray[np.int8]:
        self._refuse_closed()
        with explained("read the vectors in", self.folder):
            shape = (self._rows_on_disk(), self.meta.width)
            mapped = (
                mmap.mmap(self._vectors, shape[0] * shape[1], access=mmap.ACCESS_READ) if shape[0] * shape[1] else b""
            )
            return np.frombuffer(mapped, np.int8).reshape(shape)

    def _write_rows(self, first: int, vectors: NDArray[np.int8]) -> None:
        rest, offset = memoryview(vectors.tobytes()), first * self.meta.width
        while rest:
            written = os.pwrite(self._vectors, rest, offset)
            rest, offset = rest[written:], offset + written
        if self._sync:
            os.fsync(self._vectors)


@contextmanager
def only_writer(folder: Path, wait: float) -> Iterator[None]:
    """Keep others from writing to the store in `folder`, if there is one."""
    restore(folder)
    with ExitStack() as held:
        if folder.is_dir():
            with explained("replace the store in", folder):
                held.enter_context(lock_writer(folder, wait))
        yield


def create_files(folder: Path, meta: StoreMeta) -> None:
    """Make an empty store, safe on disk, or none at all."""
    try:
        (folder / VECTORS).write_bytes(b"")
        create_lmdb(folder, {b"store": json.dumps(asdict(meta)).encode(), b"next": NUMBER.pack(0)})
        for changed in (folder, folder.parent):
            sync(changed)
    except BaseException:
        for name in (DATA, VECTORS):
            (folder / name).unlink(missing_ok=True)
        raise


def read_meta(folder: Path, txn: Transaction, tables: Tables) -> StoreMeta:
    try:
        values = json.loads(txn.get(b"store", b"", db=tables.meta))
        if values["format_version"] != FORMAT_VERSION:
            formats = f"format {values['format_version']}, this version of asi reads format {FORMAT_VERSION}"
            raise StoreError(f"the store in {folder} has {formats}: run asi index again")
        return StoreMeta(**values)
    except (ValueError, TypeError, KeyError):
        raise StoreError(f"the store in {folder} does not say what it is: {DAMAGED}") from None


def next_number(txn: Transaction, tables: Tables) -> int:
    packed = txn.get(b"next", db=tables.meta)
    if packed is None:
        raise StoreError(f"the next document number is missing: {DAMAGED}")
    return int.from_bytes(packed)


def read_snapshot(txn: Transaction, tables: Tables, meta: StoreMeta) -> Snapshot:
    with txn.cursor(tables.postings) as docids, txn.cursor(tables.postings) as numbers:
        pairs = numbers.getmulti(docids.iternext_nodup(), dupdata=True, dupfixed_bytes=NUMBER.size, keyfixed=True)
    rows = np.frombuffer(pairs, np.dtype([("docid", f">{meta.code}", (meta.m,)), ("number", ">u4")]))  # (N,)
    codes = rows["docid"].astype(meta.code)  # (N, m)
    is_first = np.ones(len(rows), bool)  # of its bucket
    is_first[1:] = (codes[1:] != codes[:-1]).any(1)
    starts = np.flatnonzero(is_first)
    arrays = (codes[starts], np.append(starts, len(rows)), rows["number"].astype(np.uint32))
    for array in arrays:
        array.flags.writeable = False  # every reader gets the same ones
    return Snapshot(*arrays, transaction=txn.id())


def encoded(key: str) -> bytes:
    """The key as it is stored; DataError if it is not fit to be one."""
    try:
        data = key.encode()
    except UnicodeEncodeError:
        raise DataError(f"key {key!r} is not valid Unicode: correct it") from None
    if not 1 <= len(data) <= MAX_KEY_BYTES:
        raise DataError(f"key {key!r} has {len(data)} bytes: a key takes 1 to {MAX_KEY_BYTES}")
    if CONTROL.search(key):
        raise DataError(f"key {key!r} has a control character: remove it")
    return data


def pack(meta: StoreMeta, document: Document, docid: Sequence[int]) -> tuple[bytes, bytes]:
    """A document's key and its record, which begins with the docid."""
    key = encoded(document.key)
    try:
        title, text = document.title.encode(), document.text.encode()
    except UnicodeEncodeError:
        raise DataError(f"the title or text of document {document.key!r} is not valid Unicode: correct it") from None
    return key, meta.head.pack(*docid, len(key), len(title)) + key + title + text


def unpack(meta: StoreMeta, number: int, record: bytes) -> StoredDocument:
    try:
        *docid, key_bytes, title_bytes = meta.head.unpack_from(record)
        title_start = meta.head.size + key_bytes
        text_start = title_start + title_bytes
        if text_start > len(record):
            raise ValueError("cut off")
        key = record[meta.head.size : title_start].decode()
        document = Document(key, record[text_start:].decode(), record[title_start:text_start].decode())
    except (ValueError, struct.error):
        raise StoreError(f"the record of document number {number} is unreadable: {DAMAGED}") from None
    return StoredDocument(number, tuple(docid), document)


def find(txn: Transaction, tables: Tables, key: str) -> bytes | None:
    """The number of the document with this key, packed."""
    try:
        return txn.get(encoded(key), db=tables.keys)
    except DataError:  # such a key was never let in
        return None


def insert(meta: StoreMeta, txn: Transaction, tables: Tables, first: int, packed: list[tuple[bytes, bytes]]) -> None:
    numbers = [NUMBER.pack(number) for number in range(first, first + len(packed))]
    keys, records = zip(*packed, strict=True)
    with txn.cursor(tables.keys) as cursor:
        remove(meta, txn, tables, [number for _, number in cursor.getmulti(keys)])
        cursor.putmulti(sorted(zip(keys, numbers, strict=True)))
    with txn.cursor(tables.documents) as cursor:
        _, added = cursor.putmulti(zip(numbers, records, strict=True), append=True)
    if added < len(numbers):
        raise StoreError(f"a document number from {first} on is taken: {DAMAGED}")
    with txn.cursor(tables.postings) as cursor:
        docids = [record[: meta.docid_bytes] for record in records]
        cursor.putmulti(sorted(zip(docids, numbers, strict=True)))
    txn.put(b"next", NUMBER.pack(first + len(packed)), db=tables.meta)


def remove(meta: StoreMeta, txn: Transaction, tables: Tables, numbers: Iterable[bytes]) -> None:
    for number in numbers:
        if record := txn.pop(number, db=tables.documents):
            txn.delete(record[: meta.docid_bytes], number, db=tables.postings)


def problems(meta: StoreMeta, txn: Transaction, tables: Tables) -> Iterator[str]:
    """Where documents, keys and buckets disagree: each document against the other two, then those against documents."""

    def stored(packed: bytes, record: bytes | None) -> StoredDocument | None:
        try:
            return unpack(meta, int.from_bytes(packed), record or b"")
        except StoreError:
            return None

    end = next_number(txn, tables)
    with txn.cursor(tables.documents) as documents, txn.cursor(tables.postings) as postings:
        for packed, record in documents:
            name = f"document number {int.from_bytes(packed)}"
            if int.from_bytes(packed) >= end:
                yield f"{name} is not below the next number, {end}"
            if (found := stored(packed, record)) is None:
                yield f"{name} is unreadable"
                continue
            if max(found.docid) >= meta.V:
                yield f"{name} has the docid {found.docid}, with a code that is not below {meta.V}"
            if find(txn, tables, found.document.key) != packed:
                yield f"{name} is not where its key {found.document.key!r} leads"
            if not postings.set_key_dup(record[: meta.docid_bytes], packed):
                yield f"{name} is not in the bucket of its docid {found.docid}"
    with txn.cursor(tables.keys) as keys:
        for key, packed in keys:
            found = stored(packed, txn.get(packed, db=tables.documents))
            if found is None or found.document.key.encode() != key:
                yield f"key {key.decode(errors='replace')!r} leads to number {int.from_bytes(packed)}, not its document"
    with txn.cursor(tables.postings) as postings:
        for docid, packed in postings:
            if not (txn.get(packed, db=tables.documents) or b"").startswith(docid):
                codes = struct.unpack(f">{len(docid) // struct.calcsize(meta.code)}{meta.code}", docid)
                yield f"the bucket of {codes} has number {int.from_bytes(packed)}, which has not that docid"
