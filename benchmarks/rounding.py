"""What is lost when documents' vectors are rounded to 32 codes, and what the quantiser should have seen.

python benchmarks/rounding.py --out FOLDER --data hpo --data pydoc

Trains a bi-encoder on what benchmarks/recipes.py trains on (the same folder: it is trained once for both), then fits
quantisers as `train.start_heads` does, without the documents that the held-out queries ask for: to the quantiser these
are new. Prints the error of rounding (a share of the vectors' squared length) and the share of the vectors' MRR@10 that
is left, means of three seeds; the same goes to FOLDER/rounding.json.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from kept import keep
from recipes import base_of
from torch import Tensor

from asi.batches import contents
from asi.beam import stable_topk
from asi.config import preset, with_overrides
from asi.datasets import open_dataset
from asi.features import compute_features
from asi.holdout import HeldOut
from asi.index import Index
from asi.indexing import assign
from asi.metrics import reciprocal_ranks
from asi.quantiser import fit_quantiser
from asi.records import Hit, Qrel
from asi.run import train

SEEDS = 3
STEPS = 1000
HELD_OUT = ("dev", "dev_unseen")


class Vectors:
    """What the heads would see of a data set's documents, of its training queries and of those that are held out."""

    def __init__(self, data: str, out: Path) -> None:
        dataset, cache = HeldOut(open_dataset(data)), out / "cache"
        folder = out / Path(data).name / f"dense-{STEPS}-0"
        train(dataset, folder, with_overrides(base_of("dense"), [f"train.steps={STEPS}"]), resume=True, cache=cache)
        self.keys = [document.key for document in dataset.corpus]
        with Index.load(folder) as index, torch.no_grad():
            model, tokenise = index.loaded.model, index.loaded.tokenise

            def inner(texts: list[str]) -> Tensor:
                features = compute_features(model, tokenise(texts), keep_states=False, cache=cache)
                return model.heads.inner(torch.from_numpy(assign(model, features).vectors))

            self.documents = inner(contents(dataset.corpus))
            self.qrels: list[Qrel] = [qrel for split in HELD_OUT for qrel in dataset.judged(split)[1]]
            asked = {query.key: query.text for split in HELD_OUT for query in dataset.judged(split)[0]}
            self.asking, self.asked = list(asked), inner(list(asked.values()))
            new = {qrel.document for qrel in self.qrels}
            queries, qrels = dataset.judged("train")
            known = {qrel.document for qrel in qrels} - new
            of_known = {qrel.query for qrel in qrels if qrel.document in known}
            self.queries = inner([query.text for query in queries if query.key in of_known])
        self.known = torch.tensor([key in known for key in self.keys])
        self.new = torch.tensor([key in new for key in self.keys])

    def mrr(self, documents: Tensor) -> float:
        """By the distance of these vectors (N, D) to the queries, as docids rank in one pass."""
        _, rows = stable_topk(self.asked @ documents.T - documents.square().sum(1) / 2, 10)
        hits = [[Hit(self.keys[row], -float(place)) for place, row in enumerate(best)] for best in rows.tolist()]
        return float(np.mean([*reciprocal_ranks(dict(zip(self.asking, hits, strict=True)), self.qrels).values()]))

    def error(self, rounded: Tensor, rows: Tensor) -> float:
        own = self.documents[rows]
        return float((rounded[rows] - own).square().sum() / own.square().sum())


def measure(vectors: Vectors, seen: Tensor) -> list[float]:
    """Errors of known and new documents, and the share of MRR@10."""
    model, exact, rows = preset("docids").model, vectors.mrr(vectors.documents), []
    for seed in range(SEEDS):
        quantiser = fit_quantiser(seen, model.m, model.V, seed)
        rounded = quantiser.rounded(quantiser.codes(vectors.documents))
        errors = [vectors.error(rounded, part) for part in (vectors.known, vectors.new)]
        rows.append([*errors, vectors.mrr(rounded) / exact])
    return np.mean(rows, axis=0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", action="append", required=True)
    arguments = parser.parse_args()
    print("| data | quantiser of | error, known | error, new | share of MRR@10 |", "| --- " * 5 + "|", sep="\n")
    kept = {}
    for data in arguments.data:
        vectors = Vectors(data, arguments.out)
        known = vectors.documents[vectors.known]
        for name, seen in (("documents", known), ("documents and queries", torch.cat([known, vectors.queries]))):
            row = kept[f"{Path(data).name}, {name}"] = measure(vectors, seen)
            print(f"| {Path(data).name} | {name} | {' | '.join(f'{value:.3f}' for value in row)} |", flush=True)
    keep(arguments.out / "rounding.json", kept)


if __name__ == "__main__":
    main()
