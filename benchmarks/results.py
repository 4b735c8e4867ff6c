"""ASI beside a dense bi-encoder with exact search and BM25, on the test splits, all trained for the same minutes.

python benchmarks/results.py --out FOLDER --minutes 10 --data hpo --data pydoc --data PATH [--seeds 5]

Both trained systems use the same loop, encoder, adapter and softmax on vectors; the bi-encoder trains nothing else.
Runs that are finished are not trained again. Prints a Markdown table and says which goals are met; the measures go to
FOLDER/results.json.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from asi.compare import WAYS, evaluate_ways
from asi.config import Config, with_overrides
from asi.datasets import Dataset, open_dataset
from asi.evaluation import evaluate_documents
from asi.features import compute_features
from asi.index import Index
from asi.indexing import assign
from asi.metrics import Report
from asi.run import check_same_run, train
from asi.systems.exact import ExactRetriever
from asi.systems.lexical import LexicalRetriever

DENSE = [f"loss.{name}=0" for name in ("generation", "contrastive", "reverse", "match", "balance")]
DENSE += ["train.freeze_docids=1", "index.known_queries=false", "model.token_width=0"]
DENSE += ["train.docid_every=1000000000"]  # nothing but vectors, at full speed
SHOWN = ("asi", "asi-one-pass", "asi-one-pass-docids", "dense", "bm25")
Results = dict[str, dict[str, Report]]  # system -> split -> report


def dense_reports(folder: Path, dataset: Dataset, splits: list[str]) -> dict[str, Report]:
    with Index.load(folder) as index:
        model, tokenise = index.loaded.model, index.loaded.tokenise
        documents = list(dataset.documents())

        def embed(texts: list[str], cache: Path | None = None) -> np.ndarray:
            return assign(model, compute_features(model, tokenise(texts), keep_states=False)).vectors

        vectors = embed([document.content for document in documents])
        retriever = ExactRetriever([document.key for document in documents], vectors, embed)
        return {split: evaluate_documents(retriever, *dataset.judged(split))[0] for split in splits}


def results_of(data: str, out: Path, minutes: float, seed: int) -> Results:
    dataset = open_dataset(data)
    splits = [split for split in dataset.splits if split.startswith("test") and split != "test_all"]
    if not splits:
        raise SystemExit(f"{data} has no test split")
    config = with_overrides(Config(), [f"train.minutes={minutes}", f"train.seed={seed}"])
    folders = {name: out / Path(data).name / f"{name}-{minutes:g}-{seed}" for name in ("asi", "dense")}
    for name, settings in (("asi", config), ("dense", with_overrides(config, DENSE))):
        check_same_run(folders[name], settings, dataset.name)
        train(dataset, folders[name], settings, resume=True)
    with Index.load(folders["asi"]) as index:
        results, _ = evaluate_ways(index, dataset, splits, WAYS)
    lexical = LexicalRetriever(dataset.documents())
    results["dense"] = dense_reports(folders["dense"], dataset, splits)
    results["bm25"] = {split: evaluate_documents(lexical, *dataset.judged(split))[0] for split in splits}
    return results


def goals(results: Results) -> list[str]:
    """One line for every goal: what was asked, what was measured."""
    lines = []
    for split, dense in results["dense"].items():
        asi, docids = results["asi"][split], results["asi-one-pass-docids"][split]
        for name in ("R@10", "MRR@10"):
            ours, theirs = asi.document[name], dense.document[name]
            lines.append(f"{split}: {name} above dense: {verdict(ours > theirs)} ({ours:.3f}, {theirs:.3f})")
        ratio = docids.document["MRR@10"] / dense.document["MRR@10"]
        lines.append(f"{split}: docids only, MRR@10 85% of dense: {verdict(ratio >= 0.85)} ({ratio:.0%})")
        lines.append(
            f"{split}: R@1 above Acc: {verdict(asi.docid['R@1'] > asi.acc)} ({asi.docid['R@1']:.3f}, {asi.acc:.3f})"
        )
    if "test_nl2bash" in results["asi"]:
        ours, theirs = (results[name]["test_nl2bash"].document["R@10"] for name in ("asi", "bm25"))
        lines.append(f"test_nl2bash: R@10 1.5 times BM25's: {verdict(ours >= 1.5 * theirs)} ({ours:.3f}, {theirs:.3f})")
    health = next(iter(results["asi"].values()))
    lines.append(f"D/ID from 1.1 to 6: {verdict(1.1 <= health.d_per_id <= 6)} ({health.d_per_id:.2f})")
    return [*lines, f"perplexity per position: {', '.join(f'{value:.0f}' for value in health.perplexity)}"]


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def rows_of(data: str, seed: int, results: Results) -> list[str]:
    rows = []
    for system in SHOWN:
        for split, report in results[system].items():
            docid = f"{report.docid['R@10']:.3f}" if report.docid else "-"
            document = [f"{report.document[name]:.3f}" for name in ("R@1", "R@10", "MRR@10")]
            rows.append("| " + " | ".join([Path(data).name, str(seed), system, split, docid, *document]) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    table = ["| data | seed | system | split | docid R@10 | R@1 | R@10 | MRR@10 |", "| --- " * 8 + "|"]
    kept, notes = {}, []
    for data in arguments.data:
        found = [results_of(data, arguments.out, arguments.minutes, seed) for seed in range(arguments.seeds)]
        for seed, results in enumerate(found):
            table += rows_of(data, seed, results)
            kept[f"{Path(data).name} {seed}"] = {
                system: {split: report.to_dict() for split, report in by.items()} for system, by in results.items()
            }
        notes += [f"{Path(data).name}: {line}" for line in goals(found[0])]
        if arguments.seeds > 1:
            for split in found[0]["asi"]:
                spread = np.std([results["asi"][split].document["MRR@10"] for results in found], ddof=1)
                line = f"deviation of MRR@10 under .01: {verdict(spread < 0.01)} ({spread:.4f})"
                notes.append(f"{Path(data).name}: {split}: {line}")
        (arguments.out / "results.json").write_text(json.dumps(kept, indent=1))
        print("\n".join([*table, "", *notes]), flush=True)


if __name__ == "__main__":
    main()
