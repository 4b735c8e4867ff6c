"""Fixtures: the toy corpus, the toy encoder, and a run that is trained once for all tests."""

from pathlib import Path

import pytest
import torch
from toy import toy_settings, train_toy, write_beir, write_encoder

from asi.config import Config


@pytest.fixture(autouse=True)
def few_threads():
    """Tests start processes of their own; threads that compete are several times slower."""
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def beir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("beir")
    write_beir(folder)
    return folder


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    write_encoder(folder)
    return folder


@pytest.fixture(scope="session")
def toy_config(encoder_folder) -> Config:
    return toy_settings(encoder_folder)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, beir, toy_config) -> Path:
    """A trained and indexed run on the toy corpus. Tests that change it copy it first."""
    path = tmp_path_factory.mktemp("runs") / "toy"
    train_toy(path, beir, toy_config)
    return path
