"""Datasets: documents, queries and judgements out of a built-in corpus, a folder or a file, as streams of records.

    source  ->  open_dataset  ->  documents()      one Document at a time, none kept
                                  judged(split)    the queries of a split and their relevant documents

Every record is checked on the way. The formats' own names (`_id`, `docid`, `query-id`, ...) end here.
"""

import hashlib
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from asi import rows
from asi.corpora import BUILTIN, judgements
from asi.errors import DataError
from asi.records import Document, Qrel, Query
from asi.rows import BadRecords, Fields, Problem, optional_field, required_field

__all__ = ["BadRecords", "Dataset", "WithMorePairs", "open_dataset", "read_documents", "read_trec_qrels"]

T = TypeVar("T")
Keyed = TypeVar("Keyed", Document, Query)
Reader = Callable[[Path, BadRecords | None], rows.Rows]

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

READERS: dict[str, Reader] = {  # by suffix
    ".jsonl": rows.jsonl_rows,
    ".tsv": rows.tsv_rows,
    ".csv": rows.csv_rows,
    ".jsonl.gz": rows.jsonl_rows,
    ".tsv.gz": rows.tsv_rows,
    ".csv.gz": rows.csv_rows,
    ".parquet": rows.parquet_rows,
}
TREC_COLUMNS = ("query-id", "iteration", "corpus-id", "score")
MSMARCO_SPLITS = ("train", "dev", "test")


class Dataset(Protocol):
    """Documents, and queries with their relevant documents, cut into splits."""

    @property
    def name(self) -> str: ...

    @property
    def splits(self) -> tuple[str, ...]: ...

    def documents(self) -> Iterator[Document]: ...

    def judged(self, split: str) -> tuple[list[Query], list[Qrel]]: ...


def measured_splits(dataset: Dataset) -> list[str]:
    """The splits whose names begin with "test", without those that only put others together: `test` itself stays."""
    judged = {
        name: {(qrel.query, qrel.document) for qrel in dataset.judged(name)[1]}
        for name in dataset.splits
        if name.startswith("test")
    }

    def is_sum(name: str) -> bool:
        parts = [own for own in judged.values() if own < judged[name]]
        return name != "test" and bool(parts) and set().union(*parts) == judged[name]

    return [name for name in judged if not is_sum(name)]


def open_dataset(source: str, bad: BadRecords | None = None) -> Dataset:
    """The dataset of that name, folder or file. With `bad`, records that can't be used are counted and left out."""
    if source in BUILTIN:
        return BUILTIN[source]()
    path = Path(source)
    try:
        for known in FORMATS:
            if known.fits(path):
                return known.open(path, bad)
        wrong = "is in no known format" if path.exists() else "is no built-in corpus, file or folder"
    except OSError as error:
        raise DataError(f"{source!r} cannot be opened ({error.strerror}); check the path and its permissions") from None
    formats = "; ".join(known.description for known in FORMATS)
    raise DataError(f"{source!r} {wrong}; give a built-in corpus ({', '.join(BUILTIN)}) or one of: {formats}")


def read_documents(source: str, bad: BadRecords | None = None) -> Iterator[Document]:
    """The documents of anything that `open_dataset` opens: a file of documents will do, `-` is standard input."""
    return open_dataset(source, bad).documents()


class WithMorePairs:
    """A data set and the pairs of a file, such as pseudo queries, about documents that it has: to train on, too."""

    def __init__(self, dataset: Dataset, source: str, bad: BadRecords | None = None) -> None:
        self.dataset = dataset
        self.more = open_dataset(source, bad)

    @property
    def name(self) -> str:
        return f"{self.dataset.name} and {self.more.name}"

    @property
    def splits(self) -> tuple[str, ...]:
        return self.dataset.splits

    def documents(self) -> Iterator[Document]:
        return self.dataset.documents()

    def judged(self, split: str) -> tuple[list[Query], list[Qrel]]:
        return self.dataset.judged(split)

    def further(self) -> tuple[list[Query], list[Qrel]]:
        """The pairs of the file; the keys of their queries are told apart from the data set's own."""
        queries, qrels = self.more.judged("train")
        known = {document.key for document in self.documents()}
        if unknown := next((qrel.document for qrel in qrels if qrel.document not in known), None):
            raise DataError(f"{self.more.name} has pairs of the document {unknown!r}, which {self.dataset.name} lacks")
        marked = {query.key: f"more {query.key}" for query in queries}
        return (
            [Query(marked[query.key], query.text) for query in queries],
            [qrel._replace(query=marked[qrel.query]) for qrel in qrels],
        )


