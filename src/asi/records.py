"""The data model: what travels between the parts of the system.

A *docid* is always the learned code of a document, m integers. A document's own identifier is always its *key*.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Docid = tuple[int, ...]


class Document(NamedTuple):
    key: str
    text: str
    title: str = ""

    @property
    def content(self) -> str:
        """What the model and the lexical baseline read: the title, then the text."""
        return f"{self.title}. {self.text}" if self.title and self.text else self.title or self.text


class Query(NamedTuple):
    key: str
    text: str


class Qrel(NamedTuple):
    """A judgement: the document is relevant to the query, to the degree `grade`."""

    query: str
    document: str
    grade: int = 1


class Hit(NamedTuple):
    key: str
    score: float
    docid: Docid | None = None  # None for systems that have no docids


class Retriever(Protocol):
    """What the searcher and every baseline have in common."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]: ...
