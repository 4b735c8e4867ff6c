import json
from dataclasses import replace

import numpy as np
import pytest
from toy import THINGS, train_toy, write_lines, write_t5

from asi.index import Index
from asi.lengths import suited_length
from asi.records import Document


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """An encoder with room for long texts; it puts one token behind every text."""
    folder = tmp_path_factory.mktemp("t5")
    write_t5(folder)
    return folder


def documents(*words):
    return [Document(str(i), " ".join(["tree"] * n)) for i, n in enumerate(words)]


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ([63, 63, 63, 63, 64], 64),  # one of five does not fit with its end: that many may be cut
        ([63, 63, 63, 64, 64], 256),
        ([2000] * 3, 256),
        ([5], 64),
        ([], 64),
    ],
)
def test_few_tokens_are_read_where_four_of_five_documents_fit(t5, words, tokens):
    assert suited_length(str(t5), documents(*words)) == tokens


def test_an_encoder_with_little_room_reads_what_it_can(encoder_folder):
    assert suited_length(str(encoder_folder), documents(500, 500)) == 64


def test_a_corpus_is_judged_by_documents_from_all_of_its_parts(t5, monkeypatch):
    monkeypatch.setattr("asi.lengths.SAMPLE", 4)
    assert suited_length(str(t5), documents(*[5] * 6, *[100] * 3)) == 256  # looked at: 0, 3, 6
    assert suited_length(str(t5), documents(*[5] * 8, 100)) == 64


def test_a_run_reads_new_documents_as_far_as_those_it_was_trained_on(tmp_path, beir, t5, toy_config):
    """What tells the documents apart stands behind 64 words that all begin with."""
    corpus = tmp_path / "beir"
    corpus.mkdir()
    (corpus / "qrels").symlink_to(beir / "qrels")
    (corpus / "queries.jsonl").symlink_to(beir / "queries.jsonl")
    start = "stands in the north " * 20
    rows = [json.loads(line) for line in (beir / "corpus.jsonl").read_text().splitlines()]
    write_lines(corpus / "corpus.jsonl", [row | {"title": "", "text": start + row["text"]} for row in rows])
    model = replace(toy_config.model, encoder=str(t5), max_length=None)
    train_toy(tmp_path / "run", corpus, replace(toy_config, model=model, train=replace(toy_config.train, steps=60)))
    with Index.load(tmp_path / "run") as index:
        assert index.loaded.config.model.max_length == index.loaded.tokenise.max_length == 256
        index.add([Document("new/" + thing, start + f"a {thing} that is black") for thing in THINGS])
        rows = index.store.vectors(np.array([index.lookup(f"new/{thing}").number for thing in THINGS]))
        assert len({row.tobytes() for row in rows}) == len(THINGS)
