"""The store against a plain dict, readers and writers in other processes, kill -9, full disks and damaged files."""

import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_process import BATCH, add, codes_of, step_documents, vector_of, watch, write_version

from asi import database as database_module
from asi import store as store_module
from asi.errors import DataError, StoreError
from asi.records import Document
from asi.snapshot import Snapshot
from asi.store import FORMAT_VERSION, Store, StoreMeta

TINY_MAP = 16 * 4096
PROCESS = Path(__file__).with_name("store_process.py")


def new_store(folder, *, m=2, V=16, width=3, fingerprint="model-a"):
    return Store.create(folder, m=m, V=V, width=width, fingerprint=fingerprint)


def slow_buckets(store):
    """The docid map, one document at a time."""
    buckets = defaultdict(list)
    for number, docid, _ in store.stored_documents():
        buckets[docid].append(number)
    return dict(sorted(buckets.items()))


def buckets_of(snapshot: Snapshot):
    ends = zip(snapshot.offsets[:-1], snapshot.offsets[1:], strict=True)
    buckets = [snapshot.numbers[start:end].tolist() for start, end in ends]
    return dict(zip(map(tuple, snapshot.codes.tolist()), buckets, strict=True))


def assert_holds(store, model):
    """The store holds these documents (by key) and nothing else, and every way to read it agrees."""
    assert store.check() == []
    assert len(store) == len(model)
    stored = list(store.stored_documents())
    assert {entry.document.key: entry.document for entry in stored} == model
    numbers = np.array([entry.number for entry in stored], np.uint32)
    assert (np.diff(numbers.astype(int)) > 0).all()
    assert store.documents(numbers) == [entry.document for entry in stored]
    expected = np.array([vector_of(entry.document, store.meta) for entry in stored], np.int8)
    assert np.array_equal(store.vectors(numbers), expected.reshape(-1, store.meta.width))
    for entry in stored:
        assert store.lookup(entry.document.key) == entry
        assert entry.docid == tuple(codes_of(entry.document, store.meta))
    snapshot = store.snapshot()
    assert buckets_of(snapshot) == slow_buckets(store)
    assert list(buckets_of(snapshot)) == sorted(buckets_of(snapshot))
    for docid, bucket in buckets_of(snapshot).items():
        assert snapshot.bucket(docid).tolist() == bucket


class Model(RuleBasedStateMachine):
    """Any sequence of adds, replacements, deletes and reopenings leaves what a dict would hold."""

    keys = st.sampled_from(["a", "b", "c", "ä", "文", "a b", "🙂", "\u200d", "z" * 400])

    @initialize(shape=st.sampled_from([(1, 2, 1), (2, 3, 4), (8, 65_536, 5)]))
    def create(self, shape):
        self.folder = Path(tempfile.mkdtemp()) / "store"
        m, V, width = shape
        self.store = new_store(self.folder, m=m, V=V, width=width)
        self.model = {}
        self.meanings = {}  # of every number ever seen

    @rule(
        documents=st.lists(st.builds(Document, keys, st.text(max_size=9), st.sampled_from(["", "Title"])), max_size=6)
    )
    def add(self, documents):
        add(self.store, documents)
        self.model |= {document.key: document for document in documents}

    @rule(keys=st.lists(keys, max_size=3))
    def delete(self, keys):
        if set(keys) <= set(self.model):
            assert self.store.delete(keys) == list(dict.fromkeys(keys))
            self.model = {key: document for key, document in self.model.items() if key not in keys}
        else:
            with pytest.raises(StoreError, match="nothing was deleted"):
                self.store.delete(keys)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete_known(self, data):
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.store.delete([key])
        del self.model[key]

    @rule()
    def reopen(self):
        self.store.close()
        self.store = Store.open(self.folder, fingerprint="model-a", writable=True)

    @invariant()
    def agrees(self):
        assert_holds(self.store, self.model)
        for number, _, document in self.store.stored_documents():
            assert self.meanings.setdefault(number, document) == document
        for meaning, document in zip(self.meanings.values(), self.store.documents(self.meanings), strict=True):
            assert document in (None, meaning)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder.parent)


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=25, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize(("m", "V"), [(1, 2), (3, 256), (4, 300), (8, 65_536)])
def test_snapshot_equals_a_slow_reading(tmp_path, m, V):
    rng = np.random.default_rng(m)
    docids = rng.integers(0, V, (4_000, m), dtype=np.uint16)
    docids[:3_000] = V - 1  # one bucket over several pages
    docids[3_000:3_100] = 0
    order = rng.permutation(len(docids))
    documents = [Document(f"key {i}", "") for i in range(len(docids))]
    with new_store(tmp_path, m=m, V=V) as store:
        assert buckets_of(store.snapshot()) == {}
        assert store.snapshot().bucket((0,) * m).tolist() == []
        store.add(documents, docids[order], np.zeros((len(docids), 3), np.int8))
        snapshot = store.snapshot()
        assert buckets_of(snapshot) == slow_buckets(store)
        assert snapshot.bucket((V - 1,) * m).tolist() == [n for n, i in enumerate(order) if (docids[i] == V - 1).all()]
        assert [snapshot.codes.dtype, snapshot.numbers.dtype] == [np.uint8 if V <= 256 else np.uint16, np.uint32]
        for docid in [(V,) * m, (-1,) * m, (0,) * (m + 1), ()]:
            assert len(snapshot.bucket(docid)) == 0
        assert store.check() == []


