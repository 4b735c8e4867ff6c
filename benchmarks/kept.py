"""Measures as a JSON file, with the day and the machine that they came from."""

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

from asi.folders import write_atomically


def keep(file: Path, results: Any) -> None:
    machine = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    whole = {"date": str(datetime.date.today()), "machine": machine, "results": results}
    write_atomically(file, json.dumps(whole, indent=1))
