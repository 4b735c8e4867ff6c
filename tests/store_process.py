"""The other process in the tests of the store: `python store_process.py ROLE FOLDER`. Its imports are few and fast."""

import sys
import zlib
from pathlib import Path

import numpy as np

from asi.records import Document
from asi.store import Store

GROUP = 20  # documents that are always added and replaced together
BATCH = 5


def codes_of(document, meta):
    """A docid that depends on the document alone; one of seven, so that buckets fill."""
    rng = np.random.default_rng(zlib.crc32(repr(document).encode()) % 7)
    return rng.integers(0, meta.V, meta.m, dtype=np.uint16)


def vector_of(document, meta):
    rng = np.random.default_rng(zlib.crc32(repr(document).encode()))
    return rng.integers(-128, 128, meta.width, dtype=np.int8)


def add(store, documents):
    docids = np.array([codes_of(document, store.meta) for document in documents], np.uint16)
    vectors = np.array([vector_of(document, store.meta) for document in documents], np.int8)
    store.add(documents, docids.reshape(-1, store.meta.m), vectors.reshape(-1, store.meta.width))


def step_documents(step):
    """What step `step` of a worker adds: five new documents, and a new version of one that all steps share."""
    return [Document(f"{step}-{i}", "text " * 50 * i) for i in range(BATCH)] + [Document("latest", str(step))]


def work(folder):
    """Even steps add, odd steps delete what was added five steps before; each is reported once it is done."""
    with Store.open(folder, writable=True) as store:
        for line in sys.stdin:
            start = int(line)
            break
        for step in range(start, sys.maxsize):
            if step % 2 == 0:
                add(store, step_documents(step))
            elif step > 5:
                store.delete([document.key for document in step_documents(step - 5)[:BATCH]])
            print(step, flush=True)


def write_version(store, version):
    """Replace a group of documents, or begin a new group: bucket (group, version), vectors (group, version, i)."""
    group = version // 4
    documents = [Document(f"{group}/{i}", f"{version} " + "x" * 999) for i in range(GROUP)]
    docids = np.tile(np.array([group, version], np.uint16), (GROUP, 1))
    vectors = np.array([(group, version, i) for i in range(GROUP)], np.int8)
    store.add(documents, docids, vectors)


def watch(store, versions):
    """Poll the store until the last version is there; the number of different snapshots seen, all of them whole."""
    seen = set()
    while True:
        snapshot = store.snapshot()
        seen.add(snapshot.transaction)
        assert (np.diff(snapshot.offsets) == GROUP).all(), snapshot.offsets
        assert len(np.unique(snapshot.codes[:, 0])) == len(snapshot.codes), "two versions of a group"
        for group, version in snapshot.codes.tolist():
            numbers = snapshot.bucket((group, version))
            assert store.vectors(numbers).tolist() == [[group, version, i] for i in range(GROUP)]
            documents = store.documents(numbers)
            if None in documents:  # replaced since the snapshot, all of them at once
                assert documents == [None] * GROUP
            else:
                assert [document.key for document in documents] == [f"{group}/{i}" for i in range(GROUP)]
                assert all(document.text.startswith(f"{version} ") for document in documents)
        if len(snapshot.codes) and snapshot.codes[-1, 1] == versions - 1:
            return len(seen)


def watch_alone(folder):
    with Store.open(folder) as store:
        print("ready", flush=True)
        print(watch(store, int(sys.stdin.readline())), flush=True)


def hold(folder):
    """Be the writer until the standard input is closed."""
    with Store.open(folder, writable=True):
        print("ready", flush=True)
        sys.stdin.read()


def fill(folder):
    with Store.open(folder, writable=True) as store:
        add(store, [Document(f"filler {i}", "x" * 3_000) for i in range(400)])


ROLES = {role.__name__: role for role in (work, watch_alone, hold, fill)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](Path(sys.argv[2]))