def test_snapshot_is_the_same_object_until_someone_writes(tmp_path):
    with new_store(tmp_path) as writer, Store.open(tmp_path) as reader:
        empty = reader.snapshot()
        assert reader.snapshot() is empty
        add(writer, [Document("a", "one")])
        first = reader.snapshot()
        assert (len(empty.numbers), len(first.numbers)) == (0, 1)
        assert reader.snapshot() is first
        add(writer, [Document("a", "two")])
        assert reader.documents(first.numbers) == [None]  # the number of the old version is not given again
        assert reader.documents(reader.snapshot().numbers) == [Document("a", "two")]


def test_same_key_twice_in_one_add_keeps_the_last(tmp_path):
    with new_store(tmp_path) as store:
        add(store, [Document("a", "one"), Document("b", "x"), Document("a", "two")])
        assert_holds(store, {"b": Document("b", "x"), "a": Document("a", "two")})


def test_a_walk_meets_every_document_although_someone_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "WALK", 2)
    with new_store(tmp_path) as store:
        add(store, [Document(key, "old") for key in "abcde"])
        walk = store.stored_documents()
        assert next(walk).document == Document("a", "old")
        add(store, [Document("d", "new")])
        store.delete(["c"])
        assert [entry.document for entry in walk] == [Document("b", "old"), Document("e", "old"), Document("d", "new")]


@pytest.mark.parametrize("key", ["k" * 400, "é" * 200, "🙂" * 100, "\u202e\u0301" * 80, " ", "a/b\\c"])
def test_unusual_keys(tmp_path, key):
    with new_store(tmp_path) as store:
        add(store, [Document(key, "text", "title")])
        assert_holds(store, {key: Document(key, "text", "title")})
        store.delete([key])
        assert_holds(store, {})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (Document("", "text"), "key '' has 0 bytes: a key takes 1 to 400"),
        (Document("é" * 200 + "x", "text"), "has 401 bytes: a key takes 1 to 400"),
        (Document("a\nb", "text"), r"key 'a\\nb' has a control character"),
        (Document("a\x85b", "text"), "has a control character"),
        (Document("\ud800", "text"), "is not valid Unicode"),
        (Document("a", "\ud800"), "the title or text of document 'a' is not valid Unicode"),
    ],
)
def test_unfit_documents_are_refused_and_nothing_is_stored(tmp_path, document, message):
    with new_store(tmp_path) as store:
        with pytest.raises(DataError, match=message):
            add(store, [Document("good", "text"), document])
        assert_holds(store, {})
        if document.key != "a":
            assert store.lookup(document.key) is None
            with pytest.raises(StoreError, match="nothing was deleted"):
                store.delete([document.key])


def test_refusals_of_an_open_store(tmp_path, monkeypatch):
    with new_store(tmp_path, V=2) as store:
        with pytest.raises(StoreError, match="code 2 is not below 2"):
            store.add([Document("a", "")], np.array([[0, 2]], np.uint16), np.zeros((1, 3), np.int8))
        with pytest.raises(StoreError, match="has the key '0', '1', '2' and 2 more: nothing was deleted"):
            store.delete([*"01234"])
        with pytest.raises(StoreError, match="has no vector of document number 7"):
            store.vectors(np.array([7]))
        add(store, [Document("a", "")])
        monkeypatch.setattr(store_module, "MAX_NUMBERS", 3)
        with pytest.raises(StoreError, match="run out of document numbers: run asi index again"):
            add(store, [Document(key, "") for key in "bcd"])
        add(store, [Document(key, "") for key in "bc"])
        assert_holds(store, {key: Document(key, "") for key in "abc"})
    with Store.open(tmp_path) as reader, pytest.raises(StoreError, match="is open for reading only"):
        reader.delete(["a"])
    for use in (len, Store.snapshot, lambda store: store.vectors(np.array([0])), lambda store: store.delete(["a"])):
        with pytest.raises(StoreError, match="is closed"):
            use(store)


