"""Measures as a JSON file, with the day and the machine that they came from."""

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

from asi.folders import write_atomically


def keep(file: Path, results: Any) -> None:
    write_atomically(file, json.dumps(origin() | {"results": results}, indent=1))


def origin() -> dict[str, Any]:
    machine = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return {"date": str(datetime.date.today()), "machine": machine}
