import dataclasses
import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toy import log_likelihood, write_t5

from asi.beam import PrefixTree, beam_search
from asi.datasets import open_dataset
from asi.encoder import TokenisedTexts
from asi.errors import ConfigError, Interrupted
from asi.model import Decoder, Encoded, Generation
from asi.run import Silence
from asi.significance import holm, randomisation_test
from asi.systems import identifiers
from asi.systems.decoders import PrefixAwareDecoder, PrefixAwareGeneration, Shape
from asi.systems.dense import multi_label_margin
from asi.systems.genret import balanced_codes, centred
from asi.systems.identifiers import END, MOST_OF_AN_ADDRESS, numbers_within, padded
from asi.systems.ngrams import BETA, Ngrams, document_scores, ngrams_of, weight_of
from asi.systems.sequences import SequenceObjective, SequenceRetriever, sequence_loss, written
from asi.systems.table import BY_NAME, ROWS, chosen_systems
from asi.systems.windows import LENGTH, TextView
from asi.systems.words import COPYING, WordCodes
from asi.systems.workplace import Terms, Workplace, random_spans, rarest_terms


@pytest.fixture
def workplace(beir, encoder_folder, tmp_path):
    terms = Terms(0.01, str(encoder_folder), max_length=16)
    return Workplace(open_dataset(str(beir)), tmp_path / "compare", terms, torch.device("cpu"), Silence())


@pytest.mark.parametrize("name", ["dpr", "dsi-semantic", "seal", "genret"])
def test_the_random_start_depends_on_the_seed_alone(workplace, monkeypatch, name):
    started = []

    def not_trained(self, name, objective, codes=None):
        started.append({key: weight.clone() for key, weight in objective.model.state_dict().items()})
        raise Interrupted("")

    monkeypatch.setattr(Workplace, "train", not_trained)
    for _ in range(2):  # with nothing computed yet, and with everything that is computed once
        with pytest.raises(Interrupted):
            BY_NAME[name].build(workplace)
    assert all(torch.equal(started[0][key], weight) for key, weight in started[1].items())


# Docids that are made beforehand --------------------------------------------------------------------------------------


def test_new_are_the_documents_that_only_test_unseen_asks_for(workplace):
    trained, test, unseen = (
        {qrel.document for qrel in workplace.dataset.judged(split)[1]} for split in ("train", "test", "test_unseen")
    )
    known = {workplace.keys[row] for row in workplace.known}
    assert known == set(workplace.keys) - (unseen - trained)
    assert trained | test <= known
    assert 0 < len(known) < len(workplace.keys)


def test_equal_texts_are_one_text_of_several_documents(workplace, monkeypatch):
    lists = [["same", "own", "same"] if row < 2 else [f"of {row}"] for row in range(len(workplace.keys))]
    monkeypatch.setitem(vars(workplace), "pseudo_queries", lists)
    texts, pairs, _ = workplace.source("pseudo")
    assert len(set(texts)) == len(texts)
    assert [workplace.known[:2].tolist()] * 2 == [
        [document for text, document in pairs.tolist() if texts[text] == same] for same in ("same", "own")
    ]


def test_atomic_docids_and_numbers_are_only_for_known_documents(workplace):
    atomic = identifiers.atomic(workplace)
    assert sorted(atomic.codes[:, 0].tolist()) == list(range(len(workplace.known)))
    assert atomic.documents.tolist() == workplace.known.tolist()
    numbers = identifiers.numbers(workplace)
    written = {"".join(str(code - 1) for code in row if code != END) for row in numbers.codes.tolist()}
    assert written == {str(number) for number in range(len(workplace.known))}


