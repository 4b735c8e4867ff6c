import shutil
from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asi.analysis.report import build_report
from asi.candidates import Candidates, best_of_each_query, candidates_of
from asi.checkpoint import load_model
from asi.config import SearchConfig, preset, with_overrides
from asi.datasets import open_dataset
from asi.docid_search import Docids, one_pass, one_pass_scores
from asi.errors import ConfigError, StoreError
from asi.index import Index, examine, rebuild
from asi.judges import TfidfJudge
from asi.ranking import unpack
from asi.records import Document
from asi.run import train
from asi.search import Searcher
from asi.store import Store
from asi.view import View

QUERIES = [
    "red house", "the tree is green", "where is blue river", "stone", "find a black bird that stands in the north",
    "lamp", "white cloud", "yellow horse in the west", "zzz", "house house house",
]  # fmt: skip


@pytest.fixture(scope="module")
def index(run_folder):
    with Index.load(run_folder) as opened:
        yield opened


@pytest.mark.parametrize("mode", ["beam", "constrained", "one-pass"])
@pytest.mark.parametrize("ranking", ["docid", "vector", "sum"])
def test_answers_do_not_depend_on_the_batch(index, mode, ranking):
    searcher = index.configured(mode=mode, ranking=ranking)
    together = searcher.search(QUERIES, 10)
    assert together == searcher.search(QUERIES, 10)
    for size in (1, 2, 3, 7):
        parts = [searcher.search(QUERIES[start : start + size], 10) for start in range(0, len(QUERIES), size)]
        alone = [hits for part in parts for hits in part]
        assert [[hit.key for hit in hits] for hits in alone] == [[hit.key for hit in hits] for hits in together]
        assert [hit.score for hits in alone for hit in hits] == pytest.approx(
            [hit.score for hits in together for hit in hits], abs=1e-4
        )


def test_trained_search_finds_what_it_was_trained_for(index):
    hits = index.search(["house red", "the river is blue"], k=3)
    assert [found[0].key for found in hits] == ["red/house", "blue/river"]


@pytest.mark.parametrize("mode", ["constrained", "one-pass"])
def test_widens_until_the_corpus_is_exhausted(index, mode):
    [hits] = index.search(["red house"], k=1000, mode=mode)
    assert sorted(hit.key for hit in hits) == sorted(stored.document.key for stored in index.store.stored_documents())
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_counts_the_documents_that_are_ranked(index):
    sizes = Counter(stored.docid for stored in index.store.stored_documents())
    encoded = index.searcher.encode(QUERIES)
    plain = index.configured(mode="beam", candidates=10_000)
    opened = [sum(sizes[docid] for docid in docids) for docids in plain.docids(encoded, 10)]
    assert plain.docids_and_ranked(encoded, 10, 3)[1].tolist() == opened
    assert len(set(opened)) > 1
    largest = max(sizes.values())
    for mode in ("constrained", "one-pass"):
        counted = index.configured(mode=mode, candidates=largest).docids_and_ranked(encoded, 10, 1)[1]
        assert set(counted.tolist()) == {largest}  # smaller buckets fill the room that others leave


def test_constrained_docids_exist_and_plain_ones_are_the_decoders_best(index):
    existing = set(map(tuple, index.store.snapshot().codes.tolist()))
    for docids in index.configured(mode="constrained").docids(index.searcher.encode(QUERIES), 10):
        assert len(docids) == len(set(docids)) == 10
        assert set(docids) <= existing
    plain = index.configured(mode="beam", beams=16**3).docids(index.searcher.encode(["red house"]), 10)[0]
    model, tokenise = index.loaded.model, index.loaded.tokenise
    with torch.no_grad():
        query = model.encode(*tokenise(["red house"]).padded(np.array([0])))
        logits = model.heads(query.x)
        everything = torch.tensor(list(product(range(16), repeat=3)))
        one_hot = torch.nn.functional.one_hot(everything, 16).float()
        repeated = type(query)(*(part.expand(len(everything), *part.shape[1:]) for part in query))
        scores = (model.decoder(repeated, one_hot, logits.expand(len(everything), -1, -1)) * one_hot).sum((1, 2))
    best = everything[scores.argsort(descending=True)[:10]].tolist()
    assert plain == [tuple(docid) for docid in best]


