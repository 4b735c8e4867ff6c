"""Judges of quality: how well a document answers a query, by something that took no part in training.

The paper's Quality Score comes from a private tool. A judge here is anything with a name that scores (query, document)
pairs; the name stands in every table.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from asi.distributed import choose_device
from asi.encoder import find_encoder, longest_text
from asi.errors import ConfigError
from asi.pretrained import pretrained_embedding
from asi.ranking import unit
from asi.texts import words

Pairs = NDArray[np.int64]  # (n, 2): rows of queries, rows of documents
Floats = NDArray[np.float32]

PAIRS_AT_ONCE = 2**16
JUDGED_TOKENS = 256  # of a text, or of both for a cross-encoder
MANY_DOCUMENTS = 1000  # of a query: collapsed docids open the whole corpus
CROSS_ENCODER_DOCUMENTS = 20  # of a query, drawn at random if it has more: a cross-encoder takes milliseconds for each


class Judge(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """What it was found by; two models may have one name."""

    @property
    def documents_per_query(self) -> int:
        """More than so many are sampled."""

    def scores(self, queries: Sequence[str], documents: Sequence[str], pairs: Pairs) -> Floats:
        """How well each pair fits (n,), higher is better; `documents` are the whole corpus."""


class Quality(NamedTuple):
    """The mean score of what was retrieved: over all pairs, and over queries first (one with nothing counts as 0)."""

    judge: str
    micro: float
    macro: float
    deviation: float  # standard deviation of the queries' means, which `macro` is the mean of


def quality_score(judge: Judge, queries: Sequence[str], documents: Sequence[str], parts: Iterable[Pairs]) -> Quality:
    """`parts` hold all retrieved documents of all queries; a query's are in one part."""
    sums: NDArray[Any] = np.zeros(len(queries))
    counts = np.zeros(len(queries), dtype=np.int64)
    kept = []
    for pairs in parts:
        counts += np.bincount(pairs[:, 0], minlength=len(queries))
        kept.append(sampled(pairs, judge.documents_per_query))
    chosen = np.concatenate([np.empty((0, 2), dtype=np.int64), *kept])
    if len(chosen):
        scores = judge.scores(queries, documents, chosen)
        sums = np.bincount(chosen[:, 0], weights=scores, minlength=len(queries))
    means = sums / np.maximum(np.bincount(chosen[:, 0], minlength=len(queries)), 1)
    micro = (means * counts).sum() / max(counts.sum(), 1)
    return Quality(judge.name, float(micro), float(means.mean()), float(means.std()))


def sampled(pairs: Pairs, most: int, seed: int = 0) -> Pairs:
    """At most so many documents of each query, drawn at random."""
    order = np.lexsort((np.random.default_rng(seed).random(len(pairs)), pairs[:, 0]))
    ordered = pairs[order]
    place = np.arange(len(ordered)) - np.searchsorted(ordered[:, 0], ordered[:, 0])
    return ordered[place < most]


class EmbeddingJudge:
    """The cosine of two vectors."""

    documents_per_query = MANY_DOCUMENTS

    def __init__(self, name: str, embed: Callable[[Sequence[str]], Floats], source: str) -> None:
        self.name = name
        self.source = source
        self.embed = embed
        self.known: dict[str, Floats] = {}  # the same documents are judged again for every way and split

    def vectors(self, texts: Sequence[str]) -> Floats:
        if new := [text for text in dict.fromkeys(texts) if text not in self.known]:
            self.known.update(zip(new, unit(self.embed(new)), strict=True))
        return np.stack([self.known[text] for text in texts])

    def scores(self, queries: Sequence[str], documents: Sequence[str], pairs: Pairs) -> Floats:
        asked, query_rows = np.unique(pairs[:, 0], return_inverse=True)
        used, rows = np.unique(pairs[:, 1], return_inverse=True)
        q, d = self.vectors([queries[row] for row in asked]), self.vectors([documents[row] for row in used])
        pairs = np.stack([query_rows, rows], axis=1)
        found = np.empty(len(pairs), dtype=np.float32)
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            part = pairs[start : start + PAIRS_AT_ONCE]
            found[start : start + len(part)] = np.einsum("nd,nd->n", q[part[:, 0]], d[part[:, 1]])
        return found


