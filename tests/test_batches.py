import numpy as np
import pytest

from asi.arrays import expand_ranges
from asi.batches import Batch, GroupedPairs, TrainingPairs, training_texts
from asi.datasets import open_dataset
from asi.errors import DataError

PAIRS = np.array([(0, 0), (0, 3), (1, 1), (2, 1), (2, 2), (3, 3), (4, 0), (5, 4)])


def test_negatives_equal_brute_force():
    pairs = TrainingPairs(PAIRS, seed=0, batch=8)
    known = set(map(tuple, PAIRS.tolist()))
    batch = Batch(np.array([0, 0, 2, 3, 5, 1]), np.array([0, 3, 2, 3, 4, 1]), step=0)
    expected = [[(q, d) not in known for d in batch.documents.tolist()] for q in batch.queries.tolist()]
    assert pairs.negatives(batch).tolist() == expected


def test_an_epoch_has_every_pair_once_and_the_next_another_order():
    pairs = TrainingPairs(PAIRS, seed=3, batch=4)
    first, second = (
        [tuple(p) for s in steps for p in zip(*map(np.ndarray.tolist, pairs.at(s)[:2]), strict=True)]
        for steps in ((0, 1), (2, 3))
    )
    assert sorted(first) == sorted(second) == sorted(map(tuple, PAIRS.tolist()))
    assert first != second


def test_further_pairs_have_a_share_of_every_batch():
    further = np.array([(6 + i, i % 5) for i in range(40)])
    both = np.concatenate([PAIRS, further])
    pairs = TrainingPairs(both, 0, 8, own=len(PAIRS), further_share=0.25)
    assert (pairs.batch, pairs.steps_per_epoch) == (8, 1)
    steps = [pairs.at(step) for step in range(20)]
    assert all((batch.queries >= 6).sum() == 2 for batch in steps)
    seen = [q for batch in steps for q in batch.queries.tolist() if q >= 6]
    assert sorted(seen) == list(range(6, 46))
    assert (TrainingPairs(both, 0, 24, len(PAIRS)).at(0).queries >= 6).sum() == 20  # as many as their part of all
    assert (TrainingPairs(both, 0, 8, len(PAIRS), 0.0).at(0).queries < 6).all()
    few = TrainingPairs(both, 0, 40, len(PAIRS), 0.25)  # no more than a share, also if own pairs do not fill the rest
    assert [(few.at(0).queries < 6).sum(), (few.at(0).queries >= 6).sum()] == [8, 2]
    assert pairs.negatives(Batch(np.array([6]), np.array([0]), 0)).tolist() == [[False]]


def test_a_step_depends_on_its_number_alone():
    one, other = TrainingPairs(PAIRS, 3, 4), TrainingPairs(PAIRS, 3, 4)
    one.at(0), one.at(5)
    assert [part.tolist() for part in one.at(7)[:2]] == [part.tolist() for part in other.at(7)[:2]]


def test_a_batch_larger_than_the_data_is_cut():
    assert TrainingPairs(PAIRS, 0, 4096).batch == len(PAIRS)


def test_expand_ranges():
    items, owners = expand_ranges(np.array([3, 7, 8]), np.array([5, 7, 9]))
    assert (items.tolist(), owners.tolist()) == ([3, 4, 8], [0, 0, 2])


def test_training_texts_of_a_data_set(beir):
    texts = training_texts(open_dataset(str(beir)))
    assert len(texts.documents) == 48
    query, document = texts.pairs[0]
    assert set(texts.documents[document].title.split()) <= set(texts.queries[query].split())


def test_one_document_can_not_be_contrasted(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"query": "a", "document": "b"}\n{"query": "c", "document": "b"}\n')
    with pytest.raises(DataError, match="fewer than two documents"):
        training_texts(open_dataset(str(tmp_path / "pairs.jsonl")))


def test_grouped_pairs_draw_one_query_of_each_document_group_first():
    pairs = np.array([(query, query % 6) for query in range(30)])
    groups = np.array([0, 1, 0, 1, 0, 1])
    drawn = GroupedPairs(pairs, seed=0, batch=4, groups=groups)
    seen = set()
    for step in range(200):
        batch = drawn.at(step)
        assert len(set(batch.documents.tolist())) == 4
        assert (batch.queries % 6 == batch.documents).all()
        assert len(set(groups[batch.documents[:3]])) == 1  # a whole group, then one of the other
        seen |= set(batch.queries.tolist())
    assert seen == set(range(30))
    assert drawn.at(7).queries.tolist() == drawn.at(7).queries.tolist()
