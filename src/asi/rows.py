"""Files as rows: JSONL, TSV, CSV, Parquet and headerless columns, read as a stream of (line, fields).

Everything that can be wrong with one record is a `Problem`. `checked` is the one place that meets it: it names the file
and the line, and raises, or counts the record and goes on. Lines are physical lines from 1; in Parquet they are rows.
"""

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from asi.errors import DataError

A = TypeVar("A")
B = TypeVar("B")

Fields = Mapping[str, Any]  # as the file has them: `as_text` makes text of them
Rows = Iterator[tuple[int, Fields]]

KEY_BYTES = 400  # of UTF-8, at most: a key of the store's database has to hold it
STANDARD_INPUT = Path("-")
COLUMNS = {"_id", "key", "title", "text", "document", "query"}  # no other column of a Parquet file is loaded
BOM = b"\xef\xbb\xbf"

REMEDIES = {  # by kind of problem
    "wrong encoding": "save the file as UTF-8",
    "broken JSON": "write one JSON object on each line",
    "broken CSV": "close every quotation mark and double those inside a field",
    "wrong number of columns": "separate the columns as the first line does",
    "missing field": "add the field to every record",
    "not text": "write the value as text",
    "bad key": f"use 1 to {KEY_BYTES} bytes of text with no control characters",
    "duplicate key": "give every document and every query a key of its own",
    "empty text": "fill it in",
    "bad grade": "write the grade as a whole number",
    "unknown document": "correct the key or add the document",
    "unknown query": "correct the key or add the query",
    "contradictory grades": "judge each query and document once",
}


class Problem(Exception):
    """What is wrong with one record: a kind out of `REMEDIES`, and the value that shows it."""

    def __init__(self, kind: str, value: object) -> None:
        super().__init__(kind, value)
        self.kind, self.value = kind, value


@dataclass
class BadRecords:
    """Counts the bad records that a reader leaves out. A record that is read again is counted once."""

    counts: dict[str, int] = field(default_factory=dict)  # by kind
    first: str | None = None  # the message of the first one
    _places: set[str] = field(default_factory=set, init=False, repr=False)

    def add(self, kind: str, place: str, message: str) -> None:
        if place not in self._places:
            self._places.add(place)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.first = self.first or message


def checked(
    path: Path, rows: Iterable[tuple[int, A]], step: Callable[[A], B], bad: BadRecords | None
) -> Iterator[tuple[int, B]]:
    """Apply `step` to every row; where it finds a `Problem`, raise it as a `DataError`, or count it in `bad`."""
    for line, row in rows:
        try:
            value = step(row)
        except Problem as problem:
            place = f"{path}:{line}"
            message = f"{place}: {problem.kind} ({shortened(problem.value)}); {REMEDIES[problem.kind]}"
            if bad is None:
                raise DataError(f"{message}, or pass --skip-bad to leave such records out") from None
            bad.add(problem.kind, place, message)
        else:
            yield line, value


