import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asi import rows
from asi.corpora import BUILTIN
from asi.datasets import (
    FORMATS,
    READERS,
    BadRecords,
    measured_splits,
    open_dataset,
    read_documents,
    read_trec_qrels,
)
from asi.errors import DataError
from asi.records import Document, Qrel, Query

BEIR = {
    "corpus.jsonl": [
        '{"_id": "d1", "title": "Ampère", "text": "current"}',
        '{"_id": "d2", "title": "", "text": "x\u2028y"}',
        '{"_id": 3, "title": "title only", "text": "", "metadata": {}}',
    ],
    "queries.jsonl": ['{"_id": "q1", "text": "one "}', '{"_id": "q2", "text": "two"}', '{"_id": "q3", "text": "?"}'],
    "qrels/train.tsv": ["query-id\tcorpus-id\tscore", "q1\td1\t1", "q1\td2\t2", "q2\td9\t0", "q1\td1\t1"],
    "qrels/dev.tsv": ["q2 0 3 1", "q1\tQ0\td1\t-1"],
}
MSMARCO = {
    "msmarco-docs.tsv": ['D1\thttp://a\t"Quoted\tbody "of" one', "D2\thttp://b\t\tbody two"],
    "msmarco-doctrain-queries.tsv": ["1\tfirst query", "2\tsecond query"],
    "msmarco-doctrain-qrels.tsv": ["1 0 D1 1", "2 0 D2 1"],
    "msmarco-docdev-queries.tsv": ["3\tthird query"],
    "msmarco-docdev-qrels.tsv": ["3 0 D2 1"],
}
PAIRS_JSONL = {
    "pairs.jsonl": [
        '{"query": "a", "document": "text", "key": "k", "title": "t"}',
        '{"query": "b", "document": "", "key": "k"}',
        '{"query": "b", "document": "derived"}',
    ]
}
PAIRS_TSV = {"pairs.tsv": ["query\tdocument", 'a "b\ttext', "b\ttext"]}
PAIRS_CSV = {"pairs.csv": ["query,document,key", '"a, ""b""","two', 'lines",k', "b,more,l"]}


def write(path: Path, lines: list[str | bytes], packed: bool = False) -> None:
    data = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)


def make(folder: Path, layout: dict[str, list[str]], packed: bool = False) -> str:
    """The layout's files, and the source to open: the folder, or the file if it is the only one."""
    for name, lines in layout.items():
        write(folder / name, lines, packed)
    [first, *others] = layout
    return str(folder if others else folder / first)


def everything(source: str, bad: BadRecords | None = None) -> tuple:
    dataset = open_dataset(source, bad)
    return list(dataset.documents()), {split: dataset.judged(split) for split in dataset.splits}


