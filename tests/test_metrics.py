import json
from itertools import product
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asi.errors import DataError
from asi.metrics import (
    COLUMNS,
    DOCID_METRICS,
    DOCUMENT_METRICS,
    INVALID,
    Buckets,
    DocidHealth,
    DocidScores,
    Report,
    accuracy,
    collapse_warning,
    docid_health,
    docid_scores,
    document_level,
    relevant_keys,
    report_rows,
)
from asi.records import Hit, Qrel

CODES = [0, 1, 255, 256, 65535]  # where bytes carry over and where zeros trail
DOCIDS = list(product(CODES, CODES))


def hits(*keys):
    return [Hit(key, 1.0) for key in keys]


def test_docid_scores_by_hand():
    #   documents      0       1       2       3       4       5
    docids = np.array([[7, 0], [7, 0], [7, 0], [7, 0], [0, 7], [9, 9]], dtype=np.uint16)
    retrieved = [
        [(7, 0), (0, 7)],  # 1 of 4 relevant, then a miss
        [(1, 1), (7, 0), (9, 9)],  # invalid, then 2 of 4, then 1 of 1
        [(0, 7), (1, 1)],  # a miss, then invalid
        [],
    ]
    scores = docid_scores(Buckets.of(docids), retrieved, relevant=[[0, 0], [1, 2, 5], [3], [4]])
    assert scores.docid == pytest.approx({"R@1": 1 / 4, "R@5": 2 / 4, "R@10": 2 / 4, "MRR@10": (1 + 1 / 2) / 4})
    assert scores.expectation == pytest.approx(
        {"R@1": 0.25 / 4, "R@5": (0.25 + 1) / 4, "R@10": (0.25 + 1) / 4, "MRR@10": (0.25 + 0.5 / 2 + 0.5 / 3) / 4}
    )
    assert scores.d_per_q == (5 + 5 + 1 + 0) / 4
    assert scores.invalid == pytest.approx({"all": 2 / 7, "first": 1 / 3})


def test_only_ten_docids_count():
    docids = np.arange(12)[:, None]
    scores = docid_scores(Buckets.of(docids), [[(i,) for i in range(12)]], relevant=[[10]])
    assert scores.docid["R@10"] == scores.docid["MRR@10"] == scores.expectation["R@10"] == 0
    assert scores.d_per_q == 10


def value(name, is_hit):
    """A metric of one ranking, in which each place is a hit or not."""
    rank = is_hit.index(True) + 1 if True in is_hit else np.inf
    return {"R@1": rank <= 1, "R@5": rank <= 5, "R@10": rank <= 10, "MRR@10": 1 / rank}[name]


@given(
    docids=st.lists(st.sampled_from(DOCIDS[:6]), min_size=1, max_size=8),
    queries=st.lists(
        st.tuples(st.lists(st.sampled_from(DOCIDS[:8]), max_size=6, unique=True), st.sets(st.integers(0, 7))),
        min_size=1,
        max_size=3,
    ),
)
def test_expectation_is_the_mean_over_all_draws(docids, queries):
    retrieved = [ranked for ranked, _ in queries]
    relevant = [{number for number in numbers if number < len(docids)} for _, numbers in queries]
    scores = docid_scores(Buckets.of(np.array(docids)), retrieved, relevant)
    for name in DOCID_METRICS:
        at_docids, expected = [], []
        for ranked, wanted in zip(retrieved, relevant, strict=True):
            buckets = [[i for i, other in enumerate(docids) if other == docid] or [None] for docid in ranked]
            draws = [[number in wanted for number in draw] for draw in product(*buckets)]
            expected.append(np.mean([value(name, draw) for draw in draws]))
            at_docids.append(value(name, [any(number in wanted for number in bucket) for bucket in buckets]))
        assert scores.expectation[name] == pytest.approx(np.mean(expected))
        assert scores.docid[name] == pytest.approx(np.mean(at_docids))