@pytest.mark.parametrize(("k", "leaf"), [(3, 4), (10, 100), (2, 1)])
def test_semantic_docids_are_paths_of_clusters(workplace, k, leaf):
    made = identifiers.semantic(workplace, k, leaf, shared=True)
    codes = [tuple(code for code in row if code != END) for row in made.codes.tolist()]
    assert len(set(codes)) == len(codes) == len(workplace.keys)  # each its own, new documents too
    assert max(map(max, codes)) <= k == made.V - 1
    if leaf >= len(workplace.keys):
        assert sorted(codes) == sorted(tuple(d + 1 for d in identifiers.digits(n, k)) for n in range(len(codes)))
        return
    vectors = identifiers.unit_vectors(workplace)
    by_first = {}
    for row, code in enumerate(codes):
        by_first.setdefault(code[0], []).append(row)
    assert 2 <= len(by_first) <= k
    within = np.mean([np.var(vectors[rows], axis=0).sum() for rows in by_first.values() if len(rows) > 1])
    assert within < np.var(vectors, axis=0).sum()  # a cluster is tighter than the corpus


def test_numbers_in_a_leaf_follow_the_main_direction_and_none_changes_when_documents_come():
    vectors = np.array([[0.0, 0.1], [3, 0], [1, 0.2], [2, 0], [2.4, 0.1]], np.float32)
    paths = [[] for _ in vectors]
    known = np.array([True, True, True, True, False])
    identifiers.grow(vectors, known, np.arange(5), paths, k=10, leaf=100, seed=0)
    assert paths in (
        [[0], [3], [1], [2], [4]],
        [[3], [0], [2], [1], [4]],
    )  # alike, alike in number; the new one is last
    only_new = [[] for _ in vectors]  # a cluster that no known document is in
    identifiers.grow(vectors, np.zeros(5, dtype=bool), np.arange(5), only_new, k=10, leaf=100, seed=0)
    assert only_new == [[], [1], [2], [3], [4]]
    alone = [[], []]
    identifiers.grow(vectors[:2], np.array([True, False]), np.arange(2), alone, k=10, leaf=100, seed=0)
    assert alone == [[], [1]]  # without the new one it would be [] too


def test_product_quantisation_rebuilds_vectors(workplace):
    made = identifiers.quantised(workplace, parts=8)
    assert made.codes.shape == (len(workplace.keys), 8)
    vectors = identifiers.unit_vectors(workplace).reshape(len(workplace.keys), 8, -1)
    for part in range(8):  # documents with one code at a place are nearer to each other there than to others
        codes = made.codes[:, part]
        spread = [np.var(vectors[codes == code, part], axis=0).sum() for code in np.unique(codes)]
        assert np.average(spread, weights=np.bincount(codes)[np.unique(codes)]) < np.var(vectors[:, part], axis=0).sum()


def test_docids_in_words(workplace):
    made = identifiers.addresses(workplace)
    by_words = {}
    for row, code in enumerate(made.codes.tolist()):
        by_words.setdefault(tuple(code), []).append(workplace.keys[row])
    assert len(by_words) == len(workplace.keys)  # colour and thing are in the title
    titled = identifiers.titles_and_sentences(workplace)
    counts = np.bincount(titled.documents, minlength=len(workplace.keys))
    expected = [len(identifiers.sentences_of(document.text)) for document in workplace.texts.documents]
    assert counts.tolist() == expected


def test_an_address_that_many_share_is_no_docid(workplace, monkeypatch):
    own = workplace.texts.documents[: MOST_OF_AN_ADDRESS + 1]
    several = [document._replace(key=f"{number}", title="house") for number, document in enumerate(own)]
    for count in (MOST_OF_AN_ADDRESS, MOST_OF_AN_ADDRESS + 1):
        monkeypatch.setitem(vars(workplace), "texts", workplace.texts._replace(documents=several[:count]))
        monkeypatch.setitem(vars(workplace), "known", np.arange(count))
        texts = [document.content if count > MOST_OF_AN_ADDRESS else "house" for document in several[:count]]
        made = identifiers.addresses(workplace)
        expected = identifiers.as_identifiers(texts, workplace.tokenise)
        assert np.array_equal(made.codes, expected.codes)


