import numpy as np
import pytest

from asi.ranking import (
    KnownQueries,
    RankingRows,
    RowShape,
    by_text,
    by_text_and_queries,
    calibration,
    chosen_share,
    pack,
    unit,
    unpack,
)


def test_packed_rows_keep_everything():
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(20, 384)).astype(np.float32) * draw.uniform(0.1, 9, size=(20, 1)).astype(np.float32)
    bias = draw.normal(size=20).astype(np.float32)
    tokens = draw.integers(-127, 128, size=(20, 96)).astype(np.int8)
    shape = RowShape(384, 96)
    stored = pack(RankingRows(vectors, bias), tokens)
    assert stored.shape == (20, shape.whole)
    assert np.array_equal(stored[:, shape.ranked :], tokens)
    rows = unpack(stored[:, : shape.ranked])
    assert np.array_equal(rows.bias, bias)
    error = np.abs(rows.vectors - vectors) / np.abs(vectors).max(1, keepdims=True)
    assert error.max() <= 0.5 / 127 + 1e-6


def test_without_queries_the_score_is_the_cosine():
    vectors, bias = by_text(np.array([[3, 4], [0, 2]], np.float32))
    assert vectors @ np.array([1, 0]) == pytest.approx([0.6, 0])
    assert not bias.any()


def test_half_by_text_and_half_by_calibrated_queries():
    draw = np.random.default_rng(1)
    texts, queries = draw.normal(size=(50, 8)).astype(np.float32), draw.normal(size=(90, 8)).astype(np.float32)
    pairs = np.stack([np.arange(90), draw.integers(0, 40, 90)], axis=1)  # the last ten documents have none
    vectors, bias = by_text_and_queries(texts, KnownQueries(queries, pairs, None, None), 0.5)
    means = unit(np.stack([unit(queries)[pairs[pairs[:, 1] == d, 0]].sum(0) for d in range(50)]))
    has_queries = np.bincount(pairs[:, 1], minlength=50) > 0
    foreign = has_queries[None, :] & (np.arange(50)[None, :] != pairs[:, 1:])
    asked = unit(queries)[pairs[:, 0]]
    slope, shift = calibration((asked @ unit(texts).T)[foreign], (asked @ means.T)[foreign])
    x = unit(draw.normal(size=(1, 8)).astype(np.float32))[0]
    by_texts, by_queries = unit(texts) @ x, slope * (means @ x) + shift
    expected = np.where(has_queries, 0.5 * by_texts + 0.5 * by_queries, by_texts)
    assert vectors @ x + bias == pytest.approx(expected, abs=1e-5)


def test_calibration_makes_both_similarities_range_alike():
    draw = np.random.default_rng(2)
    with_texts, with_queries = draw.normal(0.1, 0.1, 90_000), draw.normal(0.5, 0.3, 90_000)
    slope, shift = calibration(with_texts, with_queries)
    for share in (0.5, 0.9999):
        brought = slope * np.quantile(with_queries, share) + shift
        assert brought == pytest.approx(np.quantile(with_texts, share), abs=1e-6)


@pytest.mark.parametrize("queries_agree", [True, False])
def test_known_queries_count_only_where_they_foretell_the_next(queries_agree):
    """Documents with texts that say little, and three queries each that say the same, or each something else."""
    draw = np.random.default_rng(3)
    topics = draw.normal(size=(200, 32))
    texts = topics + draw.normal(scale=1.5, size=topics.shape)
    of_document = np.repeat(np.arange(200), 3)
    about = topics[of_document] if queries_agree else texts[of_document] + draw.normal(scale=2.0, size=(600, 32))
    queries = about + draw.normal(scale=0.5, size=(600, 32))
    pairs = np.stack([np.arange(600), of_document], axis=1)
    known = KnownQueries(
        *(part.astype(np.float32) for part in (queries,)), pairs, queries.astype(np.float32), texts.astype(np.float32)
    )
    share = chosen_share(known)
    assert share >= 0.3 if queries_agree else share <= 0.1
    assert chosen_share(known._replace(untrained=None)) == 0
