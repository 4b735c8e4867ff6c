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


def test_docids_of_different_length_count_by_their_mean():
    """() has .5 and would win by its product; (1,) has .3 * .9, whose root is .52. (2, 2) can't be as good any more."""
    first = torch.tensor([[0.5, 0.3, 0.2]]).log()
    second = torch.tensor([[[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.1, 0.1, 0.8]]]).log()
    asked = []
    step = table_step([first, second, torch.full((1, 3, 3, 3), 1 / 3).log()])

    def counted(moves):
        asked.append(moves)
        return step(moves)

    found = beam_search(counted, length=3, beams=2, end=0)
    assert found.codes[0].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert found.scores[0].exp().tolist() == pytest.approx([0.27**0.5, 0.5])
    assert len(asked) == 2


@pytest.mark.parametrize("beams", [1, 2, 5, 40])
def test_what_ends_is_found_by_itself_and_beside_others(beams):
    m, V = 3, 3
    tables = random_tables(6, m, V, seed=5)
    docids = [docid for n in range(m + 1) for docid in product(range(1, V), repeat=n)]
    existing = np.array(sorted((*docid, *[0] * (m - len(docid))) for docid in docids))
    for tree in (None, PrefixTree(existing, V)):
        together = beam_search(table_step(tables), m, beams, tree, end=0)
        for q in range(6):
            alone = beam_search(table_step([table[q : q + 1] for table in tables]), m, beams, tree, end=0)
            assert torch.equal(alone.codes[0], together.codes[q])
            assert torch.equal(alone.scores[0], together.scores[q])
            if tree is not None:
                found = together.rows[q][: len(docids)]
                assert existing[found.numpy()].tolist() == together.codes[q][: len(docids)].tolist()
            if beams >= len(docids):
                means = {d: score(tables, q, (*d, 0)[:m]) / min(len(d) + 1, m) for d in docids}
                best = sorted(docids, key=lambda docid: -means[docid])
                assert [tuple(c for c in row if c) for row in together.codes[q].tolist()][: len(best)] == best
                assert together.scores[q][: len(best)].tolist() == pytest.approx([means[d] for d in best], abs=1e-5)


def masked(tables, existing):
    """The tables with -inf for every prefix that no existing docid has."""
    found = []
    for t, table in enumerate(tables):
        exists = torch.zeros(table.shape[1:], dtype=torch.bool)
        exists[tuple(torch.from_numpy(existing[:, : t + 1].astype(np.int64)).T)] = True
        found.append(table.masked_fill(~exists, -torch.inf))
    return found


@pytest.mark.parametrize("beams", [1, 2, 7, 40])
def test_constrained_beam_equals_a_plain_one_that_is_never_given_anything_else(beams):
    m, V = 4, 5
    existing = np.unique(np.random.default_rng(3).integers(0, V, (60, m)), axis=0)
    tables = random_tables(5, m, V, seed=4)
    plain = beam_search(table_step(masked(tables, existing)), m, beams)
    found = beam_search(table_step(tables), m, beams, PrefixTree(existing, V))
    finite = plain.scores.isfinite()
    assert torch.equal(found.scores, plain.scores)
    assert torch.equal(found.codes[finite], plain.codes[finite])


def test_looks_ahead_past_a_bad_start():
    """One beam would begin with 0 (.6) and end with 0,0 at .3; behind 1 lies a docid that is well thought of."""
    first = torch.tensor([[0.6, 0.4]]).log()
    second = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]).log()
    tree = PrefixTree(np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), V=2)
    ahead = tree.look_ahead(torch.tensor([[0.1, 0.2, 0.5, 0.2]]).log())
    assert ahead[0].exp().tolist() == [pytest.approx([0.2, 0.5])]
    found = beam_search(table_step([first, second]), length=2, beams=1, tree=tree, ahead=ahead)
    assert found.codes[0, 0].tolist() == [1, 0]
    assert found.scores[0, 0].exp().item() == pytest.approx(0.4 * 0.9 * 0.5)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_wide_beam_that_looks_ahead_equals_brute_force(m):
    V = 4
    draw = np.random.default_rng(m)
    existing = np.unique(draw.integers(0, V, (30, m)), axis=0)
    tables = random_tables(2, m, V, seed=m)
    own = torch.from_numpy(draw.normal(size=(2, len(existing)))).float()
    tree = PrefixTree(existing, V)
    ahead = tree.look_ahead(own)
    found = beam_search(table_step(tables), m, len(existing), tree, ahead=ahead)
    for q in range(2):
        whole = np.array([score(tables, q, tuple(docid)) for docid in existing.tolist()]) + own[q].numpy()
        assert found.rows[q].tolist() == np.argsort(-whole, kind="stable").tolist()
        assert found.scores[q].numpy() == pytest.approx(np.sort(whole)[::-1], abs=1e-5)
        for depth in range(m):
            _, prefix = np.unique(existing[:, : depth + 1], axis=0, return_inverse=True)
            best = [own[q].numpy()[prefix.ravel() == i].max() for i in range(prefix.max() + 1)]
            assert ahead[depth][q].tolist() == pytest.approx(best)


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