def test_decoders_of_words_start_from_the_encoder_and_the_text():
    words = WordCodes(np.array([-1, 7, 3, 9, -1]), 12)  # codes 1, 2, 3 are the pieces 7, 3, 9
    torch.manual_seed(0)
    decoder = Decoder(4, Shape(2, len(words), shared_tokens=True, decoder_width=16, head_prior=True))
    markers = decoder.outputs[0, 4].clone()
    vectors = torch.randn(12, 4)
    words.start(decoder, vectors)
    assert torch.equal(decoder.outputs[0, 4], markers)
    centred = vectors[[7, 3, 9]] - vectors[[7, 3, 9]].mean(0)
    for table in (decoder.embeddings, decoder.outputs):  # a rotation: products are as before, but for one factor
        products = table[0, 1:4, :4] @ table[0, 1:4, :4].T
        assert torch.allclose(products / products[0, 0], centred @ centred.T / centred[0].square().sum(), atol=1e-4)
    tokens = TokenisedTexts(np.array([0, 3, 11, 1, 0, 9, 7, 1], np.int32), np.array([0, 4, 8]), 0)
    prior = words.prior(tokens, np.array([0, 1]), decoder)
    expected = torch.tensor([[0, 0, COPYING, 0, 0], [0, COPYING, 0, COPYING, 0]])
    assert prior.shape == (2, 2, 5)
    assert torch.equal(prior[:, 1], expected)


def test_parts_of_documents():
    [spans] = random_spans(["a b c"], seed=0)
    assert set(spans) == {"a b c"}
    assert rarest_terms(["the cat the", "the dog", ""]) == ["cat the", "dog the", ""]


# Generation -----------------------------------------------------------------------------------------------------------


def some_query(n=2, width=8):
    torch.manual_seed(1)
    return Encoded(
        torch.randn(n, width), torch.randn(n, 4, width), torch.ones(n, 4, dtype=torch.bool), torch.zeros(n, 1)
    )


@pytest.mark.parametrize(("aware", "text_everywhere"), [(False, False), (True, False), (False, True)])
def test_generation_equals_the_whole_sequence(aware, text_everywhere):
    torch.manual_seed(0)
    shape = Shape(3, 5, shared_tokens=False, decoder_width=16, decoder_heads=2)
    decoder = (PrefixAwareDecoder if aware else Decoder)(8, shape).eval()
    decoder.text_everywhere = text_everywhere
    if aware:
        torch.nn.init.normal_(decoder.adaptor[3].weight)
    query = some_query()
    codes = torch.tensor([[1, 4, 2], [3, 0, 1]])
    with torch.no_grad():
        whole = decoder(query, codes)
        step = PrefixAwareGeneration(decoder, query) if aware else Generation(decoder, query)
        parts = [step(None)]
        for i in range(2):
            parts.append(step((codes[:, i : i + 1], torch.zeros(2, 1, dtype=torch.long))))
        cut = decoder.states(query, codes[:, :2])  # nothing of a position depends on those behind
        assert torch.allclose(cut, decoder.states(query, codes)[:, :2], atol=1e-5)
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)