def test_one_pass_is_exactly_the_best_docids(index):
    snapshot = index.store.snapshot()
    log_probs = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    found = one_pass(log_probs, index.searcher.current_view(), 7)
    for q in range(5):
        scores = [
            sum(float(log_probs[q, i, code]) for i, code in enumerate(docid)) for docid in snapshot.codes.tolist()
        ]
        best = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:7]
        assert found.rows[q].tolist() == best
        assert found.scores[q].tolist() == pytest.approx([scores[row] for row in best], abs=1e-5)


def test_codes_are_worth_what_the_heads_and_the_documents_that_have_them_say(index):
    view, [(_, query)] = index.searcher.current_view(), index.searcher.encode(["red house"])
    logits = index.loaded.model.heads(query.x).detach()
    x = query.x[0] / query.x[0].norm()

    def scores(**settings):
        return index.configured(**settings).code_scores(query, logits, view)[0]

    by_heads = logits[0].log_softmax(-1)
    for settings in ({"code_weight": 0.0}, {"ranking": "docid"}):
        assert torch.equal(scores(**settings), by_heads)
    expected = by_heads + 7 * (view.code_vectors.vectors @ x + view.code_vectors.biases)
    assert torch.allclose(scores(code_weight=7.0), expected, atol=1e-4)
    codes = view.snapshot.codes.astype(np.int64)
    worth = scores(code_weight=7.0)[torch.arange(codes.shape[1]), codes].sum(1)
    [best] = index.configured(mode="one-pass", code_weight=7.0).docids([(np.array([0]), query)], 1)[0]
    assert best == tuple(codes[int(worth.argmax())])


def test_code_vectors_are_of_a_part_of_the_documents_where_they_are_many(index, monkeypatch):
    def documents_asked(at_once):
        monkeypatch.setattr("asi.view.DOCUMENTS_AT_ONCE", at_once)
        view = View(index.store.snapshot(), index.loaded.model, index.store)
        places = []
        monkeypatch.setattr(view, "ranking_rows", lambda own: places.extend(own) or View.ranking_rows(view, own))
        assert view.code_vectors is not None
        return places

    count = len(index)
    assert documents_asked(count) == list(range(count))
    assert documents_asked(count - 1) == list(range(0, count, 2))


