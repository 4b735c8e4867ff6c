"""Prose that lists what code lists too is compared with the code."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import asi
from asi.cli import app
from asi.config import PRESETS, SEARCH_MODES
from asi.corpora import BUILTIN
from asi.ways import WAYS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def test_every_command_is_in_the_readme():
    for command in app.registered_commands:
        name = (command.name or command.callback.__name__).replace("_command", "")
        assert f"`asi {name}" in README, name
        assert command.callback.__doc__, f"{name} has no help"


def test_every_module_is_in_the_tree_and_the_tree_has_no_other():
    described = set(re.findall(r"^      (\w+)(?:\.py|/) ", ARCHITECTURE, flags=re.MULTILINE)) - {
        "tensorboard",
        "checkpoints",
        "cache",
        "model",
        "store",
    }
    source = Path(asi.__file__).parent
    modules = {path.stem for path in source.glob("*.py")} | {path.parent.name for path in source.glob("*/__init__.py")}
    assert described | {"model", "store"} == modules - {"__init__", "__main__"}


def test_names_that_the_readme_lists():
    for name in [*asi.__all__, *BUILTIN, *PRESETS, *SEARCH_MODES, *WAYS]:
        assert name in README, name
    assert not re.search(r"@@\w+@@", README + ARCHITECTURE + (ROOT / "LOG.md").read_text())


def test_examples_in_docstrings_are_true():
    run = 0
    for module in pkgutil.walk_packages(asi.__path__, "asi."):
        if module.name != "asi.__main__":
            failed, tried = doctest.testmod(importlib.import_module(module.name))
            assert not failed, module.name
            run += tried
    assert run > 10
