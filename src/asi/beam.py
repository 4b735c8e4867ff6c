"""Beam search over docids, plain or along the prefixes of docids that exist. Knows no model.

Letters: Q queries, K beams, m docid length, V codes per position, U existing docids.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The codes just taken and the beams they continue, both (Q, K), or None at the start, to log-probabilities (Q, K, V).
Step = Callable[[tuple[Tensor, Tensor] | None], Tensor]
# Told after every position: its number, the scores and prefixes (Q, K), and the codes so far (Q, K, depth).
Visit = Callable[[int, Tensor, Tensor, Tensor], None]


class Beams(NamedTuple):
    codes: Tensor  # (Q, K, m), best first
    scores: Tensor  # (Q, K); -inf where fewer than K docids exist
    rows: Tensor | None  # (Q, K) rows of the existing docids, for a constrained search


class PrefixTree:
    """The prefixes of all existing docids as sorted arrays: one number per distinct prefix, `parent * V + code`.

    A prefix is known by its rank among the prefixes of its length; the rank of a whole docid is its row.
    """

    def __init__(self, codes: NDArray[np.integer[Any]], V: int) -> None:
        """`codes` (U, m) are the docids in sorted order; equal ones count as one."""
        self.V = V
        self.levels: list[Tensor] = []
        parent = np.zeros(len(codes), dtype=np.int64)
        for i in range(codes.shape[1]):
            edges = parent * V + codes[:, i]  # ascending, because the docids are sorted
            first = np.ones(len(edges), dtype=bool)
            first[1:] = edges[1:] != edges[:-1]
            self.levels.append(torch.from_numpy(edges[first]))
            parent = np.cumsum(first) - 1

    def continuations(self, depth: int, prefixes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What continues each of the flat `prefixes` (n,): (row of prefixes, code, rank of the longer prefix)."""
        level = self.levels[depth]
        start = torch.searchsorted(level, prefixes * self.V)
        count = torch.searchsorted(level, (prefixes + 1) * self.V) - start
        row = torch.repeat_interleave(torch.arange(len(prefixes)), count)
        within = torch.arange(len(row)) - torch.repeat_interleave(count.cumsum(0) - count, count)
        rank = start[row] + within
        return row, level[rank] - prefixes[row] * self.V, rank

    def rank(self, depth: int, prefixes: Tensor, codes: Tensor) -> Tensor:
        """The ranks of prefixes that exist, one code longer; of no meaning for those that don't."""
        edges = prefixes * self.V + codes
        return torch.searchsorted(self.levels[depth], edges).clamp(max=len(self.levels[depth]) - 1)

    def find(self, codes: Tensor) -> Tensor:
        """The rows of whole docids (..., m), -1 for those that don't exist."""
        prefixes = torch.zeros(codes.shape[:-1], dtype=torch.long)
        exists = torch.full(codes.shape[:-1], len(self.levels[0]) > 0)
        for depth in range(codes.size(-1)) if exists.any() else ():
            edges = prefixes * self.V + codes[..., depth]
            prefixes = self.rank(depth, prefixes, codes[..., depth])
            exists &= self.levels[depth][prefixes] == edges
        return torch.where(exists, prefixes, -1)

    def look_ahead(self, scores: Tensor) -> list[Tensor]:
        """From scores (Q, U) of the existing docids, for every length the best that each prefix can lead to."""
        best = [scores]
        for level, shorter in zip(self.levels[:0:-1], self.levels[-2::-1], strict=True):
            parents = (level // self.V).to(scores.device).expand(len(scores), -1)
            empty = scores.new_full((len(scores), len(shorter)), -torch.inf)
            best.append(empty.scatter_reduce(1, parents, best[-1], "amax"))
        return best[::-1]


def beam_search(
    step: Step,
    length: int,
    beams: int,
    tree: PrefixTree | None = None,
    visit: Visit | None = None,
    ahead: list[Tensor] | None = None,
) -> Beams:
    """The `beams` best docids for each query under `step`, best first; only existing ones if a tree is given.

    `ahead` (of the tree's `look_ahead`) is added to the scores by which beams are kept: a prefix that leads to a docid
    of promise survives a bad start, and a whole docid's score is that of `step` plus its own. `visit` sees the
    unfinished ones too. Equal scores keep the order of beams and codes, so that equal input gives equal output.
    """
    moves: tuple[Tensor, Tensor] | None = None
    codes = scores = kept = prefixes = torch.empty(0)
    for depth in range(length):
        log_probs = step(moves)  # (Q, K, V)
        Q, _, V = log_probs.shape
        if depth == 0:
            codes = torch.empty(Q, 1, 0, dtype=torch.long, device=log_probs.device)
            scores = torch.zeros(Q, 1, device=log_probs.device)
            prefixes = torch.zeros(Q, 1, dtype=torch.long)
        total = scores[:, :, None] + log_probs
        promise = 0 if tree is None else promise_of(total, tree, depth, prefixes, ahead)
        kept, flat = stable_topk((total + promise).flatten(1), beams)
        scores = total.flatten(1).gather(1, flat).masked_fill(kept == -torch.inf, -torch.inf)
        parent, code = flat // V, flat % V
        codes = torch.cat([codes.gather(1, parent[:, :, None].expand(-1, -1, depth)), code[:, :, None]], dim=2)
        if tree is not None:
            prefixes = tree.rank(depth, prefixes.gather(1, parent.cpu()), code.cpu())
        moves = (code, parent)
        if visit is not None:
            visit(depth, kept, prefixes, codes)
    return Beams(codes, kept, prefixes if tree is not None else None)


def promise_of(total: Tensor, tree: PrefixTree, depth: int, prefixes: Tensor, ahead: list[Tensor] | None) -> Tensor:
    """What is added to scores (Q, K, V): -inf for every code that continues no existing docid, else what is ahead."""
    row, code, rank = (part.to(total.device) for part in tree.continuations(depth, prefixes.flatten()))
    promise = torch.full_like(total, -torch.inf)
    promise.flatten(0, 1)[row, code] = 0.0 if ahead is None else ahead[depth][row // total.size(1), rank]
    return promise


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, descending; among equals the lower index first, which `topk` does not promise."""
    k = min(k, values.size(1))
    top, index = values.topk(k, dim=1)
    index, order = index.sort(dim=1, stable=True)
    top = top.gather(1, order)
    top, order = top.sort(dim=1, descending=True, stable=True)
    return top, index.gather(1, order)
