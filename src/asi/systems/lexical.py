"""BM25: Lucene's formula with k1 = 1.5 and b = 0.75, over plain lower-case words; alone, with pseudo queries
(DocT5Query), and as a source of hard negatives."""

from collections.abc import Iterable, Sequence

import bm25s
import numpy as np
from numpy.typing import NDArray

from asi.errors import DataError
from asi.expansion import with_queries
from asi.folders import locked
from asi.records import Document, Hit
from asi.systems.workplace import Built, Training, Workplace
from asi.texts import words


class LexicalRetriever:
    """Ranks documents by BM25, equal scores in corpus order; a document without a word of the query is no hit."""

    def __init__(self, documents: Iterable[Document], *, k1: float = 1.5, b: float = 0.75) -> None:
        self._keys: list[str] = []
        self._numbers: dict[str, int] = {}  # of the words
        corpus = []  # per document, its words' numbers
        for document in documents:
            self._keys.append(document.key)
            corpus.append([self._numbers.setdefault(word, len(self._numbers)) for word in words(document.content)])
        if not self._numbers:
            raise DataError(f"none of the {len(corpus)} documents has a word in it; BM25 needs at least one")
        # Lucene's idf is above zero for every word, so a score of zero means that no word is shared.
        self._bm25 = bm25s.BM25(method="lucene", k1=k1, b=b)
        self._bm25.index((corpus, self._numbers), create_empty_token=False, show_progress=False)

    @property
    def bytes(self) -> int:
        """Of the postings: a document and a score each."""
        return int(sum(part.nbytes for part in self._bm25.scores.values() if isinstance(part, np.ndarray)))

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [self._search_one(query, k) for query in queries]

    def _search_one(self, query: str, k: int) -> list[Hit]:
        known = [self._numbers[word] for word in words(query) if word in self._numbers]
        if not known:
            return []
        scores = self._bm25.get_scores_from_ids(known)  # (N,)
        candidates = np.flatnonzero(scores)
        if len(candidates) > k:  # only those that can be among the best k are sorted
            least = np.partition(scores[candidates], -k)[-k]
            candidates = candidates[scores[candidates] >= least]
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
        return [Hit(self._keys[number], float(scores[number])) for number in best]


def build_bm25(workplace: Workplace, *, expanded: bool) -> Built:
    """BM25 over the documents, or over the documents and their pseudo queries (DocT5Query)."""
    documents = workplace.texts.documents
    parameters, training = workplace.generator_cost if expanded else (0, Training())
    if expanded:
        documents = with_queries(documents, dict(zip(workplace.keys, workplace.pseudo_queries, strict=True)))
    retriever = LexicalRetriever(documents)
    return Built(retriever, parameters, training, retriever.bytes / len(documents))


def bm25_negatives(workplace: Workplace, texts: Sequence[str], pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every text the best known document by BM25 that `pairs` (text, document) do not name as its answer; a random
    one if there is none."""
    file = workplace.cache / f"bm25-negatives-{len(texts)}.npy"  # the comparison's data do not change
    with locked(workplace.cache / "negatives.lock", workplace.leave_if_stopping):
        if not file.exists():
            beside = file.with_suffix(".part.npy")
            np.save(beside, best_wrong_documents(workplace, texts, pairs))
            beside.replace(file)
    found: NDArray[np.int64] = np.load(file)
    return found


def best_wrong_documents(workplace: Workplace, texts: Sequence[str], pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    rows = {key: row for row, key in enumerate(workplace.keys)}
    lexical = LexicalRetriever([workplace.texts.documents[row] for row in workplace.known])
    answers: dict[int, set[int]] = {}
    for text, document in pairs.tolist():
        answers.setdefault(text, set()).add(document)
    draw = np.random.default_rng(workplace.terms.seed)
    negatives = draw.choice(workplace.known, size=len(texts))
    workplace.reporter.stage("looking for hard negatives", len(texts))
    for i, text in enumerate(texts):
        right = answers.get(i, set())
        [hits] = lexical.search([text], len(right) + 3)
        best = next((rows[hit.key] for hit in hits if rows[hit.key] not in right), None)
        negatives[i] = negatives[i] if best is None else best
        if i % 1000 == 0:
            workplace.advance(i)
    return negatives
