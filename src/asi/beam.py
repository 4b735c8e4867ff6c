"""Beam search over docids, plain or along the prefixes of docids that exist. Knows no model.

Letters: Q queries, K beams, m docid length, V codes per position, U existing docids.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
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

    def rank(self, depth: int, prefixes: Tensor, codes: Tensor | int) -> Tensor:
        """The ranks of prefixes that exist, one code longer; of no meaning for those that don't."""
        edges = prefixes * self.V + codes
        return torch.searchsorted(self.levels[depth], edges).clamp(max=len(self.levels[depth]) - 1)

    def find(self, codes: Tensor) -> Tensor:
        """The rows of whole docids (..., m), -1 for those that don't exist."""
        prefixes = torch.zeros(codes.shape[:-1], dtype=torch.long)
        exists = torch.full(codes.shape[:-1], len(self.levels[0]) > 0)
        for depth in range(codes.size(-1)) if exists.any() else ():
            exists &= self.has(depth, prefixes, codes[..., depth])
            prefixes = self.rank(depth, prefixes, codes[..., depth])
        return torch.where(exists, prefixes, -1)

    def has(self, depth: int, prefixes: Tensor, codes: Tensor | int) -> Tensor:
        """Which prefixes go on with these codes, as booleans."""
        found: Tensor = self.levels[depth][self.rank(depth, prefixes, codes)] == prefixes * self.V + codes
        return found

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
    end: int | None = None,
) -> Beams:
    """The `beams` best docids for each query under `step`, best first; only existing ones if a tree is given.

    `ahead` (of the tree's `look_ahead`) is added to the scores by which beams are kept: a prefix that leads to a docid
    of promise survives a bad start, and a whole docid's score is that of `step` plus its own. `visit` sees the
    unfinished ones too. Equal scores keep the order of beams and codes, so that equal input gives equal output.

    Where docids differ in length, `end` is the code that ends one and fills it up. A docid that has ended leaves the
    beam, and counts by the mean score of its codes, `end` among them: by their sum short ones would win. A query is
    done when as many as it has beams have ended and nothing in the beam has a better mean, unless somebody visits.
    """
    log_probs = step(None)  # (Q, 1, V)
    beam = Beam.start(log_probs)
    codes = torch.empty(*beam.code.shape, 0, dtype=torch.long, device=log_probs.device)
    ended = None if end is None else Ended.none(len(log_probs), beams, length, end, log_probs)
    for depth in range(length):
        if depth:
            log_probs = step((beam.code, beam.parent))  # (Q, K, V)
        if ended is not None:
            ended, log_probs = ended.and_those_that_end_now(beam, log_probs, codes, tree)
        if tree is None:
            beam = continued(beam, log_probs, beams)
        else:
            beam = continued_along(tree, depth, beam, log_probs, beams, ahead)
        before = codes.gather(1, beam.parent[:, :, None].expand(-1, -1, depth))
        codes = torch.cat([before, beam.code[:, :, None]], dim=2)
        if visit is not None:
            visit(depth, beam.kept, beam.prefixes, codes)
        elif ended is not None:
            done = beam.scores[:, 0] / (depth + 1) <= ended.scores[:, -1]
            if done.all():
                break
            beam = beam._replace(scores=beam.scores.masked_fill(done[:, None], -torch.inf))
    if ended is not None:
        if codes.size(2) == length:
            ended = ended.joined(beam.scores / length, codes)
        return Beams(ended.codes, ended.scores, tree.find(ended.codes.cpu()) if tree is not None else None)
    return Beams(codes, beam.kept, beam.prefixes if tree is not None else None)