@given(st.lists(st.sampled_from(DOCIDS), max_size=30), st.lists(st.sampled_from(DOCIDS), max_size=30))
def test_buckets_are_the_sorted_docids(docids, wanted):
    buckets = Buckets.of(np.array(docids, dtype=np.uint16).reshape(-1, 2))
    in_use = sorted(set(docids))
    assert [tuple(docid) for docid in buckets.docids] == in_use
    assert buckets.sizes.tolist() == [docids.count(docid) for docid in in_use]
    assert [in_use[row] for row in buckets.of_document] == docids
    rows = buckets.find(np.array(wanted, dtype=np.int64).reshape(-1, 2)).tolist()
    assert rows == [in_use.index(docid) if docid in in_use else INVALID for docid in wanted]


KEYS = st.sampled_from(["a", "b", "B", "two words", "ü", "\u2028", "9", "10"])


@given(
    grades=st.dictionaries(KEYS, st.integers(0, 3), min_size=1).filter(lambda grades: any(grades.values())),
    ranking=st.lists(KEYS, unique=True),
    scores=st.sampled_from([[1.0], [1.0, 1.0 + 1e-12], [-0.0, 0.0]]),  # the ranking is the order, whatever the scores
)
def test_document_level_is_the_textbook_formula(grades, ranking, scores):
    run = {"q": [Hit(key, scores[i % len(scores)]) for i, key in enumerate(ranking)]}
    found = [grades.get(key, 0) for key in ranking]
    best = sorted(grades.values(), reverse=True)

    def gain(grades):
        return sum(grade / log2(rank + 1) for rank, grade in enumerate(grades[:10], start=1))

    expected = {f"R@{k}": sum(map(bool, found[:k])) / sum(map(bool, best)) for k in (1, 5, 10, 100)}
    expected["MRR@10"] = max((1 / rank for rank, grade in enumerate(found, start=1) if grade), default=0)
    expected["nDCG@10"] = gain(found) / gain(best)
    assert document_level(run, [Qrel("q", *judged) for judged in grades.items()], k=100) == pytest.approx(expected)


def test_documents_are_means_over_the_queries_that_have_a_relevant_document():
    qrels = [Qrel("found", "x"), Qrel("missed", "x"), Qrel("empty", "x"), Qrel("absent", "x"), Qrel("hopeless", "x", 0)]
    run = {"found": hits("y", "x"), "missed": hits("y"), "empty": [], "hopeless": hits("x"), "unjudged": hits("x")}
    assert list(relevant_keys(qrels)) == ["found", "missed", "empty", "absent"]
    means = document_level(run, qrels)
    assert list(means) == [name for name in DOCUMENT_METRICS if name != "R@100"]  # ten hits can't tell
    assert means == pytest.approx({"R@1": 0, "R@5": 1 / 4, "R@10": 1 / 4, "MRR@10": 1 / 8, "nDCG@10": 1 / log2(3) / 4})
    assert document_level({}, qrels)["R@10"] == 0


def test_measures_with_a_cutoff_beyond_k_are_left_out():
    assert document_level({"q": hits(*"abcde", "x")}, [Qrel("q", "x")], k=5) == {"R@1": 0, "R@5": 0}


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(DataError, match="'q' have a document twice"):
        document_level({"q": hits("x", "y", "x")}, [Qrel("q", "x")])
    with pytest.raises(DataError, match="no query has a relevant document"):
        document_level({"q": hits("x")}, [Qrel("q", "x", 0)])


def test_accuracy_wants_all_codes_equal():
    assert accuracy(np.array([[1, 2], [1, 2], [3, 4]]), np.array([[1, 2], [1, 3], [4, 4]])) == 1 / 3


def test_docid_health_by_hand():
    health = docid_health(np.array([[5, 0], [5, 1], [5, 1], [5, 2]], dtype=np.uint16))
    varied = pytest.approx(2**1.5)  # one and a half bits
    assert health == DocidHealth(
        documents=4, docids=3, d_per_id=4 / 3, largest_bucket=2, perplexity=[1.0, varied], docid_perplexity=varied
    )
    assert health.largest_share == 0.5


