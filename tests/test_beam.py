from itertools import product

import numpy as np
import pytest
import torch

from asi.beam import PrefixTree, beam_search, stable_topk


def table_step(tables):
    """A step function from full tables: tables[t] has shape (Q, V, ..., V) with t + 1 code axes."""
    state = {"codes": None}

    def step(moves):
        Q = len(tables[0])
        if moves is None:
            state["codes"] = torch.empty(Q, 1, 0, dtype=torch.long)
        else:
            code, parent = moves
            kept = state["codes"].gather(1, parent[:, :, None].expand(-1, -1, state["codes"].size(2)))
            state["codes"] = torch.cat([kept, code[:, :, None]], 2)
        codes = state["codes"]
        table = tables[codes.size(2)]
        return torch.stack([torch.stack([table[(q, *prefix)] for prefix in codes[q].tolist()]) for q in range(Q)])

    return step


def random_tables(Q, m, V, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(Q, *[V] * (t + 1), generator=generator).log_softmax(-1) for t in range(m)]


def score(tables, q, docid):
    return sum(float(tables[t][(q, *docid[: t + 1])]) for t in range(len(docid)))


def test_recovers_from_a_greedy_mistake():
    first = torch.tensor([[0.6, 0.4]]).log()
    second = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]).log()
    found = beam_search(table_step([first, second]), length=2, beams=2)
    assert found.codes[0, 0].tolist() == [1, 0]  # greedy would start with 0
    assert found.scores[0, 0].exp().item() == pytest.approx(0.36)


@pytest.mark.parametrize(("m", "V"), [(1, 7), (2, 5), (3, 4), (8, 2)])
def test_wide_beam_equals_brute_force(m, V):
    tables = random_tables(3, m, V, seed=m)
    found = beam_search(table_step(tables), m, beams=V**m)
    for q in range(3):
        best = sorted(product(range(V), repeat=m), key=lambda docid: -score(tables, q, docid))
        assert [tuple(docid) for docid in found.codes[q].tolist()] == best
        assert found.scores[q].tolist() == pytest.approx([score(tables, q, docid) for docid in best], abs=1e-5)


@pytest.mark.parametrize("beams", [1, 3, 50])
def test_constrained_beam_finds_existing_docids_only(beams):
    m, V = 3, 6
    draw = np.random.default_rng(0)
    existing = np.unique(draw.integers(0, V, (40, m)), axis=0).astype(np.uint16)
    tables = random_tables(4, m, V, seed=1)
    tree = PrefixTree(existing, V)
    found = beam_search(table_step(tables), m, beams, tree)
    for q in range(4):
        finite = found.scores[q].isfinite()
        rows = found.rows[q][finite]
        assert found.codes[q][finite].tolist() == existing[rows.numpy()].tolist()
        assert len(set(rows.tolist())) == len(rows)
        if beams >= len(existing):
            best = sorted(existing.tolist(), key=lambda docid: -score(tables, q, tuple(docid)))
            assert found.codes[q][finite].tolist() == best


def test_prefix_tree_finds_rows_of_docids():
    existing = np.array([[0, 1], [0, 3], [2, 0]], dtype=np.uint16)
    tree = PrefixTree(existing, V=4)
    asked = torch.tensor([[0, 3], [2, 0], [0, 0], [3, 3], [2, 1], [0, 1]])
    assert tree.find(asked).tolist() == [1, 2, -1, -1, -1, 0]
    assert PrefixTree(existing[:0], V=4).find(asked).tolist() == [-1] * 6


def test_prefix_tree_with_the_largest_sizes():
    V = 65_536
    existing = np.unique(np.random.default_rng(0).integers(0, V, (1000, 8)), axis=0).astype(np.uint16)
    tree = PrefixTree(existing, V)
    assert tree.find(torch.from_numpy(existing.astype(np.int64))).tolist() == list(range(len(existing)))


def test_stable_topk_puts_the_lower_index_first_among_equals():
    top, index = stable_topk(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]), 4)
    assert top.tolist() == [[2.0, 2.0, 2.0, 1.0]]
    assert index.tolist() == [[1, 2, 4, 0]]