def read_trec_qrels(path: Path, bad: BadRecords | None = None) -> Iterator[Qrel]:
    """The judgements of a TREC file (`query 0 document grade`) that call the document relevant."""
    qrels = Table(path, partial(rows.trec_rows, TREC_COLUMNS)).records(qrel_of, bad)
    return (qrel for qrel in qrels if qrel.grade > 0)


class Table(NamedTuple):
    """A file and the way to read it."""

    path: Path
    read: Reader

    def records(self, make: Callable[[Fields], T], bad: BadRecords | None) -> Iterator[T]:
        return (record for _, record in rows.checked(self.path, self.read(self.path, bad), make, bad))


def key_of(text: str) -> str:
    if not text or CONTROL.search(text) or len(text.encode()) > rows.KEY_BYTES:
        raise Problem("bad key", text)
    return text


def filled(document: Document) -> Document:
    if not (document.title.strip() or document.text.strip()):
        raise Problem("empty text", document.key)
    return document


def document_of(fields: Fields) -> Document:
    key = key_of(required_field(fields, "_id", "key"))
    return filled(Document(key, required_field(fields, "text", "document"), optional_field(fields, "title") or ""))


def query_of(fields: Fields) -> Query:
    query = Query(key_of(required_field(fields, "_id", "key")), required_field(fields, "text", "query").strip())
    if not query.text:
        raise Problem("empty text", query.key)
    return query


def qrel_of(fields: Fields) -> Qrel:
    query, document, grade = (required_field(fields, name) for name in ("query-id", "corpus-id", "score"))
    try:
        return Qrel(query, document, int(grade))
    except ValueError:
        raise Problem("bad grade", grade) from None


class PairRecord(NamedTuple):
    query: str
    document: Document
    is_new: bool = True  # no earlier pair has this document


def pair_of(fields: Fields) -> PairRecord:
    query, text = required_field(fields, "query").strip(), required_field(fields, "document")
    title, key = optional_field(fields, "title") or "", optional_field(fields, "key")
    if not query:
        raise Problem("empty text", "query")
    if key is None:
        return PairRecord(query, filled(Document(fingerprint(f"{title}\x1f{text}").hex(), text, title)))
    return PairRecord(query, Document(key_of(key), text, title))


