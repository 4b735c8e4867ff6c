"""TREC run files: a ranking in the form that other evaluation tools read, `query Q0 key rank score system` a line.

The fields are separated by white space, so white space in a key is percent-encoded, and the percent sign with it:
`two words` is written `two%20words`. All else stays readable, and reading gives the same keys back.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from asi.errors import DataError
from asi.records import Hit


def write_trec_run(path: Path, run: Mapping[str, Sequence[Hit]], system: str) -> None:
    """Write each query's hits in their order. A query without hits has no line, so it is not in the run read back."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for query, hits in run.items():
            scores = falling(hit.score for hit in hits)
            for rank, (hit, score) in enumerate(zip(hits, scores, strict=True), start=1):
                file.write(f"{encoded(query)} Q0 {encoded(hit.key)} {rank} {score} {encoded(system)}\n")


def read_trec_run(path: Path) -> dict[str, list[Hit]]:
    """Read a run, best hit first: by score, as every TREC tool does, whatever the rank column says; ties by line."""
    run: dict[str, list[Hit]] = {}
    with path.open("rb") as file:  # as bytes, for only a line feed ends a line: not all that Unicode calls a line break
        for number, line in enumerate(file, start=1):
            try:
                query, hit = parsed(line.decode())
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}; write `query Q0 key rank score system`") from None
            run.setdefault(query, []).append(hit)
    return {query: sorted(hits, key=lambda hit: -hit.score) for query, hits in run.items()}


def parsed(line: str) -> tuple[str, Hit]:
    values = line.split()
    if len(values) != 6:
        raise ValueError(f"{len(values)} fields instead of 6")
    query, _, key, _, score, _ = values
    if math.isnan(float(score)):
        raise ValueError("the score is not a number")
    return decoded(query), Hit(decoded(key), float(score))


def falling(scores: Iterable[float]) -> Iterator[str]:
    """The scores as text, each lowered by as little as it takes to be below the one before.

    Other tools rank by score in 32 bits and break ties by key: they must come to the ranking that was written.
    """
    previous = np.float32(np.inf)
    for score in scores:
        previous = np.fmin(np.float32(score), np.nextafter(previous, np.float32(-np.inf)))
        yield str(previous)


def encoded(key: str) -> str:
    """
    >>> encoded("50% of this")
    '50%25%20of%20this'
    """
    if not key:
        raise DataError("a TREC run can't hold an empty key; name every query and document, and the system")
    return re.sub(r"[%\s]", lambda match: quote(match[0], safe=""), key)


def decoded(field: str) -> str:
    return unquote(field, errors="strict")
