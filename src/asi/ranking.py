"""What a document is ranked by: a row of bytes in the store.

A row holds a vector of one byte per component, its scale and a bias. A query with the unit vector x gives the document
the score scale * <vector, x> + bias: the cosine, if only the document's text is known. Behind them stand the vectors of
the document's tokens (see `matching`), if the model has any.

A document with training queries is ranked by these too: partly by the cosine with its text, partly by the cosine with
the mean of its queries. A query resembles other queries more than it resembles documents, so the second part is brought
to the range of the first: otherwise new documents would stand behind all others. How large a part depends on the data
(synonyms of one term say the same, sentences of one text do not) and is chosen by leaving training queries out.
Letters: N documents, M queries, D width.
"""

from typing import NamedTuple

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Pairs = NDArray[np.int64]  # (n, 2): query row, document row

SCALE_AND_BIAS = 8  # bytes: 32 bits each
SAMPLED_QUERIES = 1000
SIMILARITIES_AT_ONCE = 2**26
MIDDLE, HIGH = 0.5, 0.9999  # the quantiles of the similarities that are made equal: only the highest decide a ranking
KNOWN_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
TOP = 10


class RankingRows(NamedTuple):
    vectors: Floats  # (n, D)
    bias: Floats  # (n,)


class RowShape(NamedTuple):
    """Where the parts of a row are."""

    vector: int  # D
    tokens: int  # bytes of the token vectors

    @property
    def ranked(self) -> int:
        """The part that is read for every candidate."""
        return self.vector + SCALE_AND_BIAS

    @property
    def whole(self) -> int:
        return self.ranked + self.tokens


def pack(rows: RankingRows, tokens: NDArray[np.int8]) -> NDArray[np.int8]:
    """Rows as bytes; each vector's largest component becomes 127. `tokens` (n, bytes) go behind them."""
    largest = np.abs(rows.vectors).max(axis=1, keepdims=True)
    scale = np.maximum(largest, 1e-9) / np.float32(127)
    extra = np.concatenate([scale, rows.bias[:, None]], axis=1).astype(np.float32)
    return np.concatenate([np.rint(rows.vectors / scale).astype(np.int8), extra.view(np.int8), tokens], axis=1)


def unpack(stored: NDArray[np.int8]) -> RankingRows:
    """Vectors and biases of rows without their tokens."""
    extra = np.ascontiguousarray(stored[:, -SCALE_AND_BIAS:]).view(np.float32)  # (n, 2)
    return RankingRows(stored[:, :-SCALE_AND_BIAS].astype(np.float32) * extra[:, :1], extra[:, 1])


def unit(vectors: Floats) -> Floats:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-9))


class KnownQueries(NamedTuple):
    """The training queries of a corpus: vectors to rank by, and vectors from before training to choose with."""

    vectors: Floats  # (M, D)
    pairs: Pairs
    untrained: Floats | None  # (M, D)
    untrained_documents: Floats | None  # (N, D)


def by_text(vectors: Floats) -> RankingRows:
    """Rows of documents of which only the text is known."""
    return RankingRows(unit(vectors), np.zeros(len(vectors), dtype=np.float32))


def by_text_and_queries(vectors: Floats, known: KnownQueries, share: float) -> RankingRows:
    """Rows of all documents of a corpus; `share` is that of the queries, for documents that have any."""
    if not share:
        return by_text(vectors)
    texts, queries = unit(vectors), unit(known.vectors)
    sums, counts = sums_of_queries(queries, known.pairs, len(texts))
    means, has_queries = unit(sums), counts > 0
    sample = sampled(known.pairs, len(texts))
    asked = queries[sample[:, 0]]
    others = has_queries & ~answers_of(sample[:, 0], known.pairs, len(texts))
    slope, shift = calibration((asked @ texts.T)[others], (asked @ means.T)[others])
    blended = np.where(has_queries[:, None], (1 - share) * texts + share * slope * means, texts)
    bias = np.where(has_queries, share * shift, 0)
    return RankingRows(blended.astype(np.float32), bias.astype(np.float32))


