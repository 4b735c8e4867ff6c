import numpy as np
import pytest
import torch

from asi.config import ModelConfig
from asi.encoder import load_encoder, load_tokeniser
from asi.features import JoinedStates, compute_features, encode
from asi.model import Asi

TEXTS = ["red house", "the tree is green", "a black bird that stands in the north", "lamp", "stone in the west"]


def model_and_tokens(encoder_folder, frozen):
    torch.manual_seed(0)
    model = Asi(load_encoder(encoder_folder, frozen), ModelConfig(adapter=8, decoder_width=16)).eval()
    return model, load_tokeniser(encoder_folder, 16)(TEXTS)


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("keep_states", [True, False])
def test_finished_features_equal_the_whole_encoding(encoder_folder, frozen, keep_states):
    model, tokens = model_and_tokens(encoder_folder, frozen)
    features = compute_features(model, tokens, keep_states=keep_states)
    assert (features.pooled is not None) == (frozen == 2)
    assert (features.states is not None) == (keep_states and frozen > 0)
    rows = np.array([2, 0, 4])
    with torch.no_grad():
        got = encode(model, features, rows)
        expected = model.encode(*tokens.padded(rows))
    assert torch.allclose(got.x, expected.x, atol=5e-3)
    if features.pooled is None or features.states is not None:
        assert torch.allclose(got.states[got.mask], expected.states[expected.mask], atol=5e-3)


def test_cache_is_used_for_the_same_texts_and_encoder_only(encoder_folder, tmp_path):
    model, tokens = model_and_tokens(encoder_folder, 2)
    calls = []
    first = compute_features(model, tokens, keep_states=True, cache=tmp_path, progress=lambda *n: calls.append(n))
    again = compute_features(model, tokens, keep_states=True, cache=tmp_path, progress=lambda *n: calls.append("again"))
    assert np.array_equal(first.pooled, again.pooled)
    assert np.array_equal(first.states, again.states)
    assert "again" not in calls
    less = compute_features(model, tokens, keep_states=False, cache=tmp_path, progress=lambda *n: calls.append("again"))
    assert np.array_equal(first.pooled, less.pooled)
    assert less.states is None
    assert "again" not in calls
    with torch.no_grad():
        model.encoder.words.weight += 1
    changed = compute_features(model, tokens, keep_states=True, cache=tmp_path)
    assert not np.array_equal(first.pooled, changed.pooled)


def test_joined_states_are_looked_up_as_one_list():
    parts = [np.arange(6, dtype=np.float16).reshape(3, 2), np.empty((0, 2), np.float16), np.full((4, 2), 9, np.float16)]
    places = np.array([[0, 3], [6, 2], [5, 1]])
    assert np.array_equal(JoinedStates(parts)[places], np.concatenate(parts)[places])


@pytest.mark.parametrize("cached", [True, False])
def test_states_of_some_tokens_are_looked_up_by_their_places_among_all(encoder_folder, tmp_path, cached):
    model, tokens = model_and_tokens(encoder_folder, 2)
    of_tokens = np.arange(len(tokens.ids)) % 3 == 1
    cache = tmp_path if cached else None
    some = compute_features(model, tokens, keep_states=True, of_tokens=of_tokens, cache=cache)
    others = compute_features(model, tokens, keep_states=True, of_tokens=~of_tokens, cache=cache)
    whole = compute_features(model, tokens, keep_states=True)
    for features, named in ((some, of_tokens), (others, ~of_tokens)):
        places = np.flatnonzero(named)[::-1].copy()
        assert np.array_equal(features.states[places], whole.states[places])
        assert len(features.states.states) == named.sum()
        assert np.array_equal(features.pooled, whole.pooled)


def test_all_states_in_the_cache_serve_who_wants_some(encoder_folder, tmp_path):
    model, tokens = model_and_tokens(encoder_folder, 2)
    whole = compute_features(model, tokens, keep_states=True, cache=tmp_path)
    wanted, calls = np.arange(len(tokens.ids)) < 4, []
    some = compute_features(
        model, tokens, keep_states=True, of_tokens=wanted, cache=tmp_path, progress=lambda *n: calls.append(n)
    )
    assert not calls
    assert np.array_equal(some.states[np.arange(4)], whole.states[:4])


def test_pooled_vectors_of_who_kept_some_states_serve_who_wants_none(encoder_folder, tmp_path):
    model, tokens = model_and_tokens(encoder_folder, 2)
    wanted, calls = np.arange(len(tokens.ids)) < 4, []
    some = compute_features(model, tokens, keep_states=True, of_tokens=wanted, cache=tmp_path)
    none = compute_features(model, tokens, keep_states=False, cache=tmp_path, progress=lambda *n: calls.append(n))
    assert not calls
    assert none.states is None
    assert np.array_equal(none.pooled, some.pooled)


def test_what_an_interrupted_process_left_is_not_taken_for_the_whole(encoder_folder, tmp_path):
    model, tokens = model_and_tokens(encoder_folder, 2)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute_features(model, tokens, keep_states=True, cache=tmp_path, progress=stop)
    calls = []
    features = compute_features(model, tokens, keep_states=True, cache=tmp_path, progress=lambda *n: calls.append(n))
    assert calls
    assert np.array_equal(features.pooled, compute_features(model, tokens, keep_states=False).pooled)
