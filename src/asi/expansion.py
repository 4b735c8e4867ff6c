"""Query expansion: pseudo queries for documents that have few or none, as more training pairs (DocT5Query's idea).

Any Hugging Face seq2seq model will do. Where none is at hand, a small one of our own is trained (see `generator`).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from asi.batches import TrainingTexts, contents, training_texts
from asi.checkpoint import read_manifest
from asi.config import ModelConfig, TrainConfig
from asi.datasets import Dataset
from asi.errors import ConfigError, Interrupted
from asi.features import Progress
from asi.folders import write_atomically
from asi.generator import (
    KIND,
    LEAST_STEPS,
    MOST_EPOCHS,
    GeneratorConfig,
    TrainedGenerator,
    load_generator,
    origin_of,
    train_generator,
)
from asi.lengths import suited_length
from asi.records import Document
from asi.run import Reporter

DEFAULT_STEPS = 600  # of a generator's training, where the pairs are enough for them
TRAINING_BATCH = 64
DOCUMENTS_PER_BATCH = 128


class QueryGenerator(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def decoder(self) -> nn.Module:
        """What was trained to write."""

    def generate(self, texts: Sequence[str], count: int, seed: int) -> list[list[str]]:
        """`count` sampled queries for each text."""


class Seq2SeqGenerator:
    """A Hugging Face encoder-decoder, such as a DocT5Query."""

    def __init__(self, folder: str, device: str = "cpu") -> None:
        try:
            from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
        except ImportError:
            raise ConfigError(
                "a seq2seq model needs transformers; run: pip install 'auto-search-indexer[transformers]'"
            ) from None
        self.name = Path(folder).name
        try:
            self.tokeniser = AutoTokenizer.from_pretrained(folder)
            self.decoder = AutoModelForSeq2SeqLM.from_pretrained(folder).to(device).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder!r} is no seq2seq model: {str(error).splitlines()[0]}") from error

    def generate(self, texts: Sequence[str], count: int, seed: int) -> list[list[str]]:
        found: list[list[str]] = []
        torch.manual_seed(seed)
        for start in range(0, len(texts), 16):
            part = list(texts[start : start + 16])
            tokens = self.tokeniser(part, padding=True, truncation=True, max_length=512, return_tensors="pt")
            with torch.inference_mode():
                output = self.decoder.generate(
                    **tokens.to(self.decoder.device), max_new_tokens=64, do_sample=True, top_k=10,
                    num_return_sequences=count,
                )  # fmt: skip
            written = self.tokeniser.batch_decode(output, skip_special_tokens=True)
            found += [written[i * count : (i + 1) * count] for i in range(len(part))]
        return found


def find_generator(name: str, device: torch.device) -> QueryGenerator:
    """A folder that `train_generator` has made, or a Hugging Face seq2seq folder or name."""
    manifest = Path(name) / "manifest.json"
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8")).get("kind") == KIND:
        return load_generator(Path(name), device)
    return Seq2SeqGenerator(name, str(device))


class Draft:
    """The pseudo queries of a pairs file that is not finished: a line for each batch of documents, in their order.

    What a draft with the same origin has already is not made again.
    """

    def __init__(self, pairs: Path, origin: str) -> None:
        self.path = pairs.with_name(f".{pairs.name}.draft")
        self.batches: list[list[list[str]]] = []
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []
        whole = [line for line in lines if line.endswith(b"\n")]  # a process may have died in the middle of the last
        if whole and json.loads(whole[0]) == origin:
            self.batches = [json.loads(line) for line in whole[1:]]
        else:
            whole = [json.dumps(origin).encode() + b"\n"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"".join(whole))

    def append(self, batch: list[list[str]]) -> None:
        self.batches.append(batch)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(batch) + "\n")


def origin_of_queries(generator: QueryGenerator, documents: Sequence[Document], count: int, seed: int) -> str:
    """Changes with anything that decides the pseudo queries."""
    digest = hashlib.sha256(json.dumps([count, seed, contents(documents)]).encode())
    for weight in generator.decoder.state_dict().values():
        digest.update(weight.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def expand(
    generator: QueryGenerator,
    documents: Sequence[Document],
    draft: Draft,
    count: int,
    seed: int,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Document]]:
    """Pseudo queries with their documents; equal ones of a document only once, empty ones not at all."""
    for number, start in enumerate(range(0, len(documents), DOCUMENTS_PER_BATCH)):
        part = documents[start : start + DOCUMENTS_PER_BATCH]
        if number == len(draft.batches):
            draft.append(generator.generate(contents(part), count, seed + start))
        for document, queries in zip(part, draft.batches[number], strict=True):
            for query in dict.fromkeys(filter(None, map(str.strip, queries))):
                yield query, document
        if progress is not None:
            progress(start + len(part), len(documents))


def write_pairs(
    generator: QueryGenerator,
    documents: Sequence[Document],
    out: Path,
    count: int,
    seed: int,
    reporter: Reporter,
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Write pseudo queries as a pairs file; a document's text stands in its first pair only.

    Stopped, it leaves a draft, and goes on from there.
    """

    def advance(done: int, _: int) -> None:
        reporter.advance(done)
        if stopping():
            raise Interrupted(f"{out} is not finished; run the same command again to go on")

    draft = Draft(out, origin_of_queries(generator, documents, count, seed))
    reporter.stage(f"writing queries with {generator.name}", len(documents))
    lines, seen = [], set()
    for query, document in expand(generator, documents, draft, count, seed, advance):
        is_first = document.key not in seen
        seen.add(document.key)
        record = {"query": query, "key": document.key, "document": document.text if is_first else ""}
        lines.append(json.dumps(record | ({"title": document.title} if is_first else {}), ensure_ascii=False) + "\n")
    write_atomically(out, "".join(lines))
    draft.path.unlink()
    return len(lines)