def sums_of_queries(queries: Floats, pairs: Pairs, documents: int) -> tuple[Floats, NDArray[np.int64]]:
    """The sum of the vectors of each document's queries (N, D), and how many it has (N,)."""
    sums = np.zeros((documents, queries.shape[1]), dtype=np.float32)
    np.add.at(sums, pairs[:, 1], queries[pairs[:, 0]])
    return sums, np.bincount(pairs[:, 1], minlength=documents)


def answers_of(queries: NDArray[np.int64], pairs: Pairs, documents: int) -> NDArray[np.bool_]:
    """Whether each document is known to answer each of these queries: (n, N)."""
    ones = np.ones(len(pairs), dtype=bool)
    known = scipy.sparse.csr_matrix((ones, (pairs[:, 0], pairs[:, 1])), shape=(pairs[:, 0].max() + 1, documents))
    found: NDArray[np.bool_] = known[queries].toarray()
    return found


def sampled(pairs: Pairs, documents: int, seed: int = 0) -> Pairs:
    """Some of the pairs: as many queries as can be compared with all documents at once."""
    most = max(50, min(SAMPLED_QUERIES, SIMILARITIES_AT_ONCE // documents))
    return pairs[np.sort(np.random.default_rng(seed).choice(len(pairs), min(most, len(pairs)), replace=False))]


def calibration(with_texts: Floats, with_queries: Floats) -> tuple[float, float]:
    """Slope and shift that bring the second similarities to the range of the first."""
    if not len(with_texts):
        return 1.0, 0.0
    low, high = np.quantile(with_texts, [MIDDLE, HIGH])
    low_query, high_query = np.quantile(with_queries, [MIDDLE, HIGH])
    slope = (high - low) / max(high_query - low_query, 1e-6)
    return float(slope), float(low - slope * low_query)


def chosen_share(known: KnownQueries) -> float:
    """The share of known queries that finds left-out training queries best, of documents that have others.

    With vectors from before training, which know neither; and only a share that helps documents without any as well.
    """
    if known.untrained is None or known.untrained_documents is None:
        return 0.0
    texts, queries = unit(known.untrained_documents), unit(known.untrained)
    sums, counts = sums_of_queries(queries, known.pairs, len(texts))
    several = known.pairs[counts[known.pairs[:, 1]] > 1]
    if not len(several):
        return 0.0
    sample = sampled(several, len(texts))
    rows, own, asked = np.arange(len(sample)), sample[:, 1], queries[sample[:, 0]]
    with_texts, with_queries = asked @ texts.T, asked @ unit(sums).T
    with_queries[rows, own] = np.einsum("nd,nd->n", unit(sums[own] - asked), asked)  # by the other queries
    answers = answers_of(sample[:, 0], known.pairs, len(texts))
    others = (counts > 0) & ~answers
    answers[rows, own] = False  # the sampled query's other answers are no errors
    slope, shift = calibration(with_texts[others], with_queries[others])
    quality: dict[float, tuple[float, float]] = {}
    for share in KNOWN_SHARES:
        scores = np.where(counts > 0, (1 - share) * with_texts + share * (slope * with_queries + shift), with_texts)
        scores[answers] = -np.inf
        as_known = reciprocal_rank(scores, scores[rows, own])
        scores[rows, own] = with_texts[rows, own]
        quality[share] = as_known, reciprocal_rank(scores, scores[rows, own])
    harmless = [share for share in KNOWN_SHARES if quality[share][1] >= quality[0.0][1]]
    return max(harmless, key=lambda share: quality[share][0])


def reciprocal_rank(scores: Floats, own: Floats) -> float:
    """MRR@10 of documents with the scores `own` (n,) among all documents' `scores` (n, N)."""
    rank = 1 + (scores > own[:, None]).sum(axis=1)
    return float(np.mean(np.where(rank <= TOP, 1 / rank, 0)))
