import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from asi.batches import training_texts
from asi.datasets import WithMorePairs, open_dataset
from asi.errors import DataError, Interrupted
from asi.expansion import DOCUMENTS_PER_BATCH, write_pairs
from asi.generator import LONGEST_QUERY, CopyDecoder, GeneratorConfig, sample_queries
from asi.holdout import HeldOut
from asi.records import Document
from asi.run import Silence


def asi(*arguments, cwd):
    command = [sys.executable, "-m", "asi", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return CopyDecoder(
        GeneratorConfig("", max_length=16, width=16, heads=2), 8, np.array([2, 3, 5, 7]), pieces=11
    ).eval()


def distribution(decoder, hidden, states, mask, source):
    """The probability (B, L, pieces) of every word piece."""
    probabilities, pieces = decoder.choices(hidden, decoder.copy_key(states), mask, source)
    return torch.zeros(*pieces.shape[:2], 11).scatter_add_(2, pieces, probabilities)


def test_writing_and_copying_share_one_probability(decoder):
    states, source = torch.randn(3, 5, 8), torch.tensor([[2, 4, 5, 9, 3], [2, 5, 5, 3, 0], [2, 3, 0, 0, 0]])
    mask = source > 0
    previous = torch.tensor([[2, 5], [2, 7], [2, 3]])
    with torch.no_grad():
        hidden = decoder(states, mask, previous)
        whole = distribution(decoder, hidden[:, -1:], states, mask, source)[:, 0]
    assert whole.sum(1) == pytest.approx(torch.ones(3))
    assert (whole[0] > 0).nonzero().flatten().tolist() == [2, 3, 4, 5, 7, 9]  # the vocabulary and the document's own
    rows = torch.full((11,), -1)
    rows[decoder.vocabulary] = torch.arange(4)
    for piece in range(11):
        target = torch.full((3, 1), piece)
        with torch.no_grad():
            alone = decoder.likelihood(hidden[:, -1:], states, mask, source, target, rows[target])
        assert torch.allclose(alone[:, 0], whole[:, piece], atol=1e-6)


def test_tables_start_as_the_encoders_words(decoder):
    """Pieces that are alike for the encoder are alike in both tables; their sizes are those of a random start."""
    vectors = torch.randn(11, 20, generator=torch.Generator().manual_seed(0))
    vectors[5] = vectors[4]
    decoder.start(vectors)
    table = decoder.embeddings.weight.detach()
    assert torch.allclose(table[5], table[4], atol=1e-6)
    assert torch.allclose(decoder.output.weight, table[decoder.vocabulary])
    assert float(table.square().mean().sqrt()) == pytest.approx(0.02, rel=1e-3)


def test_sampling_step_by_step_follows_the_whole_sequence(decoder):
    """With only one likely piece at each place, sampling must walk the path that the whole-sequence pass prefers, for
    all queries of a document, also when documents whose queries are finished are no longer computed."""
    draw = torch.Generator().manual_seed(1)
    states, mask = torch.randn(12, 6, 8, generator=draw), torch.arange(6) < torch.arange(12)[:, None] % 4 + 3
    source = torch.tensor([[2, 4, 6, 8, 9, 3]] * 12) * mask
    with torch.no_grad():
        decoder.positions *= 50
        decoder.embeddings.weight *= 50
        decoder.blocks[0].memory.weight *= 5
        decoder.output.weight *= 1000
        decoder.gate.bias -= 100
    sampled = sample_queries(decoder, states, mask, source, 2, 3, 2, torch.Generator().manual_seed(0))
    assert sampled.shape[2] <= LONGEST_QUERY + 1
    assert torch.equal(sampled[:, 0], sampled[:, 1])
    pieces = sampled[:, 0]
    with torch.no_grad():
        best = distribution(decoder, decoder(states, mask, pieces[:, :-1]), states, mask, source).argmax(2)
    ended = (pieces[:, :-1] == 3).cummax(1).values
    assert len(set(ended.sum(1).tolist())) > 4  # they end at different places, so that some are left out on the way
    assert torch.equal(torch.where(ended, 3, best), pieces[:, 1:])


def test_expand_and_train_with_it(beir, encoder_folder, tmp_path):
    done = asi("expand", beir, "--train", beir, "--out", "p.jsonl", "--steps", 80, "--count", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    by_key = {}
    for record in records:
        by_key.setdefault(record["key"], []).append(record["query"])
    assert len(by_key) == 48  # the documents without a query too
    assert all(1 <= len(queries) <= 3 and len(set(queries)) == len(queries) for queries in by_key.values())
    named = [set(record["key"].split("/")) & set(record["query"].split()) for record in records]
    assert np.mean([len(words) == 2 for words in named]) > 0.5  # it has learnt what these queries are made of
    again = asi("expand", beir, "--model", "p.generator", "--out", "q.jsonl", "--count", 3, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "q.jsonl").read_text() == (tmp_path / "p.jsonl").read_text()
    sets = [f"model.encoder={encoder_folder}", "model.max_length=16", "model.adapter=8", "train.batch=16"]
    settings = [word for setting in sets for word in ("--set", setting)]
    trained = asi("train", beir, "--more", "p.jsonl", "--out", "run", "--steps", 2, *settings, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert asi("expand", beir, "--out", "x.jsonl", cwd=tmp_path).stderr.startswith("Error: give either --model")
    zipped = asi("expand", beir, "--train", beir, "--out", "x.jsonl.gz", cwd=tmp_path)
    assert zipped.stderr.startswith("Error: --out must be a file whose name ends in .jsonl")
    page = asi("report", "run", beir, "--out", "page", cwd=tmp_path)
    assert page.returncode == 0, page.stderr
    assert f"on {len(records)} further pairs" in (tmp_path / "page" / "report.md").read_text()


def test_more_pairs_are_trained_on_and_nothing_else(beir, tmp_path):
    (tmp_path / "more.jsonl").write_text(
        json.dumps({"query": "crimson home", "key": "red/house", "document": "x"}) + "\n"
    )
    plain = open_dataset(str(beir))
    both = WithMorePairs(plain, str(tmp_path / "more.jsonl"))
    texts, own = training_texts(both), training_texts(plain)
    query, document = texts.pairs[-1]
    assert (texts.queries[query], texts.documents[document].key) == ("crimson home", "red/house")
    assert texts.own_pairs.tolist() == own.pairs.tolist() == texts.pairs[:-1].tolist()
    assert all(both.judged(split) == plain.judged(split) for split in plain.splits)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"query": "a", "key": "pink/house", "document": "x"}) + "\n")
    with pytest.raises(DataError, match="pink/house"):
        WithMorePairs(plain, str(tmp_path / "bad.jsonl")).further()


