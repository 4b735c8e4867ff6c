from math import log

import pytest

from asi.errors import DataError
from asi.records import Document, Hit
from asi.systems.lexical import LexicalRetriever, words

DOCUMENTS = [
    Document("d0", "An abnormally fast heart rate.", title="Tachycardia"),
    Document("d1", "The heart, the heart: a long and winding text in which the word heart is not rare at all."),
    Document("d2", "", title="Heart rate"),
    Document("d3", "heart rate"),  # the same words as d2
    Document("d4", "Größe und Maße"),
    Document("d5", ""),
    Document("d6", "..."),
    Document("d7", "a slow rate; bradycardia"),
]


def bm25(documents, query, k1, b):
    """Lucene's BM25, word for word: key -> score of the documents with a word of the query."""
    texts = {document.key: words(document.content) for document in documents}
    mean_length = sum(map(len, texts.values())) / len(texts)
    scores = dict.fromkeys(texts, 0.0)
    for word in words(query):
        df = sum(word in text for text in texts.values())
        idf = log(1 + (len(texts) - df + 0.5) / (df + 0.5))
        for key, text in texts.items():
            tf = text.count(word)
            scores[key] += idf * tf / (tf + k1 * (1 - b + b * len(text) / mean_length))
    return {key: score for key, score in scores.items() if score > 0}


QUERIES = ["heart rate", "HEART heart rate", "fast and slow", "größe", "the unheard of word", "rate"]


@pytest.mark.parametrize("settings", [{}, {"k1": 0.9, "b": 0.4}])
@pytest.mark.parametrize("k", [1, 2, 3, 100])
def test_scores_and_ranking_are_the_formula(settings, k):
    found = LexicalRetriever(iter(DOCUMENTS), **settings).search(QUERIES, k)
    for query, hits in zip(QUERIES, found, strict=True):
        scores = bm25(DOCUMENTS, query, **{"k1": 1.5, "b": 0.75} | settings)
        ranking = sorted(scores, key=lambda key: -round(scores[key], 6))[:k]  # ties in corpus order
        assert hits == [Hit(key, pytest.approx(scores[key], abs=1e-5), docid=None) for key in ranking]


def test_a_query_without_a_known_word_has_no_hits():
    assert LexicalRetriever(DOCUMENTS).search(["unheard of", "", "...", "bradycardia"], k=5)[:3] == [[], [], []]


def test_no_progress_is_shown(capfd):
    LexicalRetriever(DOCUMENTS).search(QUERIES, k=3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("documents", [[], [Document("x", "...")]])
def test_documents_without_words_are_refused(documents):
    with pytest.raises(DataError, match="has a word in it"):
        LexicalRetriever(documents)