def draw(documents, docids, m=4, V=256, skew=1.0, seed=0):
    """Docids (documents, m): all of `docids` random ones are used; a skew above 1 makes few of them common."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, V, (docids, m), dtype=np.uint16)
    rows = (docids * rng.random(documents - docids) ** skew).astype(int)
    return table[np.append(np.arange(docids), rows)]


@pytest.mark.parametrize(
    ("docids", "V", "collapsed"),
    [
        (draw(50, 50), 256, False),  # a tiny corpus, all unique
        (draw(50, 25), 256, False),
        (draw(50, 20, skew=3), 256, False),
        (draw(16_449, 2_741, skew=2), 256, False),  # D/ID 6
        (draw(16_449, 960, skew=2), 256, False),  # coarse, but it learns
        (draw(2_000, 16, m=2, V=4), 4, False),  # there are only 16 docids, and they are all in use
        (draw(1, 1), 256, False),
        (np.zeros((0, 4), dtype=np.uint16), 256, False),
        (draw(16_449, 7), 256, True),
        (draw(16_449, 1), 256, True),
        (draw(5, 1), 256, True),
        (np.vstack([draw(3_000, 3_000), draw(2_000, 1, seed=1)]), 256, True),  # many docids, but one has 40%
        (np.vstack([draw(500, 500), draw(20_000, 12, seed=1)]), 256, True),  # 512 docids, but twelve have 98%
    ],
)
def test_collapse_is_told_from_health(docids, V, collapsed):
    warning = collapse_warning(docid_health(docids), V)
    assert (warning is not None) == collapsed


def test_collapse_warning_says_what_to_change():
    health = docid_health(draw(16_449, 7))
    warning = collapse_warning(health, V=256)
    assert warning.startswith("docids have collapsed: 7 in use for 16,449 documents, the largest bucket holds 1")
    assert "\n" not in warning
    for setting in ("loss.contrastive", "loss.balance", "train.straight_through_start", "train.batch"):
        assert setting in warning


RANKED = {"R@1": 0.25, "R@5": 0.5, "R@10": 0.75, "MRR@10": 0.5}
BM25 = Report(document=RANKED | {"nDCG@10": 0.625}, queries=8, ms_per_query=1.25)
ASI = BM25.with_docids(
    DocidScores(docid=RANKED, expectation=RANKED | {"R@10": 0.5}, d_per_q=12.5, invalid={"all": 0.125, "first": 0.0}),
    DocidHealth(documents=12, docids=6, d_per_id=2.0, largest_bucket=3, perplexity=[1.5, 2.5], docid_perplexity=3.5),
    acc=0.375,
)
LAYOUT = """{
  "docid": {"R@1": 0.25, "R@5": 0.5, "R@10": 0.75, "MRR@10": 0.5},
  "expectation": {"R@1": 0.25, "R@5": 0.5, "R@10": 0.5, "MRR@10": 0.5},
  "document": {"R@1": 0.25, "R@5": 0.5, "R@10": 0.75, "MRR@10": 0.5, "nDCG@10": 0.625},
  "acc": 0.375, "d_per_id": 2.0, "d_per_q": 12.5, "invalid": {"all": 0.125, "first": 0.0},
  "docids": 6, "largest_bucket": 3, "perplexity": [1.5, 2.5], "queries": 8, "ms_per_query": 1.25
}"""


def test_report_layout():
    assert json.dumps(ASI.to_dict()) == json.dumps(json.loads(LAYOUT))  # as text, so that the order counts too
    assert Report.from_dict(json.loads(LAYOUT)) == ASI
    assert list(BM25.to_dict()) == ["document", "queries", "ms_per_query"]
    with pytest.raises(DataError, match="no entry recall; its entries are docid, "):
        Report.from_dict({"recall": 1.0, "queries": 1})
    with pytest.raises(DataError, match="needs the entry queries"):
        Report.from_dict({})


def test_report_rows():
    titles, asi, bm25 = report_rows({"asi": {"test": ASI}, "bm25": {"dev": BM25}})
    assert titles == [
        "system",
        "split",
        *(title for title in COLUMNS if title not in ("R@100", "ranked")),
    ]  # nothing has them
    assert asi[:6] == ["asi", "test", "0.250", "0.750", "0.500", "0.500"]
    assert asi[6:] == ["0.250", "0.750", "0.500", "0.625", "0.375", "2.00", "12.5", "0.125", "1.25"]
    assert bm25 == ["bm25", "dev", *"----", "0.250", "0.750", "0.500", "0.625", *"----", "1.25"]
