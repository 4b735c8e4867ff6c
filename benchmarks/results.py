"""ASI beside a dense bi-encoder with exact search and BM25, on the test splits, all trained for the same minutes.

python benchmarks/results.py --out FOLDER --minutes 10 --data hpo --data pydoc --data PATH [--seeds 5]

With several seeds ASI is trained with each, the others with the first. All seeds have as many steps as the first has in
its minutes: what differs is the seed, not how busy the machine was.

All trained systems use the same loop, encoder, adapter and softmax on vectors; the bi-encoder trains nothing else, the
preset `docids` (32 bytes per document, no vectors) no decoder.
Runs that are finished are not trained again. Prints a Markdown table and says which goals are met; the measures go to
FOLDER/results.json.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bi_encoder import DENSE
from kept import keep

from asi.checkpoint import RunFolder
from asi.config import Config, preset, with_overrides
from asi.datasets import Dataset, measured_splits, open_dataset
from asi.evaluation import Run, evaluate_documents
from asi.features import compute_features
from asi.index import Index
from asi.indexing import assign
from asi.metrics import Report, reciprocal_ranks
from asi.run import RunState, check_same_run, train
from asi.significance import randomisation_test
from asi.systems.exact import ExactRetriever
from asi.systems.lexical import LexicalRetriever
from asi.ways import WAYS, evaluate_ways

# No centres of buckets are looked at, so that docids alone choose what is ranked: what that costs.
BY_DOCIDS = {"mode": "constrained", "centre_share": 0.0}
SHOWN = ("asi", "asi-by-docids", "asi-beam", "asi-one-pass", "asi-one-pass-docids", "docids", "dense", "bm25")
WITH_THE_FIRST_SEED = ("asi", "dense", "docids", "bm25")
Results = dict[str, dict[str, Report]]  # system -> split -> report


def evaluate_dense(folder: Path, dataset: Dataset, splits: list[str]) -> tuple[dict[str, Report], Run]:
    with Index.load(folder) as index:
        model, tokenise = index.loaded.model, index.loaded.tokenise
        documents = list(dataset.documents())

        def embed(texts: list[str], cache: Path | None = None) -> np.ndarray:
            return assign(model, compute_features(model, tokenise(texts), keep_states=False)).vectors

        vectors = embed([document.content for document in documents])
        retriever = ExactRetriever([document.key for document in documents], vectors, embed)
        reports, answers = {}, {}
        for split in splits:
            reports[split], found = evaluate_documents(retriever, *dataset.judged(split))
            answers |= found
        return reports, answers


def folder_of(data: str, out: Path, name: str, minutes: float, seed: int) -> Path:
    return out / Path(data).name / f"{name}-{minutes:g}-{seed}"


def results_of(
    data: str, out: Path, minutes: float, seed: int, names: Sequence[str]
) -> tuple[Results, dict[str, float]]:
    """The measures, and for every split how likely so large a difference of MRR@10 from the bi-encoder is by chance."""
    dataset = open_dataset(data)
    splits = measured_splits(dataset)
    if not splits:
        raise SystemExit(f"{data} has no test split")
    steps = f"train.steps={first_steps(data, out, minutes)}" if seed else f"train.minutes={minutes}"
    config = with_overrides(Config(), [steps, f"train.seed={seed}"])
    systems = {
        "asi": config,
        "dense": with_overrides(config, DENSE),
        "docids": with_overrides(preset("docids"), [f"train.minutes={minutes}", f"train.seed={seed}"]),
    }
    results: Results = {}
    answers: dict[str, Run] = {}
    for name in names:
        folder = folder_of(data, out, name, minutes, seed)
        if name == "bm25":
            lexical = LexicalRetriever(dataset.documents())
            results["bm25"] = {split: evaluate_documents(lexical, *dataset.judged(split))[0] for split in splits}
            continue
        check_same_run(folder, systems[name], dataset.name)
        train(dataset, folder, systems[name], resume=True)
        if name == "dense":
            results["dense"], answers["dense"] = evaluate_dense(folder, dataset, splits)
            continue
        ways = WAYS | {"asi-by-docids": BY_DOCIDS} if name == "asi" else {name: {}}
        with Index.load(folder, search=systems[name].search) as index:
            reports, found = evaluate_ways(index, dataset, splits, ways)
            results |= reports
            answers |= found
    chances = {}
    for split in splits if "dense" in answers else ():
        judgements = dataset.judged(split)[1]
        ours, theirs = (reciprocal_ranks(answers[name], judgements) for name in ("asi", "dense"))
        chances[split] = randomisation_test(*(np.array([ranks[key] for key in ours]) for ranks in (ours, theirs)))
    return results, chances


def first_steps(data: str, out: Path, minutes: float) -> int:
    """How many steps ASI has in these minutes with the first seed, which has been trained."""
    steps = RunState.load(RunFolder(folder_of(data, out, "asi", minutes, 0))).steps
    assert steps is not None
    return steps


def goals(found: list[Results], chances: dict[str, float]) -> list[str]:
    """One line for every goal: what was asked, what was measured.

    Recall and MRR are means over the seeds that a system has, p is of the first; what is asked of every run is looked
    at in every run.
    """

    def document(system: str, split: str, name: str) -> float:
        reports = [results[system][split] for results in found if system in results]
        return float(np.mean([(report.document or {})[name] for report in reports]))

    lines = []
    for split in found[0]["dense"]:
        for name in ("R@10", "MRR@10"):
            ours, theirs = document("asi", split, name), document("dense", split, name)
            p = f", p = {chances[split]:.3f}" if name == "MRR@10" else ""
            lines.append(f"{split}: {name} above dense: {verdict(ours > theirs)} ({ours:.3f}, {theirs:.3f}{p})")
        runs = [results["asi"][split] for results in found]
        most = max((report.ranked or {})["most"] / documents_of(report) for report in runs)
        lines.append(f"{split}: at most 2% of the documents ranked: {verdict(most <= 0.02)} ({most:.2%})")
        for name in ("R@10", "MRR@10"):
            ours, theirs = document("asi-by-docids", split, name), document("dense", split, name)
            lines.append(f"{split}: {name} above dense, docids alone choose: {verdict(ours > theirs)} ({ours:.3f})")
        for name in ("docids", "asi-one-pass-docids"):
            ratio = document(name, split, "MRR@10") / document("dense", split, "MRR@10")
            lines.append(f"{split}: {name}, MRR@10 85% of dense: {verdict(ratio >= 0.85)} ({ratio:.0%})")
        for way, label in (("asi", "constrained beam"), ("asi-beam", "plain beam")):
            pairs = [((r[way][split].docid or {})["R@1"], r[way][split].acc or 0.0) for r in found]
            shown = "; ".join(f"{first:.3f}, {acc:.3f}" for first, acc in pairs)
            above = verdict(all(first > acc for first, acc in pairs))
            lines.append(f"{split}: docid-level R@1 above Acc, {label}: {above} ({shown})")
        if len(found) > 1:
            spread = np.std([(report.document or {})["MRR@10"] for report in runs], ddof=1)
            lines.append(f"{split}: deviation of MRR@10 under .01: {verdict(spread < 0.01)} ({spread:.4f})")
    if "test_nl2bash" in found[0]["asi"]:
        ours, theirs = (document(name, "test_nl2bash", "R@10") for name in ("asi", "bm25"))
        lines.append(f"test_nl2bash: R@10 1.5 times BM25's: {verdict(ours >= 1.5 * theirs)} ({ours:.3f}, {theirs:.3f})")
    return lines + [line for results in found for line in health(next(iter(results["asi"].values())))]


def health(report: Report) -> list[str]:
    coarseness, largest = report.d_per_id or 0.0, (report.largest_bucket or 0) / documents_of(report)
    perplexity = report.perplexity or []
    every = all(value > Config().model.V / 3 for value in perplexity)
    values = ", ".join(f"{value:.0f}" for value in perplexity)
    return [
        f"D/ID from 1.1 to 6: {verdict(1.1 <= coarseness <= 6)} ({coarseness:.2f})",
        f"largest bucket under 1% of the corpus: {verdict(largest < 0.01)} ({largest:.2%})",
        f"perplexity above a third of V at every position: {verdict(every)} ({values})",
    ]


def documents_of(report: Report) -> float:
    return (report.docids or 1) * (report.d_per_id or 1.0)


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def rows_of(data: str, seed: int, results: Results) -> list[str]:
    rows = []
    for system in SHOWN:
        for split, report in results.get(system, {}).items():
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
        out, minutes = arguments.out, arguments.minutes
        first, chances = results_of(data, out, minutes, 0, WITH_THE_FIRST_SEED)
        others = [results_of(data, out, minutes, seed, ("asi",))[0] for seed in range(1, arguments.seeds)]
        found = [first, *others]
        for seed, results in enumerate(found):
            table += rows_of(data, seed, results)
            kept[f"{Path(data).name} {seed}"] = {
                system: {split: report.to_dict() for split, report in by.items()} for system, by in results.items()
            }
        notes += [f"{Path(data).name}: {line}" for line in goals(found, chances)]
        keep(arguments.out / "results.json", kept)
        print("\n".join([*table, "", *notes]), flush=True)


if __name__ == "__main__":
    main()