@pytest.mark.parametrize("share", [0.001, 0.2, 1.0])
def test_fills_up_with_the_nearest_of_the_docids_whose_codes_are_good(index, share):
    searcher = index.configured(mode="constrained", centre_share=share)
    view, [(_, query)] = searcher.current_view(), searcher.encode(["red house"])
    by_codes = one_pass_scores(index.loaded.model.heads(query.x).detach().log_softmax(-1), view)[:1]
    nearness = searcher.nearness(query, view)
    assert (nearness is None) == (share < 1)
    near = searcher.near_docids(query, by_codes, view, count=5)
    docids = len(view.snapshot.codes)
    liked = by_codes[0].argsort(descending=True, stable=True)[: max(5, int(share * docids))].tolist()
    x, scores = query.x[0] / query.x[0].norm(), {}
    for row in liked:
        own = slice(*view.centres.offsets[row : row + 2])
        centres = zip(view.centres.vectors[own], view.centres.biases[own], strict=True)
        scores[row] = max(float(vector @ x + bias) for vector, bias in centres)
    assert near.rows[0].tolist() == sorted(scores, key=lambda row: -scores[row])[:5]
    assert near.scores[0].tolist() == pytest.approx(sorted(scores.values(), reverse=True)[:5], abs=1e-5)
    assert len(liked) == {0.001: 5, 0.2: docids // 5, 1.0: docids}[share] >= 5
    if nearness is not None:  # one product for all centres says the same
        assert [float(nearness[0, row]) for row in scores] == pytest.approx(list(scores.values()), abs=1e-5)


def test_the_beam_looks_ahead_to_the_nearest_buckets(index):
    """With a decoder that does not count, docids come in the order of heads and centres."""
    searcher = index.configured(mode="constrained", ahead_weight=1e6, code_weight=7.0)
    view, [(_, query)] = searcher.current_view(), searcher.encode(["red house"])
    by_heads = one_pass_scores(index.loaded.model.heads(query.x).detach().log_softmax(-1), view)[0]
    worth = by_heads + 7 * view.centres.scores(query.x / query.x.norm(dim=-1, keepdim=True))[0]
    best = view.snapshot.codes[worth.argsort(descending=True, stable=True)[:3].numpy()].tolist()
    [found] = searcher.docids([(np.array([0]), query)], 3)
    assert [list(docid) for docid in found] == best
    by_codes = index.configured(mode="constrained", ahead_weight=1e6, code_weight=7.0, centre_share=0.5)
    assert by_codes.nearness(query, view) is None


def test_fills_up_by_codes_alone_where_no_centre_is_looked_at(index):
    searcher = index.configured(mode="constrained", centre_share=0.0)
    view = View(index.store.snapshot(), index.loaded.model, index.store)
    [(_, query)] = searcher.encode(["red house"])
    by_codes = one_pass_scores(index.loaded.model.heads(query.x).detach().log_softmax(-1), view)[:1]
    near = searcher.near_docids(query, by_codes, view, count=5)
    best = by_codes[0].sort(descending=True, stable=True)
    assert near.rows[0].tolist() == best.indices[:5].tolist()
    assert near.scores[0].tolist() == best.values[:5].tolist()
    assert "centres" not in vars(view)  # they were not even computed


def test_vector_ranking_equals_exact_search_over_the_whole_corpus(index):
    searcher = index.configured(mode="one-pass", ranking="vector", candidates=1000, token_weight=0.0)
    stored = list(index.store.stored_documents())
    vectors, bias = unpack(index.store.vectors(np.array([item.number for item in stored]), searcher.ranked))
    [(_, query)] = searcher.encode(["red house"])
    x = query.x[0].numpy() / np.linalg.norm(query.x[0].numpy())
    best = np.argsort(-(vectors @ x + bias), kind="stable")[:5]
    [hits] = searcher.search(["red house"], 5)
    assert [hit.key for hit in hits] == [stored[row].document.key for row in best]


def test_tokens_reorder_the_most_similar_candidates(index):
    by_vector = index.configured(mode="one-pass", candidates=1000, token_weight=0.0)
    by_both = index.configured(mode="one-pass", candidates=1000, token_weight=0.5, matched=10)
    [plain], [fused] = by_vector.search(["red house"], 20), by_both.search(["red house"], 20)
    keys = [item.document.key for item in index.store.stored_documents()]
    numbers = np.array([item.number for item in index.store.stored_documents()])
    shape = (len(keys), index.loaded.model.matcher.kept, index.loaded.model.matcher.width)
    tokens = index.store.vectors(numbers, by_both.tokens).reshape(shape) / 127
    [(_, query)] = by_both.encode(["red house"])
    scores = {}
    for hit in plain[:10]:
        nearest = [
            max(float(asked @ token) for token in tokens[keys.index(hit.key)]) for asked in query.tokens[0].numpy()
        ]
        scores[hit.key] = hit.score + 0.5 * sum(nearest)
    assert [hit.key for hit in fused[:10]] == sorted(scores, key=lambda key: -scores[key])
    assert [hit.score for hit in fused[:10]] == pytest.approx(sorted(scores.values(), reverse=True), abs=1e-4)
    assert [hit.key for hit in fused[10:]] == [hit.key for hit in plain[10:]]


def test_bucket_cap_and_ties():
    candidates = Candidates(
        query=np.array([0, 0, 0, 0, 1, 1]), row=np.array([5, 5, 5, 6, 5, 7]),
        number=np.array([3, 2, 1, 4, 9, 8]), score=np.zeros(6, np.float32),
    )  # fmt: skip
    scores = np.array([0.9, 0.9, 0.8, 0.1, 0.5, 0.5], np.float32)
    assert best_of_each_query(candidates, scores, 3, None, 2).tolist() == [1, 0, 2, 5, 4]
    assert best_of_each_query(candidates, scores, 3, 1, 2).tolist() == [1, 3, 5, 4]


def test_new_documents_are_found_at_once_and_deleted_ones_no_more(run_folder, tmp_path):
    copy = shutil.copytree(run_folder, tmp_path / "run")
    with Index.load(copy) as index:
        added = [Document("new/1", "a red house that stands in the north", "red house")]
        assert index.add(added) == 1
        [hits] = index.search(["red house"], k=3)
        assert {"new/1", "red/house"} <= {hit.key for hit in hits}
        index.add([Document("new/1", "a yellow lamp", "yellow lamp")])  # a known key is replaced
        [hits] = index.search(["yellow lamp"], k=2)
        assert "new/1" in {hit.key for hit in hits}
        assert len(index) == 49
        index.delete(["new/1"])
        [hits] = index.search(["yellow lamp"], k=100)
        assert "new/1" not in {hit.key for hit in hits}
        assert len(hits) == 48


def test_a_document_gets_the_same_docid_whatever_it_is_added_with(run_folder, tmp_path):
    copy = shutil.copytree(run_folder, tmp_path / "run")
    with Index.load(copy) as index:
        before = {item.document.key: item.docid for item in index.store.stored_documents()}
        documents = [item.document for item in index.store.stored_documents()]
        index.add(documents[:1])
        index.add(documents[1:4])
        index.add(documents[4:])
        assert {item.document.key: item.docid for item in index.store.stored_documents()} == before


def test_an_empty_store_answers_nothing(run_folder, tmp_path):
    loaded = load_model(run_folder / "model", torch.device("cpu"))
    with Store.create(tmp_path / "s", m=3, V=16, width=40, fingerprint=loaded.fingerprint) as store:
        for mode in ("beam", "constrained", "one-pass"):
            assert Searcher(loaded, store, SearchConfig(mode=mode)).search(["red"], 5) == [[]]


def test_an_open_index_follows_the_store_that_replaces_its_own(run_folder, beir, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    documents = tmp_path / "documents.jsonl"
    documents.write_text('{"key": "only", "document": "a blue lamp"}\n')
    with Index.load(folder) as index:
        assert len(index) == 48
        with Store.open(folder / "store", writable=True), pytest.raises(StoreError, match="wait for it or pass --wait"):
            rebuild(folder, open_dataset(str(documents)))  # what the other adds would be lost
        assert rebuild(folder, open_dataset(str(documents))) == 1
        assert [hit.key for hit in index.search(["red house"])[0]] == ["only"]
        index.add([Document("red/house", "red house")])
        assert index.search(["house red"])[0][0].key == "red/house"
        index.delete(["only", "red/house"])
        assert index.search(["red house"]) == [[]]
        assert index.searcher.docids(index.searcher.encode(["red house"]), 10) == [[]]
        (folder / ".states-killed").mkdir()
        with Store.open(folder / "store", writable=True), pytest.raises(StoreError, match="wait for it or pass --wait"):
            rebuild(folder, open_dataset(str(beir)))
        assert rebuild(folder, open_dataset(str(beir))) == len(index) == 48
        assert not list(folder.glob(".states*"))


def test_no_queries_and_bad_k(index):
    assert index.search([], k=5) == []
    with pytest.raises(ConfigError, match="k must be at least 1, got 0"):
        index.search(["red"], k=0)


def test_a_bucket_is_a_candidate_whole_or_not_at_all():
    codes = np.arange(4)[:, None].astype(np.uint16)
    snapshot = SimpleNamespace(offsets=np.array([0, 5, 8, 9, 20]), numbers=np.arange(100, 120), codes=codes)
    docids = Docids(np.array([[0, 1, 2, 3], [3, 2, 1, 0]]), np.zeros((2, 4), np.float32), np.zeros((2, 4, 1), np.int64))

    def sizes(**limits):
        found = candidates_of(docids, snapshot, **limits)
        return [np.unique(found.row[found.query == q]).tolist() for q in (0, 1)]

    assert sizes(limit=8, least=1) == [[0, 1], [3]]  # the fullest bucket is too large, but first
    assert sizes(limit=7, least=1) == [[0, 2], [3]]  # the second does not fit, the third does
    assert sizes(limit=8, least=12) == [[0, 1, 2, 3], [2, 3]]  # so many documents must be there
    assert sizes(limit=8, least=3, bucket_cap=1) == [[0, 1, 2], [1, 2, 3]]  # of which one in each bucket is shown
    assert sizes(limit=100, least=1) == [[0, 1, 2, 3]] * 2


def test_docids_alone_find_and_keep_no_vectors(beir, encoder_folder, tmp_path):
    settings = [f"model.encoder={encoder_folder}", "model.max_length=16", "train.steps=150", "train.batch=32"]
    config = with_overrides(preset("docids"), [*settings, "train.lr=3e-3"])
    dataset = open_dataset(str(beir))
    train(dataset, tmp_path, config)
    with Index.load(tmp_path) as index:
        index.add([Document("new", "a horse that is white stands in the south")])
        assert (tmp_path / "store" / "vectors.i8").stat().st_size == 0
        hits = index.search(["house red", "a horse that is white stands in the south"], k=1)
        assert [found[0].key for found in hits] == ["red/house", "new"]
        with pytest.raises(ConfigError, match=r"trained without a decoder .* use --mode one-pass"):
            index.search(["red house"], mode="constrained")
        with pytest.raises(ConfigError, match=r"has no vectors .* use --ranking docid"):
            index.search(["red house"], ranking="vector")
        page = build_report(index, dataset, ["test"], TfidfJudge())
        assert list(page.data["measures"]) == ["asi-one-pass-docids"]
    assert not any(problems for _, problems in examine(tmp_path))