class Ended(NamedTuple):
    """The best docids that have ended, in a search for docids of different length."""

    codes: Tensor  # (Q, K, m)
    scores: Tensor  # (Q, K), best first; -inf where fewer have ended
    end: int

    @classmethod
    def none(cls, queries: int, beams: int, length: int, end: int, like: Tensor) -> "Ended":
        codes = torch.full((queries, beams, length), end, device=like.device)
        return cls(codes, like.new_full((queries, beams), -torch.inf), end)

    def and_those_that_end_now(
        self, beam: "Beam", log_probs: Tensor, codes: Tensor, tree: PrefixTree | None
    ) -> tuple["Ended", Tensor]:
        """And the log-probabilities without those of the end, so that the beam goes on with the others."""
        depth = codes.size(2)
        scores = beam.scores + log_probs[:, :, self.end]
        if tree is not None:
            scores = scores.where(tree.has(depth, beam.prefixes, self.end).to(scores.device), -torch.inf)
        others = log_probs.index_fill(2, torch.tensor(self.end, device=log_probs.device), -torch.inf)
        return self.joined(scores / (depth + 1), codes), others

    def joined(self, scores: Tensor, codes: Tensor) -> "Ended":
        """With more of them: scores (Q, n), codes (Q, n, as many as they have)."""
        length = self.codes.size(2)
        filled = F.pad(codes, (0, length - codes.size(2)), value=self.end)
        kept, chosen = stable_topk(torch.cat([self.scores, scores], dim=1), self.scores.size(1))
        both = torch.cat([self.codes, filled], dim=1)
        return Ended(both.gather(1, chosen[:, :, None].expand(-1, -1, length)), kept, self.end)


class Beam(NamedTuple):
    """What is kept after a position, best first; all (Q, K)."""

    scores: Tensor
    kept: Tensor  # what they were kept by: the scores, and what is ahead
    code: Tensor
    parent: Tensor  # the beam before it that is continued
    prefixes: Tensor  # ranks in the tree, on its device

    @classmethod
    def start(cls, log_probs: Tensor) -> "Beam":
        """One empty docid for each query."""
        scores, numbers = torch.zeros_like(log_probs[:, :, 0]), torch.zeros(len(log_probs), 1, dtype=torch.long)
        return cls(scores, scores, numbers.to(scores.device), numbers.to(scores.device), numbers)


def continued(beam: Beam, log_probs: Tensor, beams: int) -> Beam:
    """The best continuations by any code."""
    V = log_probs.size(2)
    scores, flat = stable_topk((beam.scores[:, :, None] + log_probs).flatten(1), beams)
    return Beam(scores, scores, flat % V, flat // V, beam.prefixes)


def continued_along(
    tree: PrefixTree, depth: int, beam: Beam, log_probs: Tensor, beams: int, ahead: list[Tensor] | None
) -> Beam:
    """The best continuations that exist: only they are looked at, a few where codes are many."""
    Q, K, _ = log_probs.shape
    row, code, rank = tree.continuations(depth, beam.prefixes.flatten())  # query by query, beam by beam, code by code
    counts = torch.bincount(row // K, minlength=Q)
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(row)) - starts[row // K]
    row, code, column, starts = (part.to(log_probs.device) for part in (row, code, column, starts))
    query = row // K
    scores = beam.scores.flatten()[row] + log_probs.flatten(0, 1)[row, code]
    promising = scores if ahead is None else scores + ahead[depth][query, rank.to(query.device)]
    side_by_side = scores.new_full((Q, int(counts.max())), -torch.inf)
    side_by_side[query, column] = promising
    kept, chosen = stable_topk(side_by_side, beams)
    chosen = (starts[:, None] + chosen).clamp(max=len(row) - 1)  # where a query has fewer: any, with a score of -inf
    scores = scores[chosen].masked_fill(kept == -torch.inf, -torch.inf)
    return Beam(scores, kept, code[chosen], row[chosen] % K, rank[chosen.cpu()])


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, descending; among equals the lower index first, which `topk` does not promise. If not
    all equals of the smallest fit in, which of them do is its choice."""
    k = min(k, values.size(1))
    top, index = values.topk(k, dim=1)
    index, order = index.sort(dim=1, stable=True)
    top = top.gather(1, order)
    top, order = top.sort(dim=1, descending=True, stable=True)
    return top, index.gather(1, order)
