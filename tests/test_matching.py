from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asi import losses
from asi.config import ModelConfig
from asi.encoder import TokenisedTexts
from asi.matching import BYTE, kept_tokens, match, matched_tokens, rarity_of
from asi.model import TokenMatcher

TEXTS = [[1, 5, 6, 2], [1, 5, 5, 7, 8, 2], [1, 2]]  # 1 and 2 begin and end every text


@pytest.fixture
def tokens():
    flat = np.array([token for text in TEXTS for token in text], np.int32)
    return TokenisedTexts(flat, np.append(0, np.cumsum([len(text) for text in TEXTS])), pad=0)


def test_rarity_counts_documents_not_tokens(tokens):
    rarity = rarity_of(tokens, vocabulary=10)
    assert rarity[[1, 2]].tolist() == [0, 0]  # in all three
    assert rarity[5] == pytest.approx(np.log(4 / 3))  # in two, though three times
    assert rarity[6] == rarity[8] == pytest.approx(np.log(4 / 2))
    assert rarity[9] == pytest.approx(np.log(4))  # in none


def test_the_rarest_tokens_are_kept_and_the_first_among_equals(tokens):
    rarity = rarity_of(tokens, vocabulary=10)
    kept = kept_tokens(tokens, np.array([1, 0, 2]), rarity, 3)
    assert kept.places.tolist() == [[3, 4, 1], [2, 1, 0], [0, 1, 0]]  # 7 8 5; 6 5 1; 1 2 and nothing
    assert (kept.rarity > 0).tolist() == [[True] * 3, [True] * 3, [True, True, False]]
    alone = kept_tokens(tokens, np.array([1]), rarity, 9)  # what a text keeps does not depend on its neighbours
    assert alone.places[0, :3].tolist() == [3, 4, 1]
    assert (alone.rarity > 0).sum() == 6


def test_matched_are_the_tokens_that_documents_keep(tokens):
    def model(frozen):
        matcher = SimpleNamespace(known_rarity=rarity_of(tokens, vocabulary=10), kept=3)
        return SimpleNamespace(matcher=matcher, encoder=SimpleNamespace(is_frozen=frozen))

    # As above, each text's places from where it begins: 0, 4 and 10.
    assert np.flatnonzero(matched_tokens(model(True), tokens)).tolist() == [0, 1, 2, 5, 7, 8, 10, 11]
    assert matched_tokens(model(False), tokens) is None


def test_match_equals_brute_force():
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(4, 3, 8, generator=draw)
    documents = torch.nn.functional.normalize(torch.randn(5, 6, 8, generator=draw), dim=-1)
    expected = [
        [sum(max(float(asked @ token) for token in document) for asked in query) for document in documents]
        for query in queries
    ]
    found = losses.token_match(queries, documents.expand(4, -1, -1, -1))
    assert found.tolist() == pytest.approx(np.array(expected), abs=1e-5)
    stored = (documents * BYTE).round().to(torch.int8).flatten(1).numpy()
    assert match(queries[0], stored, kept=6) == pytest.approx(expected[0], abs=0.05)
    assert match(queries[0], stored[:0], kept=6).shape == (0,)  # a beam that found no docid has no candidates


def test_a_query_token_counts_by_its_rarity_and_its_state():
    matcher = TokenMatcher(16, 20, ModelConfig(token_width=4))
    rarity = torch.tensor([[3.0, 1.0, 0.0], [2.0, 2.0, 4.0]])  # the first query has two tokens
    states = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2], [1, 0, 0]]), 16).float() * 7
    assert matcher.shares(states, rarity).flatten().tolist() == pytest.approx([0.75, 0.25, 0, 0.25, 0.25, 0.5])
    with torch.no_grad():
        matcher.importance[1] = np.log(3)  # tokens with this state count three times as much
    assert matcher.shares(states, rarity).flatten().tolist() == pytest.approx([0.5, 0.5, 0, 0.5, 1 / 6, 1 / 3])
    matcher.shares(states, rarity)[0, 1].backward()
    assert matcher.importance.grad is not None
    assert matcher.importance.grad[1] > 0 > matcher.importance.grad[0]  # more for itself is less for the others
    assert not matcher.importance.grad[2:].any()


def test_tokens_are_trained_against_the_nearest_negatives():
    draw = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(2, 3, 8, generator=draw), torch.randn(5, 6, 8, generator=draw)
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.7, 0.95], [0.2, 0.3, 0.9, 0.4, 0.1]])
    negatives = torch.tensor([[False, False, True, True, True], [False, False, False, True, False]])
    opponents = losses.nearest_negatives(scores, torch.tensor([0, 2]), negatives, 2)
    assert opponents.rows[0].tolist() == [0, 4, 3]  # its own, then the most similar; 1 is known to answer it too
    assert opponents.rows[1, :2].tolist() == [2, 3]
    assert opponents.allowed.tolist() == [[True, True, True], [True, True, False]]
    matches = losses.token_match(queries, documents.expand(2, -1, -1, -1)) / 0.5
    expected = -matches[0, [0, 4, 3]].log_softmax(0)[0] - matches[1, [2, 3]].log_softmax(0)[0]
    found = losses.token_softmax(queries, documents, opponents, temperature=0.5)
    assert float(found) == pytest.approx(float(expected) / 2, rel=1e-5)


def test_a_tiny_corpus_has_fewer_directions_than_the_matcher_has_numbers():
    matcher = TokenMatcher(8, 20, ModelConfig(token_width=6))
    before = matcher.projection.weight.detach().clone()
    matcher.set_directions(torch.eye(8)[:4])
    assert torch.equal(matcher.projection.weight[:4], torch.eye(8)[:4])
    assert torch.equal(matcher.projection.weight[4:], before[4:])