def shortened(value: object, width: int = 60) -> str:
    """
    >>> shortened("a" * 100, width=10)
    "'aaaaaa..."
    """
    shown = " ".join(str(value).split()) if isinstance(value, Exception) else repr(value)
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain or gzip file, or of standard input, with their line ends and without a byte order mark."""
    try:
        with opened(path) as file:
            for first in islice(file, 1):
                yield first.removeprefix(BOM)
            yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a complete gzip file ({error}); make it or fetch it again") from None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions"
        ) from None


def opened(path: Path) -> AbstractContextManager[Iterator[bytes]]:
    if path == STANDARD_INPUT:
        return nullcontext(sys.stdin.buffer)
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def decoded(raw: bytes) -> str:
    try:
        return raw.rstrip(b"\r\n").decode()
    except UnicodeDecodeError as error:
        raise Problem("wrong encoding", raw[max(0, error.start - 10) : error.end + 10]) from None


def text_lines(path: Path, bad: BadRecords | None) -> Iterator[tuple[int, str]]:
    """Every line that has something in it, decoded one by one, so that one bad line costs one record."""
    numbered = checked(path, enumerate(raw_lines(path), 1), decoded, bad)
    return ((line, text) for line, text in numbered if text)


def jsonl_rows(path: Path, bad: BadRecords | None) -> Rows:
    return checked(path, text_lines(path, bad), json_object, bad)


def json_object(text: str) -> Fields:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Problem("broken JSON", text) from None
    if not isinstance(value, dict):
        raise Problem("broken JSON", text)
    return value


def tsv_rows(path: Path, bad: BadRecords | None) -> Rows:
    """Tab-separated lines under a header. Quotation marks are ordinary characters: a line is a record."""
    lines = text_lines(path, bad)
    for _, header in islice(lines, 1):
        yield from checked(path, lines, partial(tab_fields, header.split("\t")), bad)


def tab_fields(names: Sequence[str], line: str) -> Fields:
    return named_fields(names, line.split("\t"))


def space_fields(names: Sequence[str], line: str) -> Fields:
    return named_fields(names, re.findall(r"[^ \t]+", line))


def named_fields(names: Sequence[str], values: Sequence[str]) -> Fields:
    if len(values) != len(names):
        raise Problem("wrong number of columns", f"{len(values)} instead of {len(names)}")
    return dict(zip(names, values, strict=True))


def column_rows(names: Sequence[str], path: Path, bad: BadRecords | None) -> Rows:
    """Tab-separated lines with no header, as MS MARCO has them."""
    return checked(path, text_lines(path, bad), partial(tab_fields, names), bad)


def trec_rows(names: Sequence[str], path: Path, bad: BadRecords | None) -> Rows:
    """Lines with no header, separated by blanks or tabs, as TREC has them."""
    return checked(path, text_lines(path, bad), partial(space_fields, names), bad)


def csv_rows(path: Path, bad: BadRecords | None) -> Rows:
    records = checked(path, csv_records(path), csv_values, bad)
    for _, header in islice(records, 1):
        yield from checked(path, records, partial(named_fields, header), bad)


def csv_records(path: Path) -> Iterator[tuple[int, list[str] | csv.Error]]:
    """The records of a CSV file, each at its first line; where the reader gives up on one, its error stands for it.

    A record may span lines, so undecodable bytes are smuggled through the reader; `as_text` finds them.
    """
    csv.field_size_limit(2**31 - 1)  # the default refuses texts of more than 131,072 characters
    reader = csv.reader((raw.decode(errors="surrogateescape") for raw in raw_lines(path)), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            if record := next(reader):
                yield line, record
        except StopIteration:
            return
        except csv.Error as error:
            yield line, error


def csv_values(record: list[str] | csv.Error) -> list[str]:
    if isinstance(record, csv.Error):
        raise Problem("broken CSV", record)
    return record


def parquet_rows(path: Path, bad: BadRecords | None) -> Rows:
    """The rows of a Parquet file, from 1. Text comes as bytes, so that `as_text` can judge every value alone."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow; pip install 'auto-search-indexer[parquet]'") from None
    try:
        with ParquetFile(path) as file:
            columns = [column for column in file.schema_arrow if column.name in COLUMNS]
            text = pa.large_binary()
            schema = pa.schema([(c.name, text if str(c.type).endswith("string") else c.type) for c in columns])
            batches = file.iter_batches(batch_size=1024, columns=schema.names)
            yield from enumerate((row for batch in batches for row in batch.cast(schema).to_pylist()), 1)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({shortened(error)}); make it again") from None


def as_text(value: object) -> str:
    try:
        if isinstance(value, str):
            if not value.isascii():
                value.encode()  # fails on a lone surrogate: no Unicode text, though JSON can spell it
            return value
        if isinstance(value, bytes):
            return value.decode()
    except UnicodeError:
        raise Problem("wrong encoding", value) from None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # keys are often numbers
    raise Problem("not text", value)


def optional_field(fields: Fields, *names: str) -> str | None:
    """The first of these fields that there is."""
    for name in names:
        if (value := fields.get(name)) is not None:
            return as_text(value)
    return None


def required_field(fields: Fields, *names: str) -> str:
    if (text := optional_field(fields, *names)) is None:
        raise Problem("missing field", " or ".join(names))
    return text
