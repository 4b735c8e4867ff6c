import json

import numpy as np
import pytest
import torch

from asi.encoder import TokenisedTexts, find_encoder, load_encoder, load_tokeniser
from asi.errors import CheckpointError, ConfigError

SIZES = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
PADDING = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def reference(kind):
    """A small random model of the reference implementation."""
    import transformers as hf

    models = {
        "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES, max_position_embeddings=20)),
        "electra": lambda: hf.ElectraModel(hf.ElectraConfig(**SIZES, embedding_size=16, max_position_embeddings=20)),
        "roberta": lambda: hf.RobertaModel(
            hf.RobertaConfig(**SIZES, max_position_embeddings=22, type_vocab_size=1, **PADDING)
        ),
        "distilbert": lambda: hf.DistilBertModel(
            hf.DistilBertConfig(vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=20)
        ),
        "t5": lambda: hf.T5EncoderModel(t5_config(hf, "relu")),
        "t5-gated": lambda: hf.T5EncoderModel(t5_config(hf, "gated-gelu")),
    }
    torch.manual_seed(0)
    model = models[kind]().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def t5_config(hf, feed_forward):
    return hf.T5Config(
        vocab_size=50, d_model=32, num_layers=2, num_heads=4, d_kv=6, d_ff=48, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, feed_forward_proj=feed_forward,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["bert", "electra", "roberta", "distilbert", "t5", "t5-gated"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_equals_the_reference_implementation(kind, frozen, tmp_path):
    model = reference(kind)
    model.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, frozen)
    ids = torch.randint(3, 50, (3, 9))
    mask = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    ids = ids.masked_fill(~mask, 1)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        got = encoder.upper(encoder.lower(ids, mask), mask)
    assert torch.allclose(got[mask], expected[mask], atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "electra", "t5-gated"])
def test_rounded_products_change_little_and_depend_on_the_text_alone(kind, tmp_path):
    reference(kind).save_pretrained(tmp_path)
    exact, rounded = load_encoder(tmp_path, 2), load_encoder(tmp_path, 2, "bfloat16")
    ids, mask = torch.randint(3, 50, (16, 8)), torch.ones(16, 8, dtype=torch.bool)
    with torch.inference_mode():
        expected, got = exact(ids, mask), rounded(ids, mask)
        alone = torch.cat([rounded(ids[i : i + 1], mask[i : i + 1]) for i in range(16)])
    assert got.dtype == torch.float32
    assert not torch.equal(got, expected)
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.995
    assert torch.equal(alone, got)


def test_frozen_layers_have_no_gradient(encoder_folder):
    encoder = load_encoder(encoder_folder, 1)
    trained = {name.split(".")[0] + name.split(".")[1] for name, p in encoder.named_parameters() if p.requires_grad}
    assert trained == {"layers1"}
    assert not encoder.is_frozen
    assert load_encoder(encoder_folder, 99).is_frozen
    assert load_encoder(encoder_folder, None).is_frozen


def test_the_default_encoder_comes_with_its_package_and_its_checksum_is_verified(monkeypatch):
    from asi import encoder

    folder = find_encoder("all-MiniLM-L6-v2")
    assert (folder / "model.safetensors").is_file()
    monkeypatch.setitem(encoder.PACKAGED, "all-MiniLM-L6-v2", encoder.PACKAGED["all-MiniLM-L6-v2"]._replace(sha256="0"))
    with pytest.raises(CheckpointError, match="is damaged: its checksum is"):
        find_encoder("all-MiniLM-L6-v2")


def test_a_text_is_padded_to_its_own_length_in_any_batch(encoder_folder):
    tokens = load_tokeniser(encoder_folder, 16)(["red", "the red house stands in the north", "a " * 40])
    assert tokens.lengths.tolist() == [3, 9, 16]
    assert tokens.padded_lengths.tolist() == [4, 12, 16]
    ids, mask = tokens.padded(np.array([1, 2]))
    assert ids.shape == mask.shape == (2, 16)
    assert mask.sum(1).tolist() == [9, 16]
    assert [rows.tolist() for rows in tokens.batches(32)] == [[0], [1], [2]]


def test_empty_list_of_texts(encoder_folder):
    tokens = load_tokeniser(encoder_folder, 16)([])
    assert isinstance(tokens, TokenisedTexts)
    assert len(tokens) == 0
    assert tokens.batches(32) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "holds a model of type 'gpt2'; encoders can be bert, "),
        ({"hidden_act": "relu"}, "uses the activation 'relu'"),
        ({"hidden_size": 64}, "does not fit its config.json"),
    ],
)
def test_unfit_folders_are_refused(change, message, encoder_folder, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((encoder_folder / name).read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load_encoder(tmp_path, 0)


def test_texts_longer_than_the_encoder_reads_are_refused(encoder_folder):
    with pytest.raises(ConfigError, match="reads at most 64 tokens"):
        load_tokeniser(encoder_folder, 65)


def test_an_unknown_name_is_one_clear_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no local folder"):
        find_encoder("nobody/no-such-encoder-anywhere")
    with pytest.raises(ConfigError, match="neither a folder nor a name"):
        find_encoder("not a name at all/x/y")
