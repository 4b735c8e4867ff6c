import pytest
import torch
import torch.nn.functional as F

from asi.beam import beam_search
from asi.config import ModelConfig
from asi.encoder import load_encoder
from asi.model import Asi


def tiny(encoder_folder, **settings):
    torch.manual_seed(1)
    config = ModelConfig(**({"m": 3, "V": 5, "decoder_width": 16, "decoder_layers": 2, "adapter": 8} | settings))
    model = Asi(load_encoder(encoder_folder, 2), config).eval()
    for parameter in model.decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def encoded(model):
    ids = torch.randint(4, 20, (3, 8))
    return model.encode(ids, torch.arange(8) < torch.tensor([8, 5, 3])[:, None])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("prior", [False, True])
def test_cached_generation_equals_the_whole_sequence(encoder_folder, shared, prior):
    model = tiny(encoder_folder, shared_tokens=shared, head_prior=prior)
    with torch.no_grad():
        query = encoded(model)
        logits = model.heads(query.x)
        found = beam_search(model.generation(query, logits), 3, beams=30)
        for place in (0, 7, 29):
            docid = F.one_hot(found.codes[:, place], 5).float()
            whole = (model.decoder(query, docid, logits) * docid).sum((1, 2))
            assert torch.allclose(whole, found.scores[:, place], atol=1e-4)


def test_probabilities_of_all_docids_sum_to_one(encoder_folder):
    model = tiny(encoder_folder)
    with torch.no_grad():
        query = encoded(model)
        found = beam_search(model.generation(query, model.heads(query.x)), 3, beams=5**3)
    assert torch.allclose(found.scores.exp().sum(1), torch.ones(3), atol=1e-4)


def test_unique_and_share_differ_in_their_tables(encoder_folder):
    unique, share = (tiny(encoder_folder, shared_tokens=flag).decoder for flag in (False, True))
    assert unique.embeddings.shape == unique.outputs.shape == (3, 5, 16)
    assert share.embeddings.shape == share.outputs.shape == (1, 5, 16)


@pytest.mark.parametrize(("m", "V"), [(1, 2), (8, 2), (1, 65_536), (2, 4096)])
def test_extreme_docid_shapes(encoder_folder, m, V):
    model = tiny(encoder_folder, m=m, V=V)
    with torch.no_grad():
        query = encoded(model)
        logits = model.heads(query.x)
        assert logits.shape == (3, m, V)
        found = beam_search(model.generation(query, logits), m, beams=4)
    assert found.codes.shape == (3, min(4, V**m), m)
    assert int(found.codes.max()) < V


def test_the_adapter_starts_as_the_identity(encoder_folder):
    model = tiny(encoder_folder)
    pooled = torch.randn(4, 32)
    assert torch.allclose(F.normalize(model.adapt(pooled), dim=-1), F.normalize(pooled, dim=-1), atol=1e-6)


def test_pooling_ignores_padding(encoder_folder):
    mean, cls = (tiny(encoder_folder, pooling=name) for name in ("mean", "cls"))
    states = torch.arange(24.0).view(1, 4, 6)
    mask = torch.tensor([[True, True, False, False]])
    assert mean.pool(states, mask).tolist() == states[:, :2].mean(1).tolist()
    assert cls.pool(states, mask).tolist() == states[:, 0].tolist()