def fingerprint(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def first_of_key(seen: set[str], make: Callable[[Fields], Keyed], fields: Fields) -> Keyed:
    record = make(fields)
    if record.key in seen:
        raise Problem("duplicate key", record.key)
    seen.add(record.key)
    return record


def agreeing_pair(known: dict[str, bytes], fields: Fields) -> PairRecord:
    """The pair, if its key has the same text as in earlier pairs, or no text; `known` has their fingerprints."""
    query, document, _ = pair_of(fields)
    if document.key not in known:
        known[document.key] = fingerprint(filled(document).text)
        return PairRecord(query, document)
    if document.text.strip() and fingerprint(document.text) != known[document.key]:
        raise Problem("duplicate key", document.key)
    return PairRecord(query, document, is_new=False)


def agreeing_qrel(
    queries: Container[str], documents: Container[str], grades: dict[tuple[str, str], int], fields: Fields
) -> Qrel:
    """The judgement, if it is about something that exists and earlier ones, in `grades`, don't contradict it."""
    qrel = qrel_of(fields)
    if qrel.grade > 0 and qrel.query not in queries:
        raise Problem("unknown query", qrel.query)
    if qrel.grade > 0 and qrel.document not in documents:
        raise Problem("unknown document", qrel.document)
    if grades.setdefault((qrel.query, qrel.document), qrel.grade) != qrel.grade:
        raise Problem("contradictory grades", f"{qrel.query} {qrel.document}")
    return qrel


@dataclass
class Collection:
    """Documents, queries and judgements in files of their own, as BEIR and MS MARCO have them."""

    name: str
    corpus: Table
    tables: dict[str, tuple[Table, Table]]  # by split: queries, judgements
    bad: BadRecords | None
    _keys: set[str] = field(default_factory=set, init=False, repr=False)  # of all documents, once they were read

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.tables)

    def documents(self) -> Iterator[Document]:
        seen: set[str] = set()
        yield from self.corpus.records(partial(first_of_key, seen, document_of), self.bad)
        if not seen:
            raise no_documents(self.corpus.path)
        self._keys = seen

    def judged(self, split: str) -> tuple[list[Query], list[Qrel]]:
        query_table, qrel_table = split_table(self, self.tables, split)
        queries = {query.key: query for query in query_table.records(partial(first_of_key, set(), query_of), self.bad)}
        grades: dict[tuple[str, str], int] = {}
        judge = partial(agreeing_qrel, queries, self._document_keys(), grades)
        qrels = list(dict.fromkeys(qrel for qrel in qrel_table.records(judge, self.bad) if qrel.grade > 0))
        if not qrels:
            raise no_judgements(qrel_table.path, split)
        return [queries[key] for key in dict.fromkeys(qrel.query for qrel in qrels)], qrels

    def _document_keys(self) -> set[str]:
        if not self._keys:
            for _ in self.documents():
                pass
        return self._keys


@dataclass
class Pairs:
    """A file of (query, document) pairs for each split. A document is in it as often as it has queries."""

    name: str
    tables: dict[str, Table]  # by split
    bad: BadRecords | None

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.tables)

    def documents(self) -> Iterator[Document]:
        found = False
        for _, pair in self._pairs(self.tables):
            if pair.is_new:
                found = True
                yield pair.document
        if not found:
            raise no_documents(*(table.path for table in self.tables.values()))

    def judged(self, split: str) -> tuple[list[Query], list[Qrel]]:
        table = split_table(self, self.tables, split)
        # A pair may name a document of an earlier file by its key, so those are read too.
        upto = self.splits[: self.splits.index(split) + 1]
        pairs = ((pair.query, pair.document.key) for name, pair in self._pairs(upto) if name == split)
        queries, qrels = judgements(split, pairs)
        if not qrels:
            raise no_judgements(table.path, split)
        return queries, qrels

    def _pairs(self, splits: Iterable[str]) -> Iterator[tuple[str, PairRecord]]:
        known: dict[str, bytes] = {}
        for split in splits:
            for pair in self.tables[split].records(partial(agreeing_pair, known), self.bad):
                yield split, pair


def split_table(dataset: Dataset, tables: Mapping[str, T], split: str) -> T:
    if split not in tables:
        others = f"its splits are {', '.join(tables)}" if tables else "it has documents only, and no queries"
        raise DataError(f"{dataset.name} has no split {split!r}; {others}")
    return tables[split]


def no_documents(*paths: Path) -> DataError:
    return DataError(f"{', '.join(map(str, paths))}: no documents; check that this is the right file")


def no_judgements(path: Path, split: str) -> DataError:
    return DataError(f"{path}: no relevant documents for any query, so the split {split!r} is empty; use another split")


def suffix_of(path: Path) -> str:
    return next((suffix for suffix in READERS if path.name.endswith(suffix)), "")


