"""Settings of the generative systems on queries and documents held out of train; the test splits are not looked at.

python benchmarks/generative.py --out FOLDER --data pydoc --minutes 3 --system nci --system dsi-semantic \
    --settings "now:" --settings "fast: LEARNING_RATE=2e-3 BATCH=128"

Settings are a name and constants of asi.systems.sequences: BATCH, LEARNING_RATE or DROPOUT. What is finished is not
trained again; every row goes to FOLDER/generative.jsonl too.
"""

import argparse
import json
import shutil
from pathlib import Path

from asi.analysis.system_measures import Measured, run_system
from asi.config import ModelConfig
from asi.datasets import open_dataset
from asi.distributed import choose_device
from asi.holdout import HeldOut
from asi.lengths import suited_length
from asi.run import Silence
from asi.systems import sequences
from asi.systems.table import BY_NAME
from asi.systems.workplace import Terms, Workplace

SPLITS = ("dev", "dev_unseen")
TRIED = {"BATCH", "LEARNING_RATE", "DROPOUT"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--system", action="append", required=True)
    parser.add_argument("--settings", action="append", required=True)
    arguments = parser.parse_args()
    unchanged = dict(vars(sequences))
    for data in arguments.data:
        dataset = HeldOut(open_dataset(data))
        encoder = ModelConfig.encoder
        terms = Terms(arguments.minutes, encoder, suited_length(encoder, dataset.corpus))
        folder = arguments.out / Path(data).name
        workplace = Workplace(dataset, folder, terms, choose_device(None), Silence())
        for text in arguments.settings:
            name, _, changes = text.partition(":")
            values = {key: json.loads(value) for key, _, value in (word.partition("=") for word in changes.split())}
            if not values.keys() <= TRIED:
                raise SystemExit(f"{text!r}: only {', '.join(sorted(TRIED))} are read anew by each training")
            vars(sequences).update(unchanged | values)
            for system in arguments.system:
                file = workplace.out / "measured" / f"{system}-{name}-{arguments.minutes:g}.json"
                measured = Measured.load(file)
                if measured is None:
                    shutil.rmtree(workplace.folder(system), ignore_errors=True)
                    measured = run_system(BY_NAME[system], workplace, SPLITS)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    measured.save(file)
                row = {"data": Path(data).name, "system": system, "settings": text, "minutes": arguments.minutes}
                row |= {"steps": measured.steps, "pairs": measured.pairs, "trained": round(measured.trained_recall, 3)}
                for split in SPLITS:
                    scores = measured.reports[split].document or {}
                    row[split] = [round(scores[measure], 3) for measure in ("R@1", "R@10", "MRR@10")]
                print(json.dumps(row), flush=True)
                with (arguments.out / "generative.jsonl").open("a") as log:
                    log.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
