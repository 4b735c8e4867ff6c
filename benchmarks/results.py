"""ASI beside a dense bi-encoder with exact search and BM25, on the test splits, all trained for the same minutes.

python benchmarks/results.py --out FOLDER --minutes 10 --data hpo --data pydoc --data PATH [--seeds 5 [--dense-seeds 5]]

With several seeds ASI is trained with each, the bi-encoder with as many as it is given, the others with the first. All
seeds have as many steps as the first has in its minutes: what differs is the seed, not how busy the machine was.

All trained systems use the same loop, encoder, adapter and softmax on vectors; the bi-encoder trains nothing else, the
preset `docids` (32 bytes per document, no vectors) no decoder.
Runs that are finished are not trained again, and those that are measured (FOLDER/DATA/NAME.json) need not be there any
more: with these files the benchmark goes on elsewhere. Prints a Markdown table and says which goals are met; all
measures together go to FOLDER/results.json.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bi_encoder import DENSE
from kept import keep, origin

from asi.analysis.findings import documents_of
from asi.analysis.fingerprint import data_fingerprint
from asi.batches import training_texts
from asi.checkpoint import FORMAT_VERSION, RunFolder
from asi.config import Config, ModelConfig, from_dict, preset, to_dict, with_overrides
from asi.datasets import Dataset, measured_splits, open_dataset
from asi.errors import ConfigError
from asi.evaluation import Run, evaluate_documents
from asi.features import compute_features
from asi.folders import write_atomically
from asi.index import Index
from asi.indexing import assign
from asi.lengths import suited_length
from asi.metrics import Report, as_json, from_json, reciprocal_ranks
from asi.run import RunState, check_same_run, train
from asi.significance import randomisation_test
from asi.systems.exact import ExactRetriever
from asi.systems.lexical import LexicalRetriever
from asi.ways import WAYS, evaluate_ways

# No centres of buckets are looked at, so that docids alone choose what is ranked: what that costs.
BY_DOCIDS = {"mode": "constrained", "centre_share": 0.0}
SHOWN = ("asi", "asi-by-docids", "asi-beam", "asi-one-pass", "asi-one-pass-docids", "docids", "dense", "bm25")
WITH_THE_FIRST_SEED = ("asi", "dense", "docids", "bm25")
SEARCH = 2  # counted up when a search with the same settings finds other docids: what was measured before is not kept
Results = dict[str, dict[str, Report]]  # system -> split -> report


@dataclass(frozen=True)
class Data:
    name: str  # of the folders
    dataset: Dataset
    splits: list[str]
    fingerprint: str
    settings: tuple[str, ...]  # that a run would choose itself for these documents

    @classmethod
    def open(cls, data: str) -> "Data":
        dataset = open_dataset(data)
        splits = measured_splits(dataset)
        if not splits:
            raise SystemExit(f"{data} has no test split")
        texts = training_texts(dataset)
        fingerprint = data_fingerprint(texts, dataset, splits)
        model = ModelConfig(max_length=suited_length(ModelConfig.encoder, texts.documents))
        settings = (f"model.max_length={model.max_length}", f"model.kept_tokens={model.tokens_of_document}")
        return cls(Path(data).name, dataset, splits, fingerprint, settings)


@dataclass(frozen=True)
class Measured:
    """What is known of one run, or of BM25."""

    results: Results
    ranks: dict[str, list[int]]  # by split: the rank of each judged query's first hit, 0 without one
    steps: int

    def save(self, file: Path, wanted: dict[str, Any]) -> None:
        values = {"reports": as_json(self.results), "ranks": self.ranks, "steps": self.steps}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(origin() | wanted | values))

    @classmethod
    def load(cls, file: Path, wanted: dict[str, Any]) -> "Measured | None":
        """None if it has not been measured, or with other settings, on other data, or by another version."""
        saved = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if not saved:
            return None
        try:  # settings that there were not yet had the value that is now their default
            saved["settings"] = to_dict(from_dict(saved["settings"]))
        except ConfigError:  # it has settings that are no more
            return None
        if {name: saved.get(name) for name in wanted} != wanted:
            return None
        return cls(from_json(saved["reports"]), saved["ranks"], saved["steps"])


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


def evaluate_run(name: str, folder: Path, config: Config, data: Data) -> tuple[Results, Run]:
    """Train what is not trained yet; the measures of all its ways to search, and the answers of the first."""
    check_same_run(folder, config, data.dataset.name)
    train(data.dataset, folder, config, resume=True)
    if name == "dense":
        reports, answers = evaluate_dense(folder, data.dataset, data.splits)
        return {name: reports}, answers
    ways = WAYS | {"asi-by-docids": BY_DOCIDS} if name == "asi" else {name: {}}
    with Index.load(folder, search=config.search) as index:
        results, found = evaluate_ways(index, data.dataset, data.splits, ways)
    return results, found[name]


def measured_bm25(data: Data) -> Measured:
    lexical = LexicalRetriever(data.dataset.documents())
    reports = {split: evaluate_documents(lexical, *data.dataset.judged(split))[0] for split in data.splits}
    return Measured({"bm25": reports}, {}, 0)


def measured_system(name: str, data: Data, out: Path, minutes: float, seed: int, steps: int | None) -> Measured:
    """The measures of a run, kept or trained for; with the `steps` that are given, or as many as the minutes allow."""
    if name == "bm25":
        measured = measured_bm25(data)
        measured.save(out / data.name / "bm25.json", {"data": data.fingerprint})
        return measured
    base = preset("docids") if name == "docids" else with_overrides(Config(), DENSE if name == "dense" else ())
    length = f"train.minutes={minutes}" if steps is None else f"train.steps={steps}"
    config = with_overrides(base, [length, f"train.seed={seed}", *data.settings])
    folder = out / data.name / f"{name}-{minutes:g}-{seed}"
    kept = folder.with_name(f"{folder.name}.json")
    wanted = {"data": data.fingerprint, "settings": to_dict(config), "format": FORMAT_VERSION}
    if name == "asi":
        wanted["search"] = SEARCH
    if (known := Measured.load(kept, wanted)) is not None:
        return known
    results, answers = evaluate_run(name, folder, config, data)
    trained = RunState.load(RunFolder(folder)).steps
    assert trained is not None
    measured = Measured(results, {split: ranks_of(answers, data, split) for split in data.splits}, trained)
    measured.save(kept, wanted)
    return measured


def ranks_of(answers: Run, data: Data, split: str) -> list[int]:
    found = reciprocal_ranks(answers, data.dataset.judged(split)[1]).values()
    return [round(1 / value) if value else 0 for value in found]


def chances_of(ours: Measured, theirs: Measured) -> dict[str, float]:
    """For every split how likely so large a difference of MRR@10 is by chance."""

    def reciprocal(ranks: list[int]) -> np.ndarray:
        return np.array([1 / rank if rank else 0.0 for rank in ranks])

    return {
        split: randomisation_test(reciprocal(ranks), reciprocal(theirs.ranks[split]))
        for split, ranks in ours.ranks.items()
    }


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


def verdict(met: bool) -> str:
    return "met" if met else "missed"


def rows_of(data: str, seed: int, results: Results) -> list[str]:
    rows = []
    for system in SHOWN:
        for split, report in results.get(system, {}).items():
            docid = f"{report.docid['R@10']:.3f}" if report.docid else "-"
            document = [f"{report.document[name]:.3f}" for name in ("R@1", "R@10", "MRR@10")]
            rows.append("| " + " | ".join([data, str(seed), system, split, docid, *document]) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--dense-seeds", type=int, default=1)
    arguments = parser.parse_args()
    table = ["| data | seed | system | split | docid R@10 | R@1 | R@10 | MRR@10 |", "| --- " * 8 + "|"]
    kept, notes = {}, []
    for name in arguments.data:
        data, out, minutes = Data.open(name), arguments.out, arguments.minutes
        first = {system: measured_system(system, data, out, minutes, 0, None) for system in WITH_THE_FIRST_SEED}
        found: list[Results] = [{} for _ in range(arguments.seeds)]
        for measured in first.values():
            found[0] |= measured.results
        for system, seeds in (("asi", arguments.seeds), ("dense", min(arguments.dense_seeds, arguments.seeds))):
            for seed in range(1, seeds):
                found[seed] |= measured_system(system, data, out, minutes, seed, first[system].steps).results
        for seed, results in enumerate(found):
            table += rows_of(data.name, seed, results)
            kept[f"{data.name} {seed}"] = as_json(results)
        chances = chances_of(first["asi"], first["dense"])
        notes += [f"{data.name}: {line}" for line in goals(found, chances)]
        keep(arguments.out / "results.json", kept)
        print("\n".join([*table, "", *notes]), flush=True)


if __name__ == "__main__":
    main()