def test_beam_over_docids_of_different_length_is_exhaustive():
    torch.manual_seed(0)
    decoder = Decoder(8, Shape(3, 4, shared_tokens=True, decoder_width=16, decoder_heads=2)).eval()
    existing = [(1,), (1, 2), (1, 2, 3), (2, 2), (3, 1, 1)]
    table = np.unique(padded(existing), axis=0)
    query = some_query()
    with torch.no_grad():
        found = beam_search(Generation(decoder, query), 3, 5, PrefixTree(table, 4), end=END)
        for q in range(2):
            alone = Encoded(*(part[q : q + 1] for part in query))
            expected = {}
            for docid in existing:
                codes = torch.from_numpy(padded([docid, (1, 1, 1)])[:1])
                likelihood = log_likelihood(decoder(alone, codes), codes[0].tolist(), ends=True)
                expected[docid] = likelihood / min(
                    len(docid) + 1, 3
                )  # END is a code too; behind the last there is none
            ranked = sorted(expected, key=lambda docid: -expected[docid])
            written = [tuple(code for code in row if code) for row in found.codes[q].tolist()]
            assert written == ranked
            assert found.scores[q].tolist() == pytest.approx([expected[docid] for docid in ranked], abs=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_the_loss_of_sequences_is_their_likelihood(shared):
    torch.manual_seed(0)
    decoder = Decoder(8, Shape(4, 5, shared, decoder_width=16, decoder_heads=2, head_prior=True)).eval()
    query, prior = some_query(), torch.randn(2, 4, 5)
    codes = torch.tensor([[3, 1, 0, 0], [2, 4, 4, 1]])
    log_probs = decoder(query, codes, prior)
    for ends in (True, False):
        counts = written(codes) if ends else torch.ones_like(codes, dtype=torch.bool)
        loss = sequence_loss(decoder, decoder.states(query, codes), codes, counts, prior)
        expected = [log_likelihood(log_probs[i : i + 1], codes[i].tolist(), ends=ends) for i in range(2)]
        assert float(loss.detach()) == pytest.approx(-sum(expected), abs=1e-4)
    loss.backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_what_is_no_docid_is_dropped_without_the_constraint(workplace):
    made = identifiers.numbers(workplace)
    torch.manual_seed(0)
    decoder = Decoder(32, Shape(made.codes.shape[1], made.V, shared_tokens=True))
    retriever = SequenceRetriever(workplace, decoder, made, constrained=False)
    rows, _ = retriever.generate(["red house"], 20)
    assert (rows == -1).any()
    hits = retriever.search(["red house"], 10)[0]
    known = {workplace.keys[row] for row in workplace.known}
    assert {hit.key for hit in hits} <= known
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    [docids] = retriever.docids(["red house"], 10)  # at docid level it keeps its place
    assert [docid[0] < retriever.count for docid in docids] == (rows[0, :10] >= 0).tolist()


# N-grams --------------------------------------------------------------------------------------------------------------


def test_views_count_every_ngram_and_know_its_documents():
    texts = [[0, 5, 6, 5, 6, 1], [0, 6, 5, 1], [0, 1]]
    tokens = TokenisedTexts(
        np.array(list(itertools.chain(*texts)), np.int32), np.append(0, np.cumsum([len(text) for text in texts])), 0
    )
    marker = 8
    view = TextView.of(tokens, np.array([10, 11, 12]), marker, WordCodes(np.array([-1, *range(1, 8), -1]), 8))
    inner = {10: [5, 6, 5, 6], 11: [6, 5]}
    grams = {}
    for document, pieces in inner.items():
        for start in range(len(pieces)):
            for end in range(start + 1, min(len(pieces), start + LENGTH) + 1):
                grams.setdefault(tuple(pieces[start:end]), []).append(document)
    for gram, documents in grams.items():
        prefix = torch.zeros(1, dtype=torch.long)
        for depth, code in enumerate([marker, *gram]):
            prefix = view.tree.rank(depth, prefix, torch.tensor([code]))
        start, end = view.starts[len(gram)][prefix.item()], view.starts[len(gram)][prefix.item() + 1]
        assert sorted(view.documents[start:end].tolist()) == sorted(documents)
        found = ngrams_of(view, [(math.log(0.9), len(gram), prefix.item())])
        assert found.pieces[0, : len(gram)].tolist() == list(gram)
        assert found.documents[0].tolist() == sorted(set(documents))


def test_an_ngram_counts_only_where_no_heavier_one_stands():
    """5 6 7 stands in document 0: its beginning 5 6 adds nothing there, but counts for 1. 7 stands in 0 once more."""
    texts = [[0, 5, 6, 7, 2, 7, 1], [0, 5, 6, 1]]
    tokens = TokenisedTexts(np.array(list(itertools.chain(*texts)), np.int32), np.array([0, 7, 11]), 0)
    view = TextView.of(tokens, np.array([0, 1]), 8, WordCodes(np.array([-1, *range(1, 8), -1]), 8))
    hypotheses = []
    for gram, probability in (((5, 6, 7), 0.9), ((5, 6), 0.8), ((6, 7), 0.7), ((7,), 0.6)):
        prefix = torch.zeros(1, dtype=torch.long)
        for depth, code in enumerate([8, *gram]):
            prefix = view.tree.rank(depth, prefix, torch.tensor([code]))
        hypotheses.append((math.log(probability), len(gram), prefix.item()))
    found = ngrams_of(view, hypotheses)
    assert {tuple(p[p > 0]): own.tolist() for p, own in zip(found.pieces, found.documents, strict=True)} == {
        (5, 6, 7): [0], (5, 6): [1], (6, 7): [], (7,): [0],
    }  # fmt: skip


def test_weights_are_read_again_only_for_the_docids_they_were_trained_for(workplace, monkeypatch):
    trained = []
    monkeypatch.setattr("asi.systems.workplace.fit", lambda *_: trained.append(1) or True)
    monkeypatch.setattr("asi.systems.workplace.planned_steps", lambda *_, **__: 1)
    decoder = Decoder(32, Shape(2, 5, shared_tokens=True))
    pairs = [(1.0, workplace.pairs(workplace.texts.pairs, 8))]
    for codes, trainings in ([[1, 2]], 1), ([[1, 2]], 1), ([[1, 3]], 2), ([[1, 3]], 2):
        objective = SequenceObjective(decoder, workplace.encoder, None, torch.tensor(codes), pairs, ends=True)
        workplace.train("digest", objective, np.array(codes))
        assert len(trained) == trainings


def test_weight_of_an_ngram_is_seals_formula():
    probability, count, total = 0.5, 3, 95
    alone = (count + 5) / (total + 5)
    odds = math.log(probability * (1 - alone) / (alone * (1 - probability)))
    found = weight_of(np.array([math.log(probability), math.log(alone / 2)]), np.array([count, count]), total)
    assert found == pytest.approx([odds**2, 0])


def test_document_scores_discount_what_is_covered():
    pieces = np.array([[4, 5, 0], [5, 6, 0], [7, 0, 0]])
    ngrams = Ngrams(np.array([8.0, 4.0, 1.0]), pieces, [np.array([2, 9]), np.array([9]), np.array([3])])
    documents, scores = document_scores(ngrams)
    half_covered = 4 * (1 - BETA + BETA * 0.5)  # 5 is covered by the first n-gram, 6 is new
    assert dict(zip(documents.tolist(), scores.tolist(), strict=True)) == pytest.approx(
        {2: 8, 3: 1, 9: 8 + half_covered}
    )


# Dense and learned ----------------------------------------------------------------------------------------------------


def test_margin_loss_is_repberts():
    scores = torch.tensor([[0.5, 0.2, 0.9], [0.1, 0.7, 0.3]])
    relevant = torch.tensor([[True, False, False], [True, True, False]])
    expected = [
        sum(max(0, 1 - (row[i] - row[j])) for i in range(3) for j in range(3) if own[i] and not own[j]) / 3
        for row, own in zip(scores.tolist(), relevant.tolist(), strict=True)
    ]
    assert float(multi_label_margin(scores, relevant)) == pytest.approx(np.mean(expected))


def test_balanced_codes_use_all_codes():
    torch.manual_seed(0)
    logits = torch.randn(64, 8) + torch.tensor([5.0, *[0.0] * 7])  # by themselves nearly all would take the first
    assert F.one_hot(logits.argmax(1), 8).sum(0)[0] > 50
    codes = balanced_codes(logits)
    counts = torch.bincount(codes, minlength=8)
    assert counts.max() < 20
    assert counts.min() >= 2
    assert torch.equal(codes, balanced_codes(100 * logits + 7))  # only their order and spread count
    two = torch.tensor([[3.0, 1.0], [3.0, 2.0]])  # by hand: the first code is too much in both rows
    assert balanced_codes(two).tolist() == [0, 1]


def test_centred_states_keep_what_tells_documents_of_one_prefix_apart():
    states = np.array([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0], [0.0, 9.0]], dtype=np.float32)
    around = centred(states, np.array([[0], [0], [1], [1]]))
    mean = states.mean(axis=0)
    assert (around - mean).tolist() == [[-1, 0], [1, 0], [0, -2], [0, 2]]
    assert np.allclose(centred(states, np.zeros((4, 0), np.int64)), states)


