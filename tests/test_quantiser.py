import math

import faiss
import pytest
import torch

from asi.config import ModelConfig
from asi.model import IndexHeads
from asi.quantiser import fit_quantiser


def spread(n, width, seed=0):
    """Vectors whose components depend on each other, as those of an encoder do, of the length sqrt(width)."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) * torch.linspace(2, 0.05, width)
    vectors = torch.randn(n, width, generator=generator) @ mixing
    return vectors / vectors.norm(dim=1, keepdim=True) * math.sqrt(width)


def error(vectors, rounded):
    return float((vectors - rounded).square().sum(1).mean())


@pytest.mark.parametrize(("m", "width"), [(4, 32), (5, 32)])
def test_codes_are_the_nearest_centres_in_an_orthonormal_space(m, width):
    vectors = spread(300, width)
    quantiser = fit_quantiser(vectors, m, 16, seed=0)
    assert torch.allclose(quantiser.rotation @ quantiser.rotation.T, torch.eye(width), atol=1e-4)
    codes, parts = quantiser.codes(vectors), (vectors @ quantiser.rotation).view(300, m, -1)
    distances = (parts[:, :, None] - quantiser.centres).square().sum(-1)
    assert torch.equal(codes, distances.argmin(-1))
    assert torch.equal(fit_quantiser(vectors, m, 16, seed=0).centres, quantiser.centres)


def test_it_rounds_as_little_away_as_another_implementation():
    vectors = spread(2000, 64)
    quantiser = fit_quantiser(vectors, 8, 16, seed=0)
    rotation, parts = faiss.OPQMatrix(64, 8), faiss.ProductQuantizer(64, 8, 4)
    rotation.pq, rotation.verbose = parts, False
    rotation.train(vectors.numpy())
    rotated = rotation.apply(vectors.numpy())
    parts.train(rotated)
    other = error(torch.from_numpy(rotated), torch.from_numpy(parts.decode(parts.compute_codes(rotated))))
    assert error(vectors, quantiser.rounded(quantiser.codes(vectors))) < 1.03 * other


def test_fewer_vectors_than_centres():
    vectors = spread(3, 8)
    quantiser = fit_quantiser(vectors, 2, 16, seed=0)
    assert error(vectors, quantiser.rounded(quantiser.codes(vectors))) < 1e-6


def test_heads_that_start_from_a_quantiser_give_its_codes_and_rank_by_its_distances():
    heads = IndexHeads(32, ModelConfig(m=4, V=16, head_adapter=8))
    assert heads.untouched
    documents, queries = heads.inner(spread(200, 32)).detach(), heads.inner(spread(20, 32, seed=1)).detach()
    quantiser = fit_quantiser(documents, 4, 16, seed=0)
    heads.start_from(quantiser, temperature=0.05)
    assert not heads.untouched
    codes = quantiser.codes(documents)
    with torch.no_grad():
        given = heads(spread(200, 32)).argmax(-1)
        log_probs = heads(spread(20, 32, seed=1)).log_softmax(-1)  # (20, 4, 16)
    assert torch.equal(given, codes)
    scores = log_probs[:, torch.arange(4), codes].sum(-1)  # (20, 200)
    distances = torch.cdist(queries, quantiser.rounded(codes)).square()
    expected = -distances / 2 / (0.05 * 32)
    assert torch.allclose(scores - scores.mean(1, keepdim=True), expected - expected.mean(1, keepdim=True), atol=1e-3)