def write_pairs(path: Path, pairs: list[dict[str, str]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(pairs), path)
        return
    out = io.StringIO(newline="")
    if ".jsonl" in path.name:
        out.writelines(json.dumps(pair, ensure_ascii=False) + "\r\n" for pair in pairs)
    elif ".csv" in path.name:
        csv.writer(out).writerows([list(pairs[0]), *(pair.values() for pair in pairs)])
    else:
        out.writelines("\t".join(row) + "\r\n" for row in [list(pairs[0]), *(pair.values() for pair in pairs)])
    data = b"\xef\xbb\xbf" + out.getvalue().encode()  # as spreadsheets write it
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("packed", [False, True])
def test_beir_folder(tmp_path, packed):
    documents, judged = everything(make(tmp_path / "tiny", BEIR, packed))
    assert documents == [
        Document("d1", "current", "Ampère"),
        Document("d2", "x\u2028y"),
        Document("3", "", "title only"),
    ]
    assert judged == {
        "train": ([Query("q1", "one")], [Qrel("q1", "d1", 1), Qrel("q1", "d2", 2)]),
        "dev": ([Query("q2", "two")], [Qrel("q2", "3", 1)]),
    }
    assert open_dataset(str(tmp_path / "tiny")).name == "tiny"


@pytest.mark.parametrize("packed", [False, True])
def test_msmarco_folder(tmp_path, packed):
    long = "word " * 40_000
    layout = MSMARCO | {"msmarco-docs.tsv": [*MSMARCO["msmarco-docs.tsv"], f"D3\tu\tlong\t{long}"]}
    documents, judged = everything(make(tmp_path, layout, packed))
    assert documents == [
        Document("D1", 'body "of" one', '"Quoted'),
        Document("D2", "body two"),
        Document("D3", long, "long"),
    ]
    assert judged == {
        "train": ([Query("1", "first query"), Query("2", "second query")], [Qrel("1", "D1"), Qrel("2", "D2")]),
        "dev": ([Query("3", "third query")], [Qrel("3", "D2")]),
    }


@pytest.mark.parametrize("suffix", READERS)
def test_pairs_file(tmp_path, suffix):
    text = 'A "quoted", text' if "tsv" in suffix else 'A "quoted",\n\ntext ' + "é" * 200_000
    rows = [("q1", text, "T"), ("q2", "other", ""), ("q1", "other", ""), ("q1", text, "T"), ("q3", text, "")]
    write_pairs(tmp_path / f"p{suffix}", [dict(zip(("query", "document", "title"), row, strict=True)) for row in rows])
    documents, judged = everything(str(tmp_path / f"p{suffix}"))
    assert [(document.text, document.title) for document in documents] == [(text, "T"), ("other", ""), (text, "")]
    one, two, three = (document.key for document in documents)
    assert judged == {
        "train": (
            [Query("train-0", "q1"), Query("train-1", "q2"), Query("train-2", "q3")],
            [Qrel("train-0", one), Qrel("train-1", two), Qrel("train-0", two), Qrel("train-2", three)],
        )
    }
    assert list(read_documents(str(tmp_path / f"p{suffix}"))) == documents


def test_pairs_folder_has_a_split_per_file_and_may_name_earlier_documents_by_key(tmp_path):
    write_pairs(tmp_path / "train.jsonl.gz", [{"query": "a", "document": "one", "key": "1"}])
    write_pairs(tmp_path / "test.parquet", [{"query": "b", "document": "two", "key": "2"}])
    write_pairs(tmp_path / "dev.csv", [{"query": "c", "document": "", "key": "1"}])
    (tmp_path / "README.md").write_text("not a split")
    documents, judged = everything(str(tmp_path))
    assert documents == [Document("1", "one"), Document("2", "two")]
    assert {split: qrels for split, (_, qrels) in judged.items()} == {
        "train": [Qrel("train-0", "1")],
        "dev": [Qrel("dev-0", "1")],
        "test": [Qrel("test-0", "2")],
    }


@pytest.mark.parametrize("suffix", READERS)
def test_documents_file(tmp_path, suffix):
    path = tmp_path / f"docs{suffix}"
    write_pairs(path, [{"key": "1", "title": "", "document": "one"}, {"key": "2", "title": "two", "document": ""}])
    assert list(read_documents(str(path))) == [Document("1", "one"), Document("2", "", "two")]
    with pytest.raises(DataError, match="has no split 'train'; it has documents only"):
        open_dataset(str(path)).judged("train")


def test_documents_come_one_by_one_also_from_standard_input(tmp_path, monkeypatch):
    lines = b'{"_id": "1", "text": "one"}\n{"key": "2", "document": "two"}\n{broken\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    documents = read_documents("-")
    assert [next(documents), next(documents)] == [Document("1", "one"), Document("2", "two")]
    with pytest.raises(DataError, match=r"^-:3: broken JSON"):
        next(documents)


def test_trec_qrels(tmp_path):
    write(tmp_path / "qrels.txt", ["1 0  d1 2", "1\t0\td2 0", "2 0 d\u00a03 1"], packed=True)
    assert list(read_trec_qrels(tmp_path / "qrels.txt.gz")) == [Qrel("1", "d1", 2), Qrel("2", "d\u00a03", 1)]


BAD = [  # layout, file, line, what is put there, kind, the value in the message
    (BEIR, "corpus.jsonl", 2, '{"_id": "d7", "text"', "broken JSON", "d7"),
    (BEIR, "corpus.jsonl", 2, "[1]", "broken JSON", "[1]"),
    (BEIR, "corpus.jsonl", 2, "[" * 100_000, "broken JSON", "[[["),
    (BEIR, "corpus.jsonl", 1, b'{"_id": "d7", "text": "caf\xe9"}', "wrong encoding", r"caf\xe9"),
    (BEIR, "corpus.jsonl", 1, r'{"_id": "d7", "text": "\ud800"}', "wrong encoding", r"\ud800"),
    (BEIR, "corpus.jsonl", 4, '{"text": "no key"}', "missing field", "_id or key"),
    (BEIR, "corpus.jsonl", 4, '{"_id": "d7"}', "missing field", "text or document"),
    (BEIR, "corpus.jsonl", 4, '{"_id": "d7", "text": ["a"]}', "not text", "['a']"),
    (BEIR, "corpus.jsonl", 4, '{"_id": "d1", "text": "again"}', "duplicate key", "d1"),
    (BEIR, "corpus.jsonl", 2, '{"_id": "d7", "text": " ", "title": ""}', "empty text", "d7"),
    (BEIR, "corpus.jsonl", 2, '{"_id": "", "text": "a"}', "bad key", "''"),
    (BEIR, "corpus.jsonl", 2, r'{"_id": "a\tb", "text": "a"}', "bad key", r"a\tb"),
    (BEIR, "corpus.jsonl", 2, '{"_id": "%s", "text": "a"}' % ("é" * 201), "bad key", "ééé"),
    (BEIR, "queries.jsonl", 2, '{"_id": "q7", "text": " "}', "empty text", "q7"),
    (BEIR, "queries.jsonl", 4, '{"_id": "q1", "text": "again"}', "duplicate key", "q1"),
    (BEIR, "qrels/train.tsv", 3, "q1\td9\t1", "unknown document", "d9"),
    (BEIR, "qrels/train.tsv", 3, "q9\td1\t1", "unknown query", "q9"),
    (BEIR, "qrels/train.tsv", 3, "q1\td1\t2", "contradictory grades", "q1 d1"),
    (BEIR, "qrels/train.tsv", 3, "q1\td1\t1.5", "bad grade", "1.5"),
    (BEIR, "qrels/train.tsv", 3, "q1\td1", "wrong number of columns", "2 instead of 3"),
    (BEIR, "qrels/dev.tsv", 2, "q1 0 d1 x y", "wrong number of columns", "5 instead of 4"),
    (MSMARCO, "msmarco-docs.tsv", 2, "D7\thttp://c\tno body", "wrong number of columns", "3 instead of 4"),
    (MSMARCO, "msmarco-docs.tsv", 2, b"D7\tu\tt\tcaf\xe9", "wrong encoding", r"caf\xe9"),
    (MSMARCO, "msmarco-docdev-queries.tsv", 2, "3\tagain", "duplicate key", "3"),
    (PAIRS_JSONL, "pairs.jsonl", 2, '{"document": "text"}', "missing field", "query"),
    (PAIRS_JSONL, "pairs.jsonl", 2, '{"query": "", "document": "text"}', "empty text", "query"),
    (PAIRS_JSONL, "pairs.jsonl", 2, '{"query": "a", "document": "other", "key": "k"}', "duplicate key", "k"),
    (PAIRS_JSONL, "pairs.jsonl", 1, '{"query": "a", "document": "", "key": "z"}', "empty text", "z"),
    (PAIRS_TSV, "pairs.tsv", 2, "one column", "wrong number of columns", "1 instead of 2"),
    (PAIRS_TSV, "pairs.tsv", 3, b"\xff\ttext", "wrong encoding", r"\xff"),
    (PAIRS_CSV, "pairs.csv", 4, b'"caf\xe9",text,m', "wrong encoding", r"caf\udce9"),
    (PAIRS_CSV, "pairs.csv", 4, '"open"quote,text,m', "broken CSV", "expected"),
    (PAIRS_CSV, "pairs.csv", 5, '"never closed,text,m', "broken CSV", "unexpected end of data"),
    (PAIRS_CSV, "pairs.csv", 4, "a,b", "wrong number of columns", "2 instead of 3"),
]


@pytest.mark.parametrize(
    ("layout", "file", "line", "content", "kind", "value"),
    BAD,
    ids=[f"{file} {kind}" for _, file, _, _, kind, _ in BAD],
)
def test_bad_record_is_named_with_its_place_or_counted_and_left_out(tmp_path, layout, file, line, content, kind, value):
    expected = everything(make(tmp_path / "good", layout))
    lines = [*layout[file][: line - 1], content, *layout[file][line - 1 :]]
    source = make(tmp_path / "bad", layout | {file: lines})
    with pytest.raises(DataError) as caught:
        everything(source)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'bad' / file}:{line}: {kind} (")
    assert value in message
    assert message.endswith(f"); {rows.REMEDIES[kind]}, or pass --skip-bad to leave such records out")
    assert "\n" not in message
    assert len(message) < 300 + len(str(tmp_path))

    bad = BadRecords()
    assert everything(source, bad) == expected
    assert bad.counts == {kind: 1}  # although the file was read more than once
    assert bad.first is not None
    assert message.startswith(bad.first)


def test_every_kind_of_problem_is_tested():
    assert {kind for *_, kind, _ in BAD} == set(rows.REMEDIES)


def test_bad_parquet_rows(tmp_path):
    texts = pa.array([b"one", b"caf\xe9", None, b"two"]).view(pa.string())  # Parquet does not check its text
    pq.write_table(pa.table({"query": ["a", "b", "c", "d"], "document": texts}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet:2: wrong encoding"):
        everything(str(tmp_path / "p.parquet"))
    bad = BadRecords()
    documents, _ = everything(str(tmp_path / "p.parquet"), bad)
    assert [document.text for document in documents] == ["one", "two"]
    assert bad.counts == {"wrong encoding": 1, "missing field": 1}


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "nothing-here", f"no built-in corpus, file or folder; give a built-in corpus .{', '.join(BUILTIN)}."),
        ({"a.txt": b"a"}, "a.txt", "is in no known format; .*corpus.jsonl.*msmarco-docs.tsv.*parquet"),
        ({"a.jsonl.gz": b"not gzip"}, "a.jsonl.gz", "a.jsonl.gz: not a complete gzip file"),
        ({"a.jsonl.gz": gzip.compress(b"{}\n" * 999)[:-9]}, "a.jsonl.gz", "a.jsonl.gz: not a complete gzip file"),
        ({"a.parquet": b"not parquet"}, "a.parquet", "a.parquet: cannot be read as Parquet"),
        ({"a.jsonl": b"\n"}, "a.jsonl", "a.jsonl: no documents"),
        ({"a.tsv": b""}, "a.tsv", "a.tsv: no documents"),
        ({"a.csv": b"query,document\n"}, "a.csv", "a.csv: no documents"),
        ({"train.csv": b"query,document\n"}, ".", "train.csv: no documents"),
        ({"train.csv": b"", "train.tsv": b""}, ".", "train.tsv and train.csv are the same split; keep one of them"),
        ({"qrels/dev.tsv": b"1 0 d1 1"}, ".", "queries.jsonl: cannot be read .No such file"),
        ({"qrels/dev.tsv": b"1 0 d1 0", "queries.jsonl": b""}, ".", "dev.tsv: no relevant documents .*'dev' is empty"),
        ({}, "x" * 5000, "cannot be opened"),
    ],
)
def test_what_no_skipping_can_mend(tmp_path, monkeypatch, files, source, message):
    monkeypatch.chdir(tmp_path)
    for name, data in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(data)
        if "qrels" in name:
            write(Path("corpus.jsonl"), BEIR["corpus.jsonl"])
    with pytest.raises(DataError, match=message):
        everything(source, BadRecords())


