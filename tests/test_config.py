import pytest

from asi.config import (
    PRESETS,
    VARIANTS,
    Config,
    ModelConfig,
    TrainConfig,
    from_dict,
    load_config,
    preset,
    to_dict,
    to_toml,
    with_overrides,
)  # fmt: skip
from asi.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_toml_round_trip(name, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(PRESETS[name]))
    assert load_config(path, Config()) == PRESETS[name]
    assert from_dict(to_dict(PRESETS[name])) == PRESETS[name]


def test_the_control_with_random_docids_is_searched_as_the_default_is():
    assert with_overrides(Config(), VARIANTS["random-docids"]).search == Config().search


def test_paper_preset_is_the_papers():
    paper = preset("paper")
    assert (paper.model.m, paper.model.V, paper.model.max_length, paper.model.pooling) == (4, 256, 64, "cls")
    assert (paper.model.decoder_layers, paper.model.encoder) == (6, "gaunernst/bert-L6-H768-uncased")
    assert (paper.loss.margin, paper.loss.contrastive, paper.loss.reverse) == (3.0, 0.2, 0.2)
    assert (paper.loss.vector, paper.loss.match, paper.loss.balance) == (0.0, 0.0, 0.0)
    assert (paper.train.batch, paper.train.lr) == (4096, 1e-4)
    assert (paper.search.mode, paper.search.beams) == ("beam", 10)
    assert paper.model.frozen_layers == paper.model.adapter == 0
    assert not paper.model.head_prior


def test_overrides_apply_in_order_and_keep_types():
    config = with_overrides(
        Config(), ["train.lr=3e-4", "model.m=2", "model.shared_tokens=true", "model.encoder=x/y", "train.clip=2"]
    )
    assert (config.train.lr, config.model.m, config.model.shared_tokens, config.model.encoder) == (3e-4, 2, True, "x/y")
    assert config.train.clip == 2.0


def test_a_new_length_replaces_the_old_one():
    together = with_overrides(Config(), ["index.vectors=false", "search.ranking=docid"])
    assert together == with_overrides(Config(), ["search.ranking=docid", "index.vectors=false"])
    assert with_overrides(Config(), ["train.steps=10", "train.minutes=5"]).train.minutes == 5
    config = with_overrides(Config(train=TrainConfig(minutes=5)), ["train.steps=10"])
    assert (config.train.steps, config.train.minutes) == (10, None)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_setting(name):
    assert isinstance(with_overrides(preset("paper"), VARIANTS[name]), Config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.speed=1"], r"\[train\] has no setting speed; its settings are steps, "),
        (["trian.lr=1"], r"unknown section \[trian\]; sections are model, loss, train, index, search"),
        (["train.lr"], "section.name=value"),
        (["model.m=33"], "model.m must be from 1 to 32, got 33"),
        (["index.vectors=false"], "index.vectors = false needs search.ranking = docid"),
        (["model.V=1"], "model.V must be from 2 to 65536, got 1"),
        (["model.m=two"], "model.m must be int, got 'two'"),
        (["model.m=2.5"], "model.m must be int, got 2.5"),
        (["model.shared_tokens=1"], "model.shared_tokens must be bool, got 1"),
        (["train.minutes=-1"], "train.minutes must be positive"),
        (["search.mode=fast"], "search.mode must be one of beam, constrained, one-pass, got 'fast'"),
        (["model.decoder_width=30"], "must be a multiple"),
        (["loss.balance=-1"], "loss.balance must not be negative"),
    ],
)
def test_bad_settings_are_refused_with_a_clear_message(overrides, message):
    with pytest.raises(ConfigError, match=message):
        with_overrides(Config(), overrides)


def test_two_lengths_are_refused():
    with pytest.raises(
        ConfigError, match=r"one of train\.steps, train\.epochs and train\.minutes, got steps and minutes"
    ):
        TrainConfig(steps=1, minutes=1)


def test_unreadable_file_and_unknown_preset(tmp_path):
    with pytest.raises(ConfigError, match="can't read settings from"):
        load_config(tmp_path / "none.toml", Config())
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(ConfigError, match="can't read settings from"):
        load_config(tmp_path / "bad.toml", Config())
    with pytest.raises(ConfigError, match="unknown preset 'big'; presets are small, docids, paper"):
        preset("big")


def test_toml_file_can_name_a_preset(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('preset = "paper"\n[model]\nm = 2\n')
    config = load_config(path, Config())
    assert (config.model.m, config.train.batch) == (2, 4096)
    assert ModelConfig().m != 2 or config.model.decoder_layers == 6
