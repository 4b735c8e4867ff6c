import numpy as np
import pytest
import torch

from asi.code_vectors import RIDGE, fit_code_vectors
from asi.ranking import RankingRows


def test_a_docid_is_worth_what_its_documents_are_where_codes_add_up():
    """Documents that lie at the sum of what their two codes stand for, each docid a thousand times."""
    first, second = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.5, 0.5], [0.0, -1.0]])
    codes = np.tile([[0, 0], [0, 1], [1, 0], [1, 1]], (1000, 1)).astype(np.uint16)
    vectors = (first[codes[:, 0]] + second[codes[:, 1]]).astype(np.float32)
    bias = (codes @ [0.25, 0.5]).astype(np.float32)
    found = fit_code_vectors(codes, RankingRows(vectors, bias), V=3)  # the third code is nobody's
    scores = found.scores(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))  # (2, 2, 3)
    by_docid = (scores[:, 0, :2, None] + scores[:, 1, None, :2]).tolist()
    assert by_docid[0] == pytest.approx(np.array([[0.5, -0.5], [1.75, 0.75]]), abs=2e-3)
    assert by_docid[1] == pytest.approx(np.array([[1.5, 1.5], [0.75, 0.75]]), abs=2e-3)
    assert scores[:, :, 2].tolist() == [[0, 0], [0, 0]]


def test_equals_least_squares_with_a_ridge():
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 5, (40, 3)).astype(np.uint8)
    rows = RankingRows(
        generator.standard_normal((40, 6)).astype(np.float32), generator.standard_normal(40).astype(np.float32)
    )
    found = fit_code_vectors(codes, rows, V=5)
    has_code = np.zeros((40, 3, 5))
    for document, own in enumerate(codes):
        has_code[document, range(3), own] = 1
    drawn_to_0 = np.sqrt(RIDGE) * np.eye(15)
    for vectors, wanted in ((found.vectors.flatten(0, 1), rows.vectors), (found.biases.flatten()[:, None], rows.bias)):
        target = np.concatenate([wanted.reshape(40, -1), np.zeros((15, vectors.size(1)))])
        expected, *_ = np.linalg.lstsq(np.concatenate([has_code.reshape(40, 15), drawn_to_0]), target)
        assert vectors.numpy() == pytest.approx(expected, abs=1e-4)