def test_numbers_tell_equal_docids_apart():
    docids = np.array([[1, 2], [3, 3], [1, 2], [1, 2]])
    assert numbers_within(docids, [2, 0, 1]).tolist() == [1, 0, 0, 0]


# Significance ---------------------------------------------------------------------------------------------------------


def test_randomisation_test_is_close_to_all_permutations():
    draw = np.random.default_rng(0)
    first, second = draw.random(8) + 0.3, draw.random(8)
    differences = first - second
    observed = abs(differences.mean())
    signs = np.array(list(itertools.product((1, -1), repeat=8)))
    exact = np.mean(np.abs((signs * differences).mean(1)) >= observed - 1e-12)
    assert randomisation_test(first, second) == pytest.approx(exact, abs=0.015)
    assert randomisation_test(first, first) == 1


def test_holm_never_lets_a_larger_value_be_smaller():
    assert holm({"a": 0.01, "b": 0.02, "c": 0.5}) == pytest.approx({"a": 0.03, "b": 0.04, "c": 0.5})


# The whole command ----------------------------------------------------------------------------------------------------


def test_choosing_systems():
    assert chosen_systems("all") == list(ROWS)
    assert [system.name for system in chosen_systems("dpr, bm25")] == ["bm25", "dpr"]
    with pytest.raises(ConfigError, match="unknown system 'bert'; systems are asi, asi-beam"):
        chosen_systems("bert")
    assert all(system.differs and system.paper for system in BY_NAME.values())