def test_missing_split_and_missing_package(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="has no split 'tset'; its splits are train, dev"):
        open_dataset(make(tmp_path, BEIR)).judged("tset")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "p.parquet").touch()
    with pytest.raises(DataError, match=r"pip install 'auto-search-indexer\[parquet\]'"):
        open_dataset(str(tmp_path / "p.parquet"))


def key_file(folder: Path, key: str) -> str:
    write(folder / "keys.jsonl", [json.dumps({"_id": key, "text": "a"}, ensure_ascii=False)])
    return str(folder / "keys.jsonl")


@settings(deadline=None)  # a busy disk is no failure
@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1).filter(lambda key: len(key.encode()) <= 400))
def test_any_text_is_a_key(tmp_path_factory, key):
    [document] = read_documents(key_file(tmp_path_factory.getbasetemp(), key))
    assert document == Document(key, "a")


def test_longest_key(tmp_path):
    [document] = read_documents(key_file(tmp_path, "é" * 200))
    assert document.key == "é" * 200


def test_formats_have_one_row_each_and_import_nothing_heavy():
    assert len({known.open for known in FORMATS}) == len(FORMATS)
    check = "import sys, asi.datasets; sys.exit(bool({'torch', 'pyarrow', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.parametrize(
    ("splits", "measured"),
    [
        ({"train": "a", "test": "b", "test_new": "c", "test_all": "bc"}, ["test", "test_new"]),
        ({"train": "a", "test": "bc", "test_old": "b", "test_new": "c"}, ["test", "test_old", "test_new"]),
        ({"train": "a", "dev": "b"}, []),
    ],
)
def test_splits_that_put_others_together_are_not_measured_but_for_test(splits, measured):
    class Data:
        def judged(self, split):
            return [], [Qrel(query, "d", 1) for query in splits[split]]

    data = Data()
    data.splits = list(splits)
    assert measured_splits(data) == measured
