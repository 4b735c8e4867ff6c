"""Compare recipes on queries and documents held out of train; the test splits are not looked at.

python benchmarks/recipes.py --out FOLDER --data hpo --data pydoc --steps 400 \
    --recipe default --recipe "longer: model.m=3 loss.match=1"

A recipe is a name and overrides of the default settings; one whose name begins with `dense` trains the ranking vectors
alone, the bi-encoder to beat, with `docids` the preset of that name (vectors are kept to be measured too). The word
`more` among the overrides trains on pseudo queries too. `--pairs 800` leaves so few to train on.
Runs that are finished are not trained again; every row goes to FOLDER/recipes.jsonl too.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from bi_encoder import DENSE

from asi.batches import contents
from asi.config import Config, preset, with_overrides
from asi.datasets import Dataset, WithMorePairs, open_dataset
from asi.distributed import choose_device
from asi.evaluation import DocidMap, judged_queries, share_of_equal_docids
from asi.expansion import DEFAULT_STEPS, generator_training, pseudo_queries_file
from asi.features import compute_features
from asi.holdout import HeldOut
from asi.index import Index
from asi.indexing import assign
from asi.metrics import docid_scores, document_level, relevant_keys
from asi.ranking import unpack
from asi.records import Hit
from asi.run import Silence, check_same_run, train
from asi.systems.exact import ExactRetriever

QUERIES = 700  # of a split, at most


def ways(documents: int) -> dict[str, dict]:
    return {
        "asi": {"mode": "constrained"},
        "vectors": {"mode": "constrained", "token_weight": 0.0},
        "more": {"mode": "constrained", "candidates": documents // 10},
        "one-pass": {"mode": "one-pass", "candidates": 100},
        "docids": {"mode": "one-pass", "ranking": "docid", "candidates": 600},
    }


def measure(index: Index, dataset: HeldOut, split: str, cache: Path) -> dict:
    queries, qrels = dataset.judged(split)
    judged = judged_queries(queries, qrels)[:QUERIES]
    kept = {query.key for query in judged}
    qrels = [qrel for qrel in qrels if qrel.query in kept]
    encoded = index.searcher.encode([query.text for query in judged])
    row: dict = {}

    def documents(name: str, answers: list) -> None:
        scores = document_level(dict(zip((query.key for query in judged), answers, strict=True)), qrels)
        row[name] = [round(scores[key], 3) for key in ("R@1", "R@10", "MRR@10")]

    for name, settings in ways(len(index)).items():
        searcher = index.configured(**settings)
        if searcher.lacks() is not None:
            continue
        answers = [None] * len(judged)
        for rows, query in encoded:
            for place, found in zip(rows, searcher.answer(query, 10), strict=True):
                answers[place] = [hit for hit, _ in found]
        documents(name, answers)
    snapshot = index.store.snapshot()
    stored = [document for document in index.store.documents(snapshot.numbers) if document is not None]
    keys = [document.key for document in stored]
    x = np.empty((len(judged), index.loaded.model.encoder.shape.width), np.float32)
    for rows, query in encoded:
        x[rows] = query.x[: len(rows)].cpu().numpy()
    texts = [query.text for query in judged]
    tokens = index.loaded.tokenise(contents(dataset.corpus))
    features = compute_features(index.loaded.model, tokens, keep_states=False, cache=cache)
    vectors = assign(index.loaded.model, features).vectors
    exact = ExactRetriever([document.key for document in dataset.corpus], vectors, lambda _: x)
    documents("exact", exact.search(texts, 10))
    asked = compute_features(index.loaded.model, index.loaded.tokenise(texts), keep_states=False).pooled
    untrained = ExactRetriever([document.key for document in dataset.corpus], features.pooled, lambda _: asked)
    documents("encoder", untrained.search(texts, 10))
    rows = unpack(index.store.vectors(snapshot.numbers, index.searcher.ranked))
    whole = x / np.linalg.norm(x, axis=1, keepdims=True) @ rows.vectors.T + rows.bias
    best = np.argsort(-whole, axis=1, kind="stable")[:, :10]
    documents("exact-known", [[Hit(keys[row], -float(place)) for place, row in enumerate(own)] for own in best])
    docid_map = DocidMap(index.searcher)
    relevant = [docid_map.rows_of(keys) for keys in relevant_keys(qrels).values()]
    generating = index.configured(mode="constrained")
    searcher = generating if generating.lacks() is None else index.configured(mode="one-pass")
    scores = docid_scores(docid_map.buckets, searcher.docids(encoded, 10), relevant)
    row["docid"] = [round(scores.docid[key], 3) for key in ("R@1", "R@10")]
    if generating.lacks() is None:
        scores = docid_scores(docid_map.buckets, index.configured(mode="beam").docids(encoded, 10), relevant)
        row["docid by plain beam"] = [round(scores.docid[key], 3) for key in ("R@1", "R@10")]
    row["acc"] = round(share_of_equal_docids(index.searcher.head_docids(encoded), docid_map.docids, relevant), 3)
    health = docid_map.health
    row["d_per_id"], row["largest"] = round(health.d_per_id, 2), round(health.largest_share, 4)
    row["perplexity"] = [round(value) for value in health.perplexity]
    return row


def with_pseudo_queries(dataset: HeldOut, folder: Path, cache: Path) -> Dataset:
    """What is held out stays so: the generator learns from the rest."""
    file = pseudo_queries_file(
        dataset,
        folder,
        generator_training(seed=0, steps=DEFAULT_STEPS),
        count=3,
        device=choose_device(None),
        reporter=Silence(),
        cache=cache,
    )
    return WithMorePairs(dataset, str(file))


def base_of(recipe: str) -> Config:
    if recipe.startswith("docids"):
        return with_overrides(preset("docids"), ["index.vectors=true"])
    return with_overrides(Config(), DENSE if recipe.startswith("dense") else ())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--recipe", action="append", required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int)
    arguments = parser.parse_args()
    for data in arguments.data:
        dataset = HeldOut(open_dataset(data), arguments.pairs)
        for recipe in arguments.recipe:
            name, _, overrides = recipe.partition(":")
            words = overrides.split()
            settings = [word for word in words if word != "more"]
            length = [f"train.steps={arguments.steps}", f"train.seed={arguments.seed}"]
            config = with_overrides(base_of(name), [*length, *settings])
            few = f"-{arguments.pairs}" if arguments.pairs else ""
            out, cache = arguments.out / f"{Path(data).name}{few}", arguments.out / "cache"
            folder = out / f"{name}-{arguments.steps}-{arguments.seed}"
            start = time.monotonic()
            trained_on = with_pseudo_queries(dataset, out, cache) if "more" in words else dataset
            check_same_run(folder, config, trained_on.name)
            train(trained_on, folder, config, resume=True, cache=cache)
            seconds = time.monotonic() - start
            with Index.load(folder, search=config.search) as index:
                for split in ("dev", "dev_unseen"):
                    row = {"data": Path(data).name, "recipe": recipe, "steps": arguments.steps, "split": split}
                    row |= {"pairs": arguments.pairs} if arguments.pairs else {}
                    row |= {"seconds": round(seconds)} | measure(index, dataset, split, cache)
                    print(json.dumps(row), flush=True)
                    with (arguments.out / "recipes.jsonl").open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
