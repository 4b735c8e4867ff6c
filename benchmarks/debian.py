"""A data set to try recipes on that none was chosen on: the descriptions of Debian's packages, as a BEIR folder.

apt-get -o Acquire::Languages=en update        # on Debian, once: apt's lists with the long descriptions
python benchmarks/debian.py --out FOLDER [--documents 5000 --pairs 900]

A document is a package's name and long description; its queries are the short description, and one sentence that is
taken out of a description of four or more. `test` has one of the two queries of 2,000 packages, the other is trained
on; `test_unseen` has 2,000 packages without a training query. Many packages of one source are nearly the same text.
With `--documents` and `--pairs` it is a small part of it: so many documents, so many pairs to train on, and at most 800
of the other queries in either test split.
"""

import argparse
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

LISTS = Path("/var/lib/apt/lists")
HELD_OUT = 2000  # queries of each test split
FEW = 800  # of a part of it
SHORTEST = 40  # characters of a description that is kept
FEWEST_SENTENCES = 4  # of a description that one is taken out of
ASKED = range(25, 150)  # characters of a sentence that is asked

Pair = tuple[str, str]  # query, key


def descriptions() -> Iterator[tuple[str, str, str]]:
    """Name, short and long description of every package that apt knows."""
    files = sorted(LISTS.glob("*_dists_*_main_i18n_Translation-en*"), key=lambda file: file.stat().st_size)
    if not files:
        raise SystemExit(f"no long descriptions in {LISTS}; run: apt-get -o Acquire::Languages=en update")
    helper = ["/usr/lib/apt/apt-helper", "cat-file", str(files[-1])]  # the largest: the distribution's own
    for block in subprocess.run(helper, capture_output=True, text=True, check=True).stdout.split("\n\n"):
        name = re.search(r"^Package: (.*)$", block, re.MULTILINE)
        found = re.search(r"^Description-en: (.*(?:\n .*)*)", block, re.MULTILINE)
        if name and found:
            short, *lines = found.group(1).split("\n")
            words = [line.strip() for line in lines if line.strip() != "."]
            yield name.group(1), short.strip(), " ".join(" ".join(words).split())


def documents_and_queries(draw: random.Random) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Texts and queries by package; equal texts and equal queries count once."""
    texts: dict[str, str] = {}
    queries: dict[str, list[str]] = {}
    seen: set[str] = set()
    asked: set[str] = set()
    for name, short, text in descriptions():
        if len(text) < SHORTEST or text in seen:
            continue
        seen.add(text)
        sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)
        own = [short]
        if len(sentences) >= FEWEST_SENTENCES:
            middle = [i for i, sentence in enumerate(sentences) if i and len(sentence) in ASKED]
            own += [sentences.pop(draw.choice(middle))] if middle else []
        texts[name] = " ".join(sentences)
        queries[name] = [query for query in own if query.lower() not in asked]
        asked |= {query.lower() for query in own}
    return texts, queries


def splits(queries: dict[str, list[str]], draw: random.Random) -> dict[str, list[Pair]]:
    names = draw.sample([name for name in queries if queries[name]], sum(map(bool, queries.values())))
    new, others = names[:HELD_OUT], names[HELD_OUT:]
    both = [name for name in others if len(queries[name]) > 1][:HELD_OUT]
    held_out = {name: draw.choice(queries[name]) for name in both}
    trained = [(query, name) for name in others for query in queries[name] if query != held_out.get(name)]
    return {
        "train": trained,
        "test": [(query, name) for name, query in held_out.items()],
        "test_unseen": [(queries[name][0], name) for name in new],
    }


def small_part(found: dict[str, list[Pair]], kept: set[str], pairs: int, draw: random.Random) -> dict[str, list[Pair]]:
    """Of the kept packages, with so few training pairs: what is left over is asked."""
    own = {split: [pair for pair in every if pair[1] in kept] for split, every in found.items()}
    trained = draw.sample(own["train"], min(pairs, len(own["train"])))
    chosen, known = set(trained), {name for _, name in trained}
    rest = [pair for every in own.values() for pair in every if pair not in chosen]
    rest = draw.sample(rest, len(rest))
    return {
        "train": trained,
        "test": [pair for pair in rest if pair[1] in known][:FEW],
        "test_unseen": [pair for pair in rest if pair[1] not in known][:FEW],
    }


def write(out: Path, texts: dict[str, str], found: dict[str, list[Pair]]) -> None:
    (out / "qrels").mkdir(parents=True)
    records = ({"_id": name, "title": name.replace("-", " "), "text": text} for name, text in texts.items())
    (out / "corpus.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    numbers = {pair: f"q{number}" for number, pair in enumerate(pair for every in found.values() for pair in every)}
    asked = ({"_id": number, "text": query} for (query, _), number in numbers.items())
    (out / "queries.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in asked))
    for split, every in found.items():
        rows = "".join(f"{numbers[pair]}\t{pair[1]}\t1\n" for pair in every)
        (out / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int)
    parser.add_argument("--pairs", type=int, default=1000)
    arguments = parser.parse_args()
    draw = random.Random(0)
    texts, queries = documents_and_queries(draw)
    found = splits(queries, draw)
    if arguments.documents is not None:
        kept = set(draw.sample(sorted(texts), min(arguments.documents, len(texts))))
        texts = {name: text for name, text in texts.items() if name in kept}
        found = small_part(found, kept, arguments.pairs, draw)
    write(arguments.out, texts, found)
    counts = ", ".join(f"{split} {len(every)}" for split, every in found.items())
    print(f"{len(texts)} documents; queries: {counts}")


if __name__ == "__main__":
    main()