def plain_or_packed(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.is_file() and not path.is_file() else path


def table_of(path: Path) -> Table:
    """A file with one of the suffixes in `READERS`, plain or with .gz."""
    path = plain_or_packed(path)
    return Table(path, READERS[suffix_of(path)])


def files_by_split(folder: Path, suffixes: Container[str]) -> dict[str, Path]:
    """The files of a folder whose names are a split and a suffix, `train` first."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        suffix = suffix_of(path)
        if suffix in suffixes and path.is_file() and not path.name.startswith("."):
            other = found.setdefault(path.name.removesuffix(suffix), path)
            if other != path:
                raise DataError(f"{folder}: {path.name} and {other.name} are the same split; keep one of them")
    return {split: found[split] for split in sorted(found, key=lambda split: (split != "train", split))}


def open_beir(folder: Path, bad: BadRecords | None) -> Dataset:
    queries = table_of(folder / "queries.jsonl")
    qrels = files_by_split(folder / "qrels", (".tsv", ".tsv.gz"))
    tables = {split: (queries, Table(path, qrel_rows)) for split, path in qrels.items()}
    return Collection(folder.resolve().name, table_of(folder / "corpus.jsonl"), tables, bad)


def qrel_rows(path: Path, bad: BadRecords | None) -> rows.Rows:
    """Judgements in BEIR's three columns under a header, or in TREC's four with none."""
    _, first = next(rows.text_lines(path, BadRecords()), (1, ""))
    is_trec = len(first.split()) == len(TREC_COLUMNS) and TREC_COLUMNS[0] not in first
    return rows.trec_rows(TREC_COLUMNS, path, bad) if is_trec else rows.tsv_rows(path, bad)


def open_msmarco(folder: Path, bad: BadRecords | None) -> Dataset:
    def table(name: str, *columns: str) -> Table:
        return Table(plain_or_packed(folder / name), partial(rows.column_rows, columns))

    tables = {}
    for split in MSMARCO_SPLITS:
        qrels = plain_or_packed(folder / f"msmarco-doc{split}-qrels.tsv")
        if qrels.is_file():
            queries = table(f"msmarco-doc{split}-queries.tsv", "key", "text")
            tables[split] = queries, Table(qrels, partial(rows.trec_rows, TREC_COLUMNS))
    return Collection(folder.resolve().name, table("msmarco-docs.tsv", "key", "url", "title", "text"), tables, bad)


def open_pairs_folder(folder: Path, bad: BadRecords | None) -> Dataset:
    tables = {split: table_of(path) for split, path in files_by_split(folder, READERS).items()}
    return Pairs(folder.resolve().name, tables, bad)


def open_file(path: Path, bad: BadRecords | None) -> Dataset:
    """A file of pairs, or of documents if its first record has no query."""
    table = table_of(path)
    first = next(table.records(dict, BadRecords()), {})
    return Pairs(path.name, {"train": table}, bad) if "query" in first else Collection(path.name, table, {}, bad)


def open_standard_input(path: Path, bad: BadRecords | None) -> Dataset:
    return Collection(path.name, Table(path, rows.jsonl_rows), {}, bad)


class Format(NamedTuple):
    description: str
    fits: Callable[[Path], bool]
    open: Callable[[Path, BadRecords | None], Dataset]


FORMATS = (
    Format("- (documents as JSONL on standard input)", lambda path: path == rows.STANDARD_INPUT, open_standard_input),
    Format(
        "a BEIR folder (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv)",
        lambda path: plain_or_packed(path / "corpus.jsonl").is_file(),
        open_beir,
    ),
    Format(
        "an MS MARCO folder (msmarco-docs.tsv, msmarco-docSPLIT-queries.tsv, msmarco-docSPLIT-qrels.tsv)",
        lambda path: plain_or_packed(path / "msmarco-docs.tsv").is_file(),
        open_msmarco,
    ),
    Format(
        "a folder of pair files named by split", lambda path: bool(files_by_split(path, READERS)), open_pairs_folder
    ),
    Format(
        f"a file of pairs or of documents ({' '.join(READERS)})",
        lambda path: path.is_file() and suffix_of(path) in READERS,
        open_file,
    ),
)
