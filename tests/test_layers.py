"""The structure holds: imports point down, optional packages have one place, importing costs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import asi

SOURCE = Path(asi.__file__).parent

LAYERS = [
    "records errors arrays array_cache folders memory precision texts",
    "config metrics significance losses quantiser t5 beam rows trec database snapshot",
    "encoder corpora store",
    "model datasets lengths",
    "features batches checkpoint distributed holdout ranking",
    "centres code_vectors matching pretrained training",
    "objective indexing judges planning",
    "view",
    "docid_search",
    "candidates",
    "search",
    "run evaluation generator",
    "index expansion",
    "systems",
    "ways screen",
    "analysis",
    "demo",
    "cli",
]
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row.split()}
ONE_PLACE = {
    "lmdb": "database",
    "bm25s": "systems",
    "faiss": "systems",
    "ir_measures": "metrics",
    "pyarrow": "rows",
    "tokenizers": "encoder",
}
ONE_PLACE |= {"typer": "cli", "rich": "screen", "huggingface_hub": "encoder"}


def modules():
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if name not in ("__init__", "__main__"):
            yield name, path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            root, _, rest = node.module.partition(".")
            yield root, [rest.split(".")[0]] if rest else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                root, _, rest = alias.name.partition(".")
                yield root, [rest.split(".")[0]]


def test_every_module_has_a_layer():
    assert {name for name, _ in modules()} == set(LEVEL)


def test_imports_point_down():
    for name, path in modules():
        for root, others in imports(path):
            for other in others if root == "asi" else []:
                assert other == name or LEVEL[other] < LEVEL[name], (
                    f"{path.name} imports {other}, which is not below it"
                )


def test_packages_have_one_importing_file():
    for name, path in modules():
        for root, _ in imports(path):
            assert ONE_PLACE.get(root, name) == name, f"{path.name} imports {root}"


def test_only_the_command_line_prints():
    for name, path in modules():
        if name not in ("cli", "screen"):
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path.name


def test_files_stay_readable():
    for _, path in modules():
        assert len(path.read_text().splitlines()) <= 480, f"{path.name} has two jobs by now"


def test_importing_the_package_costs_nothing():
    script = (
        "import sys, threading, logging; import asi;"
        "assert not {'torch', 'numpy', 'lmdb'} & set(sys.modules);"
        "assert threading.active_count() == 1; assert not logging.getLogger().handlers"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_public_names():
    assert asi.__all__ == [
        "AsiError",
        "Config",
        "Document",
        "Hit",
        "Index",
        "Qrel",
        "Query",
        "Report",
        "open_dataset",
        "train",
    ]
    for name in asi.__all__:
        assert getattr(asi, name).__name__ == name
