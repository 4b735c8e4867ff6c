import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asi.checkpoint import (
    MANIFEST,
    RunFolder,
    latest_checkpoint,
    load_model,
    read_manifest,
    save_checkpoint,
    save_folder,
    saved_steps,
)  # fmt: skip
from asi.errors import CheckpointError


def save(folder, step):
    save_checkpoint(folder, step, {"w": torch.full((2,), float(step))}, {"state": {}, "step": step})


def test_newest_two_are_kept_and_the_latest_is_loaded(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        save(folder, step)
    assert saved_steps(folder) == [2, 3]
    found = latest_checkpoint(folder)
    assert (found.step, found.weights["w"].tolist(), found.optimizer["step"]) == (3, [3.0, 3.0], 3)


@pytest.mark.parametrize("damage", ["truncated", "no manifest", "flipped bit"])
def test_a_damaged_newest_save_falls_back_to_the_one_before(tmp_path, damage):
    folder = RunFolder(tmp_path)
    save(folder, 1)
    save(folder, 2)
    newest = folder.checkpoints / "step-00000002"
    weights = newest / "weights.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "no manifest":
        (newest / MANIFEST).unlink()
    else:
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    assert latest_checkpoint(folder).step == 1


def test_a_save_that_dies_half_way_changes_nothing(tmp_path):
    folder = tmp_path / "model"
    save_folder(folder, lambda beside: (beside / "a").write_text("old") and None, {})

    def die(beside):
        (beside / "a").write_text("new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_folder(folder, die, {})
    assert (folder / "a").read_text() == "old"
    read_manifest(folder)
    save_folder(folder, lambda beside: (beside / "a").write_text("newer") and None, {})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # the left-over is cleared away
    assert (folder / "a").read_text() == "newer"


@pytest.mark.parametrize("then", ["read", "written again, in vain"])
def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path, monkeypatch, then):
    folder = tmp_path / "model"
    save_folder(folder, lambda beside: (beside / "a").write_text("old") and None, {})
    rename, renamed = Path.rename, []

    def die_at_the_second(path, target):
        if renamed:
            raise KeyboardInterrupt
        renamed.append(target)
        rename(path, target)

    def die(beside):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            save_folder(folder, lambda beside: (beside / "a").write_text("new") and None, {})
    assert not folder.exists()
    if then != "read":
        with pytest.raises(KeyboardInterrupt):
            save_folder(folder, die, {})
    read_manifest(folder)
    assert (folder / "a").read_text() == "old"


def test_other_format_is_refused(tmp_path):
    save_folder(tmp_path / "x", lambda beside: None, {})
    manifest = json.loads((tmp_path / "x" / MANIFEST).read_text())
    (tmp_path / "x" / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, this version reads 3; train again"):
        read_manifest(tmp_path / "x")


def test_settings_that_are_no_more_are_refused(tmp_path):
    save_folder(tmp_path / "model", lambda beside: None, {"config": {"search": {"fill_weight": 0.01}}})
    with pytest.raises(CheckpointError, match=r"another version of asi: .* no setting fill_weight; .*; train again"):
        load_model(tmp_path / "model", torch.device("cpu"))


def test_a_model_folder_needs_nothing_else(run_folder, tmp_path, toy_config):
    loaded = load_model(run_folder / "model", torch.device("cpu"))
    assert loaded.config == replace(toy_config, train=toy_config.train)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    again = load_model(run_folder / "model", torch.device("cpu"))
    assert again.fingerprint == loaded.fingerprint


def test_no_model_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="holds no trained model; run: asi train"):
        load_model(tmp_path / "model", torch.device("cpu"))
