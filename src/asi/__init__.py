"""Auto Search Indexer: search by generated, learned document identifiers.

    index = asi.Index.load("runs/x")
    [hits] = index.search(["can't sleep at night"], k=10)

The public names are loaded when they are first used, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asi.config import Config as Config
    from asi.datasets import open_dataset as open_dataset
    from asi.errors import AsiError as AsiError
    from asi.index import Index as Index
    from asi.metrics import Report as Report
    from asi.records import Document as Document
    from asi.records import Hit as Hit
    from asi.records import Qrel as Qrel
    from asi.records import Query as Query
    from asi.run import train as train

__version__ = "0.1.0"

PUBLIC = {
    "AsiError": "asi.errors",
    "Config": "asi.config",
    "Document": "asi.records",
    "Hit": "asi.records",
    "Index": "asi.index",
    "Qrel": "asi.records",
    "Query": "asi.records",
    "Report": "asi.metrics",
    "open_dataset": "asi.datasets",
    "train": "asi.run",
}
__all__ = sorted(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'asi' has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)
