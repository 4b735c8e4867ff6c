"""Query to docids, over all docids in use: by codes in one pass, by the plain beam, by the constrained beam.

Letters: Q queries, K docids per query, m docid length, V codes per position, U docids in use.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.beam import beam_search, stable_topk
from asi.model import Generation
from asi.records import Docid
from asi.view import View

SCORES_AT_ONCE = 2**24  # queries x docids scored together in one-pass


class Docids(NamedTuple):
    """The docids found for Q queries, best first: rows of the snapshot's table, -1 for docids that nothing has."""

    rows: NDArray[np.int64]  # (Q, K)
    scores: NDArray[np.float32]  # (Q, K); -inf where there are fewer than K
    codes: NDArray[np.int64]  # (Q, K, m)

    def best(self, count: int) -> list[list[Docid]]:
        """The first `count` of each query."""
        return [
            [tuple(docid) for docid in codes[np.isfinite(scores)][:count].tolist()]
            for codes, scores in zip(self.codes, self.scores, strict=True)
        ]


class NearDocids(NamedTuple):
    """Docids in use, nearest first: scores and rows, both (Q, n)."""

    scores: Tensor
    rows: Tensor


def one_pass_scores(code_scores: Tensor, view: View) -> Tensor:
    """Scores (Q, U) of all docids in use by what every code is worth (Q, m, V): m look-ups and m - 1 additions."""
    scores = code_scores[:, 0].index_select(1, view.columns[0])
    for i in range(1, len(view.columns)):
        scores = scores + code_scores[:, i].index_select(1, view.columns[i])
    return scores


def one_pass(code_scores: Tensor, view: View, count: int) -> Docids:
    """The best `count` of all docids in use, by their codes on the query alone."""
    codes = view.snapshot.codes
    size = max(1, SCORES_AT_ONCE // max(1, len(codes)))
    tops = [stable_topk(one_pass_scores(part, view), count) for part in code_scores.split(size)]
    scores, rows = (torch.cat(parts).cpu().numpy() for parts in zip(*tops, strict=True))
    return Docids(rows, scores, codes[rows].astype(np.int64))


def plain_beams(generation: Generation, view: View, beams: int, count: int) -> Docids:
    """The paper's beam search: any m codes, of which some may be no document's docid."""
    found = beam_search(generation, len(view.tree.levels), beams)
    codes = found.codes[:count].cpu()
    return Docids(view.tree.find(codes).numpy(), found.scores[:count].cpu().numpy(), codes.numpy())


def constrained_beams(
    generation: Generation,
    filling: NearDocids,
    ahead: list[Tensor] | None,
    view: View,
    beams: int,
    count: int,
) -> Docids:
    """The beam's docids, then the near ones that are not among them."""
    beams = min(beams, len(view.snapshot.codes))
    found = beam_search(generation, len(view.tree.levels), beams, view.tree, ahead=ahead)
    assert found.rows is not None
    rows, scores = found.rows[:count], found.scores[:count].cpu()
    near, near_rows = (part.cpu() for part in filling)
    is_new = ~(near_rows[:, :, None] == rows[:, None, :]).any(-1)
    order = (~is_new).to(torch.uint8).sort(dim=1, stable=True).indices  # the new ones first
    # A filled docid never stands before a generated one: its score is lowered below the last of them.
    last = scores.masked_fill(scores.isinf(), torch.inf).amin(1, keepdim=True)
    lowered = (near + (last - near[:, :1]).clamp(max=0)).masked_fill(~is_new, -torch.inf)
    all_rows = torch.cat([rows, near_rows.gather(1, order)], dim=1).numpy()
    all_scores = torch.cat([scores, lowered.gather(1, order)], dim=1).numpy()
    return Docids(all_rows, all_scores, view.snapshot.codes[all_rows].astype(np.int64))
