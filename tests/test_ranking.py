import numpy as np
import pytest

from asi.ranking import (
    KnownQueries,
    RankingRows,
    by_text,
    by_text_and_queries,
    calibration,
    pack,
    row_width,
    unit,
    unpack,
)


def test_packed_rows_keep_direction_length_and_bias():
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(20, 384)).astype(np.float32) * draw.uniform(0.1, 9, size=(20, 1)).astype(np.float32)
    bias = draw.normal(size=20).astype(np.float32)
    stored = pack(RankingRows(vectors, bias))
    assert stored.shape == (20, row_width(384))
    rows = unpack(stored)
    assert np.array_equal(rows.bias, bias)
    error = np.abs(rows.vectors - vectors) / np.abs(vectors).max(1, keepdims=True)
    assert error.max() <= 0.5 / 127 + 1e-6
    assert not unpack(pack(by_text(np.zeros((1, 4), np.float32)))).vectors.any()


def test_without_queries_the_score_is_the_cosine():
    rows = by_text(np.array([[3, 4], [0, 2]], np.float32))
    assert rows.vectors @ np.array([1, 0]) == pytest.approx([0.6, 0])
    assert not rows.bias.any()


def test_half_by_text_and_half_by_calibrated_queries():
    draw = np.random.default_rng(1)
    texts, queries = draw.normal(size=(50, 8)).astype(np.float32), draw.normal(size=(90, 8)).astype(np.float32)
    pairs = np.stack([np.arange(90), draw.integers(0, 40, 90)], axis=1)  # the last ten documents have none
    rows = by_text_and_queries(texts, KnownQueries(queries, pairs), 0.5)
    means = unit(np.stack([unit(queries)[pairs[pairs[:, 1] == d, 0]].sum(0) for d in range(50)]))
    has_queries = np.bincount(pairs[:, 1], minlength=50) > 0
    slope, shift = calibration(unit(texts), means, unit(queries), pairs, has_queries, seed=0)
    x = unit(draw.normal(size=(1, 8)).astype(np.float32))[0]
    by_texts, by_queries = unit(texts) @ x, slope * (means @ x) + shift
    expected = np.where(has_queries, 0.5 * by_texts + 0.5 * by_queries, by_texts)
    assert rows.vectors @ x + rows.bias == pytest.approx(expected, abs=1e-5)
    assert np.array_equal(by_text_and_queries(texts, KnownQueries(queries, pairs), 0.0).vectors, by_text(texts).vectors)


def test_calibration_makes_both_similarities_range_alike():
    """Queries that are all alike score high with every mean of queries; after calibration no longer."""
    draw = np.random.default_rng(2)
    common = np.zeros(16, np.float32)
    common[0] = 3
    texts = unit(draw.normal(size=(300, 16)).astype(np.float32))
    queries = unit(draw.normal(size=(300, 16)).astype(np.float32) + common)
    pairs = np.stack([np.arange(300)] * 2, axis=1)
    slope, shift = calibration(texts, queries, queries, pairs, np.ones(300, bool), seed=0)
    others = ~np.eye(300, dtype=bool)
    by_texts, by_queries = (queries @ texts.T)[others], slope * (queries @ queries.T)[others] + shift
    for share in (0.5, 0.9999):
        assert np.quantile(by_queries, share) == pytest.approx(np.quantile(by_texts, share), abs=1e-5)
    assert (queries @ queries.T)[others].mean() > by_texts.mean() + 0.1
