"""Saved states: folders that are written beside and renamed, with a manifest of checksums written last.

A *checkpoint* holds what training needs to go on. A *model folder* holds what searching needs, and nothing else.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asi.config import Config, from_dict, to_dict
from asi.encoder import Encoder, EncoderShape, TextTokeniser, load_tokeniser_file
from asi.errors import CheckpointError, ConfigError
from asi.folders import folder_beside, put_in_place, restore, sync, write_atomically
from asi.model import Asi

FORMAT_VERSION = 3
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class RunFolder:
    """Where everything of a run lies: the files are named here and nowhere else."""

    path: Path

    @property
    def run(self) -> Path:
        """Settings, data and length of the training run."""
        return self.path / "run.json"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def cache(self) -> Path:
        """Output of the frozen layers; removed when training has ended."""
        return self.path / "cache"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_folder(folder: Path, write_files: Callable[[Path], None], manifest: Mapping[str, Any]) -> None:
    """Let `write_files` fill a new folder, add the manifest, and put it in the place of `folder`."""
    beside = folder_beside(folder)
    beside.mkdir()
    write_files(beside)
    files = sorted(path for path in beside.iterdir())
    for path in files:
        sync(path)
    sums = {path.name: checksum(path) for path in files}
    write_atomically(beside / MANIFEST, json.dumps({"format": FORMAT_VERSION, **manifest, "files": sums}, indent=1))
    put_in_place(beside, folder)


def read_manifest(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """The manifest of a saved folder, after comparing every file with its checksum."""
    restore(folder)
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no complete save: can't read {MANIFEST} ({error})") from error
    if manifest.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format {manifest.get('format')}, this version reads {FORMAT_VERSION}; train again"
        )
    if verify and (damage := damaged_files(folder, manifest)):
        raise CheckpointError(f"{folder} is damaged: {'; '.join(damage)}; restore it from a copy or train again")
    return manifest


def damaged_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """One line for every file of the manifest that is missing or has another checksum."""
    damage = []
    for name, expected in manifest["files"].items():
        if not (folder / name).is_file():
            damage.append(f"{name} is missing")
        elif checksum(folder / name) != expected:
            damage.append(f"{name} does not have its checksum")
    return damage


# Checkpoints of a training run ----------------------------------------------------------------------------------------


def save_checkpoint(folder: RunFolder, step: int, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> None:
    """Save a step and remove all but the newest two."""

    def write_files(beside: Path) -> None:
        save_file({name: weight.contiguous() for name, weight in weights.items()}, beside / "weights.safetensors")
        torch.save({"optimizer": optimizer, "random": torch.get_rng_state()}, beside / "optimizer.pt")

    save_folder(checkpoint_path(folder, step), write_files, {"step": step})
    for old in saved_steps(folder)[:-2]:
        shutil.rmtree(checkpoint_path(folder, old))


def saved_steps(folder: RunFolder) -> list[int]:
    """Steps with a finished save, oldest first."""
    names = (re.fullmatch(r"step-(\d{8})", path.parent.name) for path in folder.checkpoints.glob(f"step-*/{MANIFEST}"))
    return sorted(int(match[1]) for match in names if match)


@dataclass(frozen=True)
class Checkpoint:
    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    random: Tensor


def resumed_step(folder: RunFolder) -> int:
    """The step of the newest save that is whole, an older one if the newest is damaged; 0 if there is none."""
    for step in reversed(saved_steps(folder)):
        try:
            read_manifest(checkpoint_path(folder, step))
        except CheckpointError:
            continue
        return step
    return 0


def latest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The save that a run goes on from."""
    if not (step := resumed_step(folder)):
        return None
    path = checkpoint_path(folder, step)
    saved = torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu")
    return Checkpoint(step, load_file(path / "weights.safetensors"), saved["optimizer"], saved["random"])


def checkpoint_path(folder: RunFolder, step: int) -> Path:
    return folder.checkpoints / f"step-{step:08d}"


# Model folders --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, and the fingerprint that stores made with it carry."""

    model: Asi
    tokenise: TextTokeniser
    config: Config
    fingerprint: str


def save_model(folder: Path, model: Asi, tokenise: TextTokeniser, config: Config) -> None:
    def write_files(beside: Path) -> None:
        weights = {name: weight.detach().cpu().contiguous() for name, weight in model.state_dict().items()}
        save_file(weights, beside / "weights.safetensors")
        tokenise.save(beside / "tokenizer.json")

    manifest = {"config": to_dict(config), "encoder": asdict(model.encoder.shape), "pad": tokenise.pad}
    save_folder(folder, write_files, manifest)


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """Changes with anything that decides a docid: the weights, the tokeniser, the model's settings."""
    decisive = {"model": manifest["config"]["model"], "encoder": manifest["encoder"], "files": manifest["files"]}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def saved_config(values: Mapping[str, Any], folder: Path) -> Config:
    try:
        return from_dict(values)
    except ConfigError as error:
        raise CheckpointError(f"{folder} was saved by another version of asi: {error}; train again") from error


def load_model(folder: Path, device: torch.device) -> LoadedModel:
    restore(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder.parent} holds no trained model; run: asi train DATA --out {folder.parent}")
    manifest = read_manifest(folder)
    config = saved_config(manifest["config"], folder)
    with torch.device("meta"):  # nothing is initialised that the file overwrites
        encoder = Encoder(EncoderShape(**manifest["encoder"]), config.model.frozen_layers, config.model.precision)
        model = Asi(encoder, config.model)
    model.load_state_dict(load_file(folder / "weights.safetensors", device=str(device)), assign=True)
    assert config.model.max_length is not None, "a model is saved with the length that it reads"
    tokenise = load_tokeniser_file(folder / "tokenizer.json", config.model.max_length, manifest["pad"])
    return LoadedModel(model.eval().requires_grad_(False), tokenise, config, fingerprint(manifest))