def test_refusals_of_create(tmp_path):
    new_store(tmp_path / "store").close()
    with pytest.raises(StoreError, match=r"there is a store in .*/store already: remove it or choose another folder"):
        new_store(tmp_path / "store")
    for wrong in ({"m": 0}, {"m": 33}, {"V": 0}, {"V": 65_537}, {"width": -1}):
        with pytest.raises(StoreError, match="a store takes m from 1 to 32, V from 1 to 65536 and"):
            new_store(tmp_path / "other", **wrong)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot create a store in .*/file/store: Not a directory"):
        new_store(tmp_path / "file" / "store")


def rewrite_meta(folder, **changes):
    meta = StoreMeta(2, 16, 3, "model-a").__dict__ | {"format_version": FORMAT_VERSION} | changes
    tamper(folder, lambda txn, tables: txn.put(b"store", json.dumps(meta).encode(), db=tables["meta"]))


def tamper(folder, change):
    with lmdb.open(str(folder), max_dbs=4, map_size=2**24) as environment:
        tables = {name: environment.open_db(name.encode(), create=False) for name in database_module.Tables._fields}
        with environment.begin(write=True) as txn:
            change(txn, tables)


def cut(path, size):
    os.truncate(path, size)


REFUSALS = {
    "no folder": (shutil.rmtree, r"there is no folder .*/store: make a store with asi index"),
    "no store": (lambda f: (f / "data.mdb").unlink(), r"there is no store in .*/store: make one with asi index"),
    "format": (
        lambda f: rewrite_meta(f, format_version=99),
        rf"has format 99, this version of asi reads format {FORMAT_VERSION}: run asi index again",
    ),
    "model": (
        lambda f: rewrite_meta(f, fingerprint="b" * 64),
        r"was made by another model \(bbbbbbbbbbbb, this model is model-a\): run asi index again",
    ),
    "meta": (
        lambda f: rewrite_meta(f, surprise=1),
        "does not say what it is: the store is damaged, run asi index again",
    ),
    "no table": (lambda f: tamper(f, lambda txn, tables: txn.drop(tables["keys"])), "NOTFOUND.*; the store is damaged"),
    "short vectors": (lambda f: cut(f / "vectors.i8", 8), r"vectors.i8 has 2 vectors of 5: the store is damaged"),
    "no vectors": (lambda f: (f / "vectors.i8").unlink(), r"there is no vectors.i8 in .*: the store is damaged"),
    "empty data": (lambda f: cut(f / "data.mdb", 0), r"data.mdb is empty: the store is damaged"),
    "one page": (lambda f: cut(f / "data.mdb", 4096), r"cannot open the store in .*INVALID.*; the store is damaged"),
    "short data": (lambda f: cut(f / "data.mdb", 3 * 4096), r"data.mdb has 12288 bytes of \d+: the store is damaged"),
    "garbage": (
        lambda f: (f / "data.mdb").write_bytes(random.Random(0).randbytes(40_000)),
        r"cannot open the store in .*: MDB_INVALID.*; the store is damaged, run asi index again",
    ),
}


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_open_refuses(tmp_path, refusal, writable):
    folder = tmp_path / "store"
    with new_store(folder) as store:
        add(store, [Document(key, "text") for key in "abcde"])
    damage, message = REFUSALS[refusal]
    damage(folder)
    with pytest.raises(StoreError, match=message):
        Store.open(folder, fingerprint="model-a", writable=writable)
    assert not database_module.Database._shared  # nothing stays open


