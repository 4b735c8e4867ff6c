"""Centres of buckets against values worked by hand and a plain loop."""

import numpy as np
import pytest

from asi.centres import LARGEST_PART, centres_of, halved, means_and_bonus
from asi.ranking import RankingRows


def test_a_bucket_scores_as_its_best_document_is_expected_to():
    """Two buckets: (1, 0) and (0, 1), whose mean is (.5, .5) with a spread of sqrt(1 - .5); and (0, 2) alone."""
    vectors = np.array([[1, 0], [0, 1], [0, 2]], np.float32)
    rows = means_and_bonus(RankingRows(vectors, np.array([0.1, 0.3, 0.5], np.float32)), np.array([0, 2]))
    assert rows.vectors.tolist() == [[0.5, 0.5], [0, 2]]
    assert rows.bias == pytest.approx([0.2 + 0.1 * 0.5**0.5 * (2 * np.log(2)) ** 0.5, 0.5])


def test_a_large_bucket_has_a_centre_for_each_half():
    """Eight documents, four at 0 and four at 9, in mixed order; then a bucket of one."""
    vectors = np.array([[0, 0], [9, 0], [0, 0], [9, 0], [9, 0], [0, 0], [9, 0], [0, 0], [3, 3]], np.float32)
    bias = np.arange(9, dtype=np.float32)
    rows, counts = centres_of(RankingRows(vectors, bias), np.array([0, 8]))
    assert counts.tolist() == [2, 1]
    assert rows.vectors[2].tolist() == [3, 3]
    assert rows.bias[2] == 8
    halves = {tuple(rows.vectors[i].tolist()): rows.bias[i] for i in (0, 1)}
    assert halves == {(0, 0): (0 + 2 + 5 + 7) / 4, (9, 0): (1 + 3 + 4 + 6) / 4}


@pytest.mark.parametrize("same", [False, True])
def test_parts_are_small_and_stay_in_their_bucket(same):
    draw = np.random.default_rng(0)
    sizes = np.array([1, 4, 5, 100, 2, 37, 9])
    vectors = draw.normal(size=(sizes.sum(), 6)).astype(np.float32)
    if same:
        vectors[:] = vectors[0]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    bucket = np.repeat(np.arange(len(sizes)), sizes)
    part = halved(vectors, starts)
    for own in np.unique(part):
        assert (part == own).sum() <= LARGEST_PART
        assert len(np.unique(bucket[part == own])) == 1
    rows, counts = centres_of(RankingRows(vectors, np.zeros(len(vectors), np.float32)), starts)
    assert len(rows.vectors) == len(np.unique(part)) == counts.sum()
    assert ((counts > 1) == (sizes > LARGEST_PART)).all()
    if not same:
        means = {own: vectors[part == own].mean(axis=0) for own in np.unique(part)}
        for row, owner in zip(rows.vectors, np.repeat(np.arange(len(sizes)), counts), strict=True):
            own = np.unique(part[bucket == owner])
            assert min(np.abs(means[p] - row).max() for p in own) < 1e-5