def pseudo_queries_path(folder: Path, count: int) -> Path:
    return folder / f"pseudo-queries-{count}.jsonl"


def pseudo_queries_file(
    dataset: Dataset,
    folder: Path,
    train: TrainConfig,
    count: int,
    device: torch.device,
    reporter: Reporter,
    stopping: Callable[[], bool] = lambda: False,
    cache: Path | None = None,
    config: GeneratorConfig | None = None,
) -> Path:
    """The pairs file in `folder` with `count` pseudo queries of every document, from a generator that is trained on the
    data set's pairs; what is there already is not made again."""
    file, place = pseudo_queries_path(folder, count), folder / "generator"
    if file.exists():
        texts = training_texts(dataset)
        wanted = origin_of(texts, dataset.name, config or suited_config(texts), train)
        if read_manifest(place).get("origin") != wanted:
            raise ConfigError(f"{file} was made from other data or with other settings; choose another --out")
        return file
    generator = train_on_pairs(dataset, place, train, device, reporter, stopping, cache, config)
    write_pairs(generator, list(dataset.documents()), file, count, train.seed, reporter, stopping)
    return file


def queries_by_document(dataset: Dataset) -> dict[str, list[str]]:
    """The training queries of each document, by its key; equal ones once."""
    queries, qrels = dataset.judged("train")
    texts = {query.key: query.text for query in queries}
    found: dict[str, dict[str, None]] = {}
    for qrel in qrels:
        found.setdefault(qrel.document, {})[texts[qrel.query]] = None
    return {key: list(own) for key, own in found.items()}


def with_queries(documents: Sequence[Document], queries: Mapping[str, Sequence[str]]) -> list[Document]:
    """The documents with their pseudo queries behind their texts."""
    return [
        Document(document.key, " ".join([document.text, *queries.get(document.key, ())]), document.title)
        for document in documents
    ]


def suited_config(texts: TrainingTexts, encoder: str = ModelConfig.encoder) -> GeneratorConfig:
    return GeneratorConfig(encoder, suited_length(encoder, texts.documents))


def suited_steps(texts: TrainingTexts) -> int:
    """Few pairs would be learnt by heart."""
    return min(DEFAULT_STEPS, max(LEAST_STEPS, MOST_EPOCHS * len(texts.pairs) // TRAINING_BATCH))


def generator_training(seed: int, *, steps: int | None = None, minutes: float | None = None) -> TrainConfig:
    batch = TRAINING_BATCH
    return TrainConfig(steps=steps, minutes=minutes, batch=batch, chunk=batch, lr=1e-3, seed=seed, checkpoint_every=200)


def train_on_pairs(
    dataset: Dataset,
    folder: Path,
    train: TrainConfig,
    device: torch.device,
    reporter: Reporter,
    stopping: Callable[[], bool] = lambda: False,
    cache: Path | None = None,
    config: GeneratorConfig | None = None,
) -> TrainedGenerator:
    """A generator that is trained on a data set's pairs, and kept in `folder`."""
    texts = training_texts(dataset)
    reporter.stage("encoding documents", len(np.unique(texts.pairs[:, 1])))
    return train_generator(
        texts, dataset.name, folder, config or suited_config(texts), train, device=device, listener=reporter.step,
        announce=partial(reporter.stage, "training a query generator"), stopping=stopping, cache=cache,
        progress=lambda done, _: reporter.advance(done),
    )  # fmt: skip