NUMBER_1 = b"\0\0\0\1"
TAMPERING = {
    "key lost": (lambda txn, t: txn.delete(b"b", db=t["keys"]), ["document number 1 is not where its key 'b' leads"]),
    "key too many": (
        lambda txn, t: txn.put(b"q", NUMBER_1, db=t["keys"]),
        ["key 'q' leads to number 1, not its document"],
    ),
    "document lost": (
        lambda txn, t: txn.delete(NUMBER_1, db=t["documents"]),
        ["key 'b' leads to number 1, not its document", "has number 1, which has not that docid"],
    ),
    "document cut": (
        lambda txn, t: txn.put(NUMBER_1, txn.get(NUMBER_1, db=t["documents"])[:8], db=t["documents"]),
        ["document number 1 is unreadable", "key 'b' leads to number 1, not its document"],
    ),
    "posting too many": (
        lambda txn, t: txn.put(b"\1\2", NUMBER_1, db=t["postings"]),
        [r"the bucket of \(1, 2\) has number 1, which has not that docid"],
    ),
    "docid changed": (
        lambda txn, t: txn.put(NUMBER_1, b"\x10" + txn.get(NUMBER_1, db=t["documents"])[1:], db=t["documents"]),
        [r"docid \(16, \d+\), with a code that is not below 16", "number 1 is not in the bucket", "has not that docid"],
    ),
    "next number": (
        lambda txn, t: txn.put(b"next", b"\0\0\0\2", db=t["meta"]),
        ["document number 2 is not below the next number, 2"],
    ),
}


@pytest.mark.parametrize("tampering", TAMPERING)
def test_check_finds(tmp_path, tampering):
    with new_store(tmp_path) as store:
        add(store, [Document(key, "text") for key in "abc"])
    change, messages = TAMPERING[tampering]
    tamper(tmp_path, change)
    with Store.open(tmp_path) as store:
        found = store.check()
        assert len(found) == len(messages), found
        for line, message in zip(found, messages, strict=True):
            assert re.search(message, line)
        os.truncate(tmp_path / "vectors.i8", 3)
        assert "vectors.i8 has 1 vectors of" in store.check()[-1]


@contextmanager
def other_process(role, folder):
    command = [sys.executable, str(PROCESS), role, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def tiny_map(monkeypatch):
    monkeypatch.setattr(database_module, "INITIAL_MAP_SIZE", TINY_MAP)


def after_steps(steps):
    """What the store holds when the first `steps` steps of the worker are done."""
    model = {}
    for step in range(steps):
        if step % 2 == 0:
            model |= {document.key: document for document in step_documents(step)}
        elif step > 5:
            for document in step_documents(step - 5)[:BATCH]:
                del model[document.key]
    return model


def test_a_killed_writer_loses_nothing_that_it_reported(tmp_path, tiny_map):
    new_store(tmp_path).close()
    done = 0
    dice = random.Random(0)
    for _ in range(8):
        with other_process("work", tmp_path) as process:
            print(done, file=process.stdin, flush=True)
            for _ in range(dice.randint(1, 40)):
                assert int(process.stdout.readline()) == done
                done += 1
            time.sleep(dice.uniform(0, 0.005))
            process.kill()
            done += len([line for line in process.stdout.read().splitlines(True) if line.endswith("\n")])
        with Store.open(tmp_path, writable=True) as store:
            if {entry.document.key: entry.document for entry in store.stored_documents()} != after_steps(done):
                done += 1  # the killed step was complete but not yet reported
            assert_holds(store, after_steps(done))
    assert done > 8


def test_readers_see_whole_batches_only(tmp_path, tiny_map):
    versions = 100
    with (
        new_store(tmp_path, V=versions) as writer,
        Store.open(tmp_path) as reader,
        other_process("watch_alone", tmp_path) as one,
        other_process("watch_alone", tmp_path) as two,
    ):
        for process in (one, two):
            assert process.stdout.readline() == "ready\n"
            print(versions, file=process.stdin, flush=True)
        counts = []
        threads = [threading.Thread(target=lambda: counts.append(watch(reader, versions))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for version in range(versions):
            write_version(writer, version)
        for thread in threads:
            thread.join(timeout=20)
        counts += [int(process.stdout.readline()) for process in (one, two)]
        assert len(counts) == 5
        assert min(counts) > 3
        assert writer.check() == []
        assert (tmp_path / "data.mdb").stat().st_size > 5 * TINY_MAP


def test_map_grows_for_a_reader_of_another_process(tmp_path, tiny_map):
    new_store(tmp_path).close()
    with Store.open(tmp_path) as reader:
        assert len(reader.snapshot().numbers) == 0
        with other_process("fill", tmp_path) as process:
            assert process.wait(timeout=20) == 0
        assert len(reader.snapshot().numbers) == 400
        assert_holds(reader, {f"filler {i}": Document(f"filler {i}", "x" * 3_000) for i in range(400)})


def test_second_writer_is_told_who_writes_or_waits(tmp_path):
    new_store(tmp_path).close()
    with other_process("hold", tmp_path) as process:
        assert process.stdout.readline() == "ready\n"
        message = rf"is being written by process {process.pid}: wait for it or pass --wait"
        with pytest.raises(StoreError, match=message):
            Store.open(tmp_path, writable=True)
        with pytest.raises(StoreError, match=message):
            Store.open(tmp_path, writable=True, wait=0.1)
        Store.open(tmp_path).close()  # readers are welcome
        threading.Timer(0.2, process.kill).start()
        first = Store.open(tmp_path, writable=True, wait=math.inf)
    with pytest.raises(StoreError, match=rf"is being written by process {os.getpid()}:"):
        Store.open(tmp_path, writable=True)
    threading.Timer(0.2, first.close).start()
    with Store.open(tmp_path, writable=True, wait=10) as second:
        add(second, [Document("a", "text")])
        assert_holds(second, {"a": Document("a", "text")})


def test_bulk_build_moved_into_place_under_an_open_store(tmp_path):
    folder, aside = tmp_path / "store", tmp_path / "store.new"
    with new_store(folder) as store:
        add(store, [Document("a", "old")])
    with Store.open(folder) as old:
        with new_store(aside, fingerprint="model-b") as store:
            with store.bulk():
                for start in range(0, 300, 100):
                    add(store, [Document(str(i), "new") for i in range(start, start + 100)])
            assert store._database._lmdb.flags()["sync"]
        folder.rename(tmp_path / "store.old")
        aside.rename(folder)
        with Store.open(folder, fingerprint="model-b", writable=True) as new:
            assert_holds(new, {str(i): Document(str(i), "new") for i in range(300)})
            assert_holds(old, {"a": Document("a", "old")})


def test_vectors_are_on_disk_before_their_numbers_are_known(tmp_path, monkeypatch):
    with new_store(tmp_path) as store, Store.open(tmp_path) as reader:
        synced = []
        monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_size, len(reader))))
        add(store, [Document("a", ""), Document("b", "")])
        assert synced == [(6, 0)]
        assert len(reader) == 2