class Scribe:
    """A generator that remembers what it was asked for."""

    name = "scribe"

    def __init__(self, weight):
        self.decoder = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.decoder.weight, weight)
        self.asked = []

    def generate(self, texts, count, seed):
        self.asked.append(texts[0])
        return [[f"{text} {seed} {i}" for i in range(count)] for text in texts]


def test_writing_queries_goes_on_where_it_was_stopped(tmp_path):
    documents = [Document(f"k{i}", f"text {i}", "") for i in range(2 * DOCUMENTS_PER_BATCH + 1)]
    whole, out, draft = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", tmp_path / ".out.jsonl.draft"
    write_pairs(Scribe(1), documents, whole, 2, 0, Silence())

    def write(scribe, seed=0, batches=3):
        """Stopped after so many batches; returns which ones were asked for."""
        stops = iter([False] * (batches - 1) + [True])
        if batches < 3:
            with pytest.raises(Interrupted):
                write_pairs(scribe, documents, out, 2, seed, Silence(), lambda: next(stops))
        else:
            write_pairs(scribe, documents, out, 2, seed, Silence())
        return [int(text.split()[1]) // DOCUMENTS_PER_BATCH for text in scribe.asked]

    assert write(Scribe(1), batches=1) == [0]
    assert write(Scribe(1), seed=9, batches=1) == [0]  # another seed: other queries
    assert write(Scribe(2), seed=9, batches=1) == [0]  # another generator
    assert write(Scribe(1), batches=2) == [0, 1]
    draft.write_bytes(draft.read_bytes()[:-5])  # killed while it wrote the second batch
    assert write(Scribe(1)) == [1, 2]
    assert out.read_text() == whole.read_text()
    assert not draft.exists()


def test_a_seq2seq_folder_writes_queries(encoder_folder, beir, tmp_path):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    tokeniser = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(encoder_folder / "tokenizer.json")),
        pad_token="[PAD]",
        eos_token="[SEP]",
    )
    tokeniser.save_pretrained(tmp_path / "t5")
    config = T5Config(
        vocab_size=len(tokeniser), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    done = asi("expand", beir, "--model", tmp_path / "t5", "--out", "p.jsonl", "--count", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) > 48


@pytest.mark.parametrize("pairs", [None, 20])
def test_held_out_queries_are_not_trained_on(beir, pairs):
    held = HeldOut(open_dataset(str(beir)), pairs)
    parts = {split: held.judged(split) for split in held.splits}
    queries = {split: {query.key for query in part[0]} for split, part in parts.items()}
    documents = {split: {qrel.document for qrel in part[1]} for split, part in parts.items()}
    assert pairs in (None, len(parts["train"][1]))
    assert not queries["train"] & (queries["dev"] | queries["dev_unseen"])
    assert documents["dev"] <= documents["train"]
    assert documents["dev_unseen"]
    assert not documents["dev_unseen"] & documents["train"]