class TfidfJudge:
    """The cosine of TF-IDF vectors; word frequencies from the whole corpus."""

    name = "TF-IDF cosine"
    source = "tfidf"
    documents_per_query = MANY_DOCUMENTS

    def __init__(self) -> None:
        self.kept: tuple[Sequence[str], Tfidf, Any] | None = None  # of the last corpus, with its vectors

    def scores(self, queries: Sequence[str], documents: Sequence[str], pairs: Pairs) -> Floats:
        if self.kept is None or self.kept[0] != documents:
            vectoriser = Tfidf(documents)
            self.kept = documents, vectoriser, vectoriser.vectors(documents)
        _, vectoriser, d = self.kept
        q = vectoriser.vectors(queries)
        found = np.empty(len(pairs), dtype=np.float32)
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            part = pairs[start : start + PAIRS_AT_ONCE]
            found[start : start + len(part)] = q[part[:, 0]].multiply(d[part[:, 1]]).sum(1).A1
        return found


class Tfidf:
    """Words to sparse unit vectors: (1 + log count) times (1 + log of documents by documents with the word)."""

    def __init__(self, documents: Sequence[str]) -> None:
        bags = [set(words(document)) for document in documents]
        self.vocabulary = {word: i for i, word in enumerate(sorted(set().union(*bags)))}
        frequency = np.zeros(len(self.vocabulary))
        for bag in bags:
            frequency[[self.vocabulary[word] for word in bag]] += 1
        self.idf = np.log((1 + len(documents)) / (1 + frequency)) + 1

    def vectors(self, texts: Sequence[str]) -> scipy.sparse.csr_matrix:
        known = [[self.vocabulary[word] for word in words(text) if word in self.vocabulary] for text in texts]
        starts = np.cumsum([0, *map(len, known)])
        columns = np.array([column for row in known for column in row], dtype=np.int64)
        shape = (len(texts), len(self.vocabulary))
        counts = scipy.sparse.csr_matrix((np.ones(len(columns)), columns, starts), shape=shape)
        counts.sum_duplicates()
        counts.data = (1 + np.log(counts.data)) * self.idf[counts.indices]
        norms = np.sqrt(np.asarray(counts.multiply(counts).sum(1)).ravel())
        return scipy.sparse.diags(1 / np.maximum(norms, 1e-12)) @ counts


class CrossEncoderJudge:
    """A Hugging Face model that reads query and document together; a single logit is squashed to (0, 1)."""

    documents_per_query = CROSS_ENCODER_DOCUMENTS

    def __init__(self, name: str, folder: str, device: Any = "cpu") -> None:
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError:
            raise ConfigError(
                "a cross-encoder needs transformers; run: pip install 'auto-search-indexer[transformers]'"
            ) from None
        self.name = f"{Path(name).name}, {self.documents_per_query} documents a query at most"
        self.source = name
        self.tokeniser = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).to(device).eval()

    def scores(self, queries: Sequence[str], documents: Sequence[str], pairs: Pairs) -> Floats:
        import torch

        found = np.empty(len(pairs), dtype=np.float32)
        for start in range(0, len(pairs), 64):
            part = pairs[start : start + 64]
            texts = [queries[q] for q in part[:, 0]], [documents[d] for d in part[:, 1]]
            tokens = self.tokeniser(
                *texts, padding=True, truncation=True, max_length=JUDGED_TOKENS, return_tensors="pt"
            )
            with torch.inference_mode():
                logits = self.model(**tokens.to(self.model.device)).logits.float()
            score = logits.sigmoid()[:, 0] if logits.size(1) == 1 else logits.softmax(-1)[:, -1]
            found[start : start + len(part)] = score.cpu().numpy()
        return found


def find_judge(name: str, device: str | None = None) -> Judge:
    """`wordllama` (static word vectors), `tfidf`, or a Hugging Face folder or name: cross-encoder or encoder."""
    if name == "tfidf":
        return TfidfJudge()
    if name == "wordllama":
        return EmbeddingJudge("WordLlama cosine", wordllama_embedding(), name)
    source = find_encoder(name)
    architectures = json.loads((source / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    if architectures[0].endswith("ForSequenceClassification"):
        return CrossEncoderJudge(name, str(source), choose_device(device))
    length = min(JUDGED_TOKENS, longest_text(source))
    embed = pretrained_embedding(name, length, choose_device(device))
    return EmbeddingJudge(f"{Path(name).name} cosine", embed, name)


def wordllama_embedding() -> Callable[[Sequence[str]], Floats]:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        import wordllama
    except ImportError:
        raise ConfigError(
            "the judge wordllama needs its package; run: pip install 'auto-search-indexer[report]', or judge with tfidf"
        ) from None
    root.level, root.handlers = before  # its import turns on everybody's log messages
    # The package looks for its own tokeniser in a folder that it does not have; as a cache the right one is found.
    model = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)
    model.tokenizer.enable_truncation(JUDGED_TOKENS)  # it pads to the longest of 64 texts
    return lambda texts: np.asarray(model.embed(list(texts)), dtype=np.float32)