@contextmanager
def largest_file(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("width", "message"),  # the database or the vectors are the first to hit the limit
    [(1, "Input/output error; the disk may be full"), (5_000, r"cannot write to the store in .*: File too large")],
)
def test_a_write_that_fails_leaves_the_store_as_it_was(tmp_path, width, message):
    before = {key: Document(key, "text") for key in "abc"}
    with new_store(tmp_path, width=width) as store:
        add(store, list(before.values()))
        with largest_file(2**20), pytest.raises(StoreError, match=message):
            add(store, [Document("a", "changed"), *(Document(str(i), "x" * 5_000) for i in range(400))])
        assert_holds(store, before)
        add(store, [Document("d", "text")])
        assert_holds(store, before | {"d": Document("d", "text")})
    with Store.open(tmp_path) as store:
        assert_holds(store, before | {"d": Document("d", "text")})


def test_full_disk_has_one_clear_line(tmp_path):
    new_store(tmp_path).close()
    (tmp_path / "vectors.i8").unlink()
    (tmp_path / "vectors.i8").symlink_to("/dev/full")
    with Store.open(tmp_path, writable=True) as store:
        with pytest.raises(StoreError, match=r"No space left on device; free some disk space and try again$"):
            add(store, [Document("a", "text")])
        assert len(store) == 0


@contextmanager
def unprivileged():
    """Root may write everywhere: be somebody else for a while."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def public_folder():
    """Unlike `tmp_path`, a folder that others may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_folder_without_permission_has_one_clear_line(public_folder):
    folder = public_folder / "store"
    new_store(folder).close()
    for path in (public_folder, folder, *folder.iterdir()):
        path.chmod(0o555)
    with unprivileged():
        with pytest.raises(StoreError, match=r"cannot create a store in .*: Permission denied; check the permissions"):
            new_store(public_folder / "other")
        for writable in (False, True):
            with pytest.raises(StoreError, match=r"cannot open the store in .*: Permission denied; check the perm"):
                Store.open(folder, writable=writable)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o555 if path.name == "data.mdb" else 0o777)
    with unprivileged(), Store.open(folder) as reader:
        with pytest.raises(StoreError, match=r"cannot open the store in .*: Permission denied; check the permissions"):
            Store.open(folder, writable=True)
        assert_holds(reader, {})  # a writer that could not begin is no harm to a reader of the same process
    public_folder.chmod(0o777)