def test_settings_of_a_system_are_all_that_its_row_says_and_survive_a_file():
    for system in ROWS:
        assert json.loads(json.dumps(system.settings)) == system.settings
    assert BY_NAME["asi-beam"].settings["after"]["asi"]["build"]["config"]["model"]["V"] == 1024
    nci = BY_NAME["nci"].settings["build"]["settings"]
    assert nci["identifiers"] == {
        "function": "asi.systems.identifiers.semantic", "k": 30, "leaf": 30, "shared": False,
    }  # fmt: skip
    revised = dataclasses.replace(BY_NAME["nci"], revision=BY_NAME["nci"].revision + 1)
    assert revised.settings != BY_NAME["nci"].settings


def asi(*arguments, cwd):
    command = [sys.executable, "-m", "asi", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.mark.slow
def test_all_systems_in_one_table(beir, encoder_folder, tmp_path):
    settings = ("--minutes", 0.005, "--encoder", encoder_folder, "--max-length", 16, "--out", "out")
    done = asi("compare", beir, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    tables = json.loads((tmp_path / "out" / "report.json").read_text())["tables"]
    for split in ("test", "test_unseen"):
        rows = {row["system"]: row for row in tables[f"{split}: All systems"]}
        assert list(rows) == [system.name for system in ROWS]
        for name, row in rows.items():
            assert 0 <= row["R@1"] <= row["R@5"] <= row["R@10"] <= 1, name
            assert row["bytes / document"] > 0, name
            assert row["ms / query, alone"] > 0, name
            assert (tmp_path / "out" / "systems" / name / "run.trec").stat().st_size > 0
        assert rows["asi"]["p against asi"] is None
        assert 0 < rows["bm25"]["p against asi"] <= 1
    for name in ("dsi-atomic", "ultron-atomic", "dynamicretriever"):
        assert rows[name]["R@10"] == 0, name  # test_unseen: no docid, no answer
    again = asi("compare", beir, *settings, cwd=tmp_path)
    assert again.returncode != 0
    assert "continue it with --resume" in again.stderr
    (tmp_path / "out" / "systems" / "bm25" / "measured.json").unlink()
    resumed = asi("compare", beir, *settings, "--resume", "--systems", "asi,bm25", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "bm25, system 2 of 2" in resumed.stderr
    assert "asi, system" not in resumed.stderr
    page = json.loads((tmp_path / "out" / "report.json").read_text())
    shown = [row["system"] for row in page["tables"]["test: All systems"]]
    assert shown == list(rows)  # what was measured before stays
    trained = {row["system"]: row for row in page["tables"]["Training: What was trained"]}
    assert trained["asi"]["pairs seen"] == trained["asi"]["steps"] * 126  # all pairs in each
    assert trained["bm25"]["steps"] == 0
    assert page["settings"]["minutes"] == 0.005


def test_what_was_run_with_other_settings_is_set_aside_and_run_again(beir, encoder_folder, tmp_path):
    def compare(*more):
        done = asi("compare", beir, "--systems", "bm25,simcse", "--minutes", 0.005, "--encoder", encoder_folder,
                   "--out", "out", *more, cwd=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stderr

    compare()
    folder = tmp_path / "out" / "systems" / "simcse"
    file = folder / "settings.json"
    settings = json.loads(file.read_text())
    assert settings["build"]["settings"]["temperature"] == 0.05
    settings["build"]["settings"]["temperature"] = 0.5  # as if the table's row had been another then
    file.write_text(json.dumps(settings))
    weights = (folder / "weights" / "weights.safetensors").read_bytes()
    said = compare("--resume")
    assert "simcse was run with other settings" in said
    assert "simcse, system 2 of 2" in said
    assert "bm25, system" not in said
    former = folder.with_name("simcse.former")
    assert (former / "weights" / "weights.safetensors").read_bytes() == weights
    assert json.loads(file.read_text())["build"]["settings"]["temperature"] == 0.05
    assert "simcse, system" not in compare("--resume")


def test_every_mechanism_reads_with_a_t5_two_at_a_time(beir, tmp_path):
    encoder = tmp_path / "t5"
    write_t5(encoder)
    systems = ["asi", "doct5query", "dpr", "dsi-semantic", "ultron-url", "seal", "genret"]
    done = asi("compare", beir, "--systems", ",".join(systems), "--minutes", 0.02, "--encoder", encoder,
               "--max-length", 16, "--jobs", 2, "--out", "out", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    assert done.stderr.index("doct5query: measuring took") < done.stderr.index("ultron-url, system")  # it needs that
    assert "2 systems at a time, each with" in (tmp_path / "out" / "report.md").read_text()
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["tables"]["test: All systems"]
    assert {row["system"]: row["R@10"] > 0 for row in rows} == dict.fromkeys(systems, True)


def test_a_system_that_fails_does_not_stop_the_others(beir, encoder_folder, tmp_path):
    done = asi("compare", beir, "--systems", "bm25,simcse-docid", "--minutes", 0.01, "--encoder", encoder_folder,
               "--out", "out", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "simcse-docid failed: it needs the run of the system asi; compare asi too" in done.stderr
    page = (tmp_path / "out" / "report.md").read_text()
    assert page.index("Systems that failed") < page.index("| bm25 |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "nothing"], "unknown system 'nothing'"),
        (["--minutes", "0"], "--minutes must be positive"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--split", "nothing", "--systems", "bm25"], "nothing"),
        (["--encoder", "no/such", "--systems", "dpr"], "no/such"),
    ],
)
def test_bad_input(beir, tmp_path, arguments, message):
    done = asi("compare", beir, "--out", "out", *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()  # the corrected command may use the same folder


def test_systems_are_listed(tmp_path):
    listed = json.loads(asi("systems", "--json", cwd=tmp_path).stdout)
    assert [row["system"] for row in listed] == [system.name for system in ROWS]
    shown = asi("systems", cwd=tmp_path).stdout
    assert all(system.name in shown for system in ROWS)
