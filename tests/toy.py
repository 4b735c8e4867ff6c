"""A toy corpus and a toy encoder: small enough to train in seconds, real enough to learn."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from asi.batches import TrainingPairs, contents, training_texts
from asi.config import Config, ModelConfig, TrainConfig
from asi.datasets import open_dataset
from asi.distributed import Processes
from asi.encoder import load_encoder, load_tokeniser
from asi.features import compute_features
from asi.model import Asi
from asi.objective import AsiObjective
from asi.training import Trainer

COLOURS = ["red", "green", "blue", "black", "white", "yellow"]
THINGS = ["house", "tree", "river", "bird", "horse", "lamp", "stone", "cloud"]
PLACES = ["north", "south", "east", "west"]


def toy_documents() -> list[dict]:
    return [
        {
            "_id": f"{colour}/{thing}",
            "title": f"{colour} {thing}",
            "text": f"a {thing} that is {colour} stands in the {PLACES[(i + j) % len(PLACES)]}",
        }
        for i, colour in enumerate(COLOURS)
        for j, thing in enumerate(THINGS)
    ]


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_beir(folder: Path) -> None:
    """48 documents in BEIR layout; of six, no query is in train."""
    documents = toy_documents()
    draw = random.Random(0)
    queries, splits = [], {"train": [], "test": [], "test_unseen": []}
    for i, document in enumerate(documents):
        colour, thing = document["title"].split()
        texts = [
            f"{thing} {colour}",
            f"find {colour} {thing}",
            f"the {thing} is {colour}",
            f"where is {colour} {thing}",
        ]
        draw.shuffle(texts)
        for j, text in enumerate(texts):
            split = "test_unseen" if i % 8 == 7 else "test" if j == 0 else "train"
            queries.append({"_id": f"q{i}-{j}", "text": text})
            splits[split].append((f"q{i}-{j}", document["_id"]))
    write_lines(folder / "corpus.jsonl", documents)
    write_lines(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    for split, pairs in splits.items():
        rows = "".join(f"{query}\t{key}\t1\n" for query, key in pairs)
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)


WORDS = ("find", "the", "is", "where", "a", "that", "stands", "in", "thing", *COLOURS, *THINGS, *PLACES)


def write_encoder(folder: Path) -> None:
    """A BERT of two layers and width 32 with random weights, as a Hugging Face folder."""
    from transformers import BertConfig, BertModel

    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(specials + WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    model = BertModel(config)
    model.embeddings.word_embeddings.weight.data.normal_()  # words stand out: the mean of the states is a bag of words
    model.save_pretrained(folder)
    write_tokeniser(folder, specials, "[CLS] $A [SEP]")


def write_t5(folder: Path) -> None:
    """A T5 encoder of the same size. Its texts begin at once."""
    from transformers import T5Config, T5EncoderModel

    specials = ("<pad>", "<unk>", "</s>")
    torch.manual_seed(0)
    model = T5EncoderModel(
        T5Config(vocab_size=len(specials + WORDS), d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=64)
    )
    model.save_pretrained(folder)
    write_tokeniser(folder, specials, "$A </s>")


def write_tokeniser(folder: Path, specials: tuple[str, ...], template: str) -> None:
    """Words as tokens; the second of the special ones stands for unknown words."""
    vocabulary = {word: i for i, word in enumerate(specials + WORDS)}
    tokeniser = Tokenizer(models.WordLevel(vocabulary, unk_token=specials[1]))
    tokeniser.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(special, vocabulary[special]) for special in specials[2:]]
    tokeniser.post_processor = processors.TemplateProcessing(template, special_tokens=ends)
    tokeniser.save(str(folder / "tokenizer.json"))


def toy_settings(encoder: Path) -> Config:
    return Config(
        model=ModelConfig(
            encoder=str(encoder), max_length=16, frozen_layers=2, adapter=64, m=3, V=16, decoder_width=32
        ),
        train=TrainConfig(
            steps=150,
            batch=32,
            chunk=32,
            generation_batch=16,
            docid_every=2,
            token_batch=11,
            lr=3e-3,
            adapter_decay=0.05,  # this encoder knows nothing that vectors should stay near to
            checkpoint_every=20,
            log_every=10,
            health_every=50,
        ),
    )


def train_toy(path: Path, beir: Path, config: Config) -> None:
    from asi.datasets import open_dataset
    from asi.run import train

    train(open_dataset(str(beir)), path, config, data=str(beir))


def log_likelihood(log_probs: torch.Tensor, codes: list[int], *, ends: bool) -> float:
    """Of one docid, by hand, from log-probabilities (1, L, V): all its codes, or those up to the first 0."""
    length = codes.index(0) + 1 if ends and 0 in codes else len(codes)
    return sum(float(log_probs[0, i, code].detach()) for i, code in enumerate(codes[:length]))


def build_trainer(config: Config, beir: Path, folder: Path, dtype: torch.dtype = torch.float64) -> Trainer:
    """Not trained yet; in double precision, so that equal computations come out equal."""
    torch.manual_seed(0)
    texts = training_texts(open_dataset(str(beir)))
    model = Asi(load_encoder(folder, config.model.frozen_layers), config.model)
    tokenise = load_tokeniser(folder, 16)
    queries = compute_features(model, tokenise(texts.queries), keep_states=True)
    documents = compute_features(model, tokenise(contents(texts.documents)), keep_states=True)
    if dtype == torch.float64:
        model.double()
        queries, documents = (
            f._replace(
                **{n: getattr(f, n).astype(np.float64) for n in ("pooled", "states") if getattr(f, n) is not None}
            )
            for f in (queries, documents)
        )
    pairs = TrainingPairs(texts.pairs, config.train.seed, config.train.batch)
    return Trainer(
        AsiObjective(model, queries, documents, pairs, config), config.train, Processes(0, 1, torch.device("cpu"))
    )
