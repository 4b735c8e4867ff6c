"""What a document is ranked by: a row of D + 8 bytes in the store.

A row is a vector of one byte per component, the vector's scale and a bias. The score for a query is
scale * <vector, x> + bias, where x is the query's vector at unit length. For a document of which only the text is known
that is the cosine of the two. A document with training queries is ranked by these too: half by the cosine with its
text, half by the cosine with the mean of its queries. A query resembles other queries more than it resembles documents,
so the second half is brought to the range of the first: otherwise new documents would stand behind all others.
Letters: N documents, M queries, D width.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

EXTRA_BYTES = 8  # scale and bias, 32 bits each
CALIBRATION_QUERIES = 1000
MIDDLE, HIGH = 0.5, 0.9999  # the quantiles of the similarities that are made equal: only the highest decide a ranking


class RankingRows(NamedTuple):
    vectors: Floats  # (n, D)
    bias: Floats  # (n,)


def row_width(D: int) -> int:
    return D + EXTRA_BYTES


def pack(rows: RankingRows) -> NDArray[np.int8]:
    """Rows as bytes (n, D + 8); each vector's largest component becomes 127."""
    largest = np.abs(rows.vectors).max(axis=1, keepdims=True)
    scale = np.maximum(largest, 1e-9) / np.float32(127)
    extra = np.concatenate([scale, rows.bias[:, None]], axis=1).astype(np.float32)
    return np.concatenate([np.rint(rows.vectors / scale).astype(np.int8), extra.view(np.int8)], axis=1)


def unpack(stored: NDArray[np.int8]) -> RankingRows:
    extra = np.ascontiguousarray(stored[:, -EXTRA_BYTES:]).view(np.float32)  # (n, 2)
    return RankingRows(stored[:, :-EXTRA_BYTES].astype(np.float32) * extra[:, :1], extra[:, 1])


def unit(vectors: Floats) -> Floats:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-9))


def by_text(vectors: Floats) -> RankingRows:
    """Rows of documents of which only the text is known."""
    return RankingRows(unit(vectors), np.zeros(len(vectors), dtype=np.float32))


class KnownQueries(NamedTuple):
    """Queries that are known to be answered by documents."""

    vectors: Floats  # (M, D)
    pairs: NDArray[np.int64]  # (n, 2): query row, document row


def by_text_and_queries(vectors: Floats, known: KnownQueries, weight: float, seed: int = 0) -> RankingRows:
    """Rows of all documents of a corpus; `weight` is the share of the known queries, for documents that have any."""
    texts, queries = unit(vectors), unit(known.vectors)
    sums = np.zeros_like(texts)
    np.add.at(sums, known.pairs[:, 1], queries[known.pairs[:, 0]])
    has_queries = np.bincount(known.pairs[:, 1], minlength=len(texts)) > 0
    if not weight or not has_queries.any():
        return by_text(vectors)
    means = unit(sums)
    slope, shift = calibration(texts, means, queries, known.pairs, has_queries, seed)
    blended = (1 - weight) * texts + weight * slope * means
    bias = np.where(has_queries, weight * shift, 0)
    return RankingRows(np.where(has_queries[:, None], blended, texts).astype(np.float32), bias.astype(np.float32))


def calibration(
    texts: Floats,
    means: Floats,
    queries: Floats,
    pairs: NDArray[np.int64],
    has_queries: NDArray[np.bool_],
    seed: int,
) -> tuple[float, float]:
    """Slope and shift that bring similarities with queries' means to the range of those with texts.

    Measured on training queries and documents that are not theirs.
    """
    draw = np.random.default_rng(seed)
    sample = pairs[draw.choice(len(pairs), min(CALIBRATION_QUERIES, len(pairs)), replace=False)]
    others = ~(np.flatnonzero(has_queries)[None, :] == sample[:, 1:])  # (sample, documents with queries)
    if not others.any():
        return 1.0, 0.0
    asked = queries[sample[:, 0]]
    low_text, high_text = np.quantile((asked @ texts[has_queries].T)[others], [MIDDLE, HIGH])
    low_query, high_query = np.quantile((asked @ means[has_queries].T)[others], [MIDDLE, HIGH])
    slope = (high_text - low_text) / max(high_query - low_query, 1e-6)
    return float(slope), float(low_text - slope * low_query)
