"""Query to docids to candidates to ranked hits.

Three ways to docids: `beam` (the paper's plain beam search), `constrained` (the beam follows only docids that exist,
and the list is filled up with the best docids by the heads) and `one-pass` (the heads alone: m look-ups per docid).
Equal queries get equal answers whatever they are batched with: a query is padded to its own length, never to its
neighbour's, and the small matrices of a single query are given the rows of four.
Letters: Q queries, K docids per query, m docid length, V codes per position, U docids in use, D width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from asi.batches import expand_ranges
from asi.beam import PrefixTree, beam_search, stable_topk
from asi.checkpoint import LoadedModel
from asi.config import SearchConfig
from asi.errors import ConfigError
from asi.model import Encoded, Generation
from asi.records import Docid, Document, Hit
from asi.store import Snapshot, Store

QUERIES_PER_BATCH = 64
SMALLEST_BATCH = 4  # below this, matrix products take another path and round differently
SCORES_AT_ONCE = 2**24  # queries x docids scored together in one-pass


class Docids(NamedTuple):
    """The docids found for Q queries, best first: rows of the snapshot's table, -1 for docids that nothing has."""

    rows: NDArray[np.int64]  # (Q, K)
    scores: NDArray[np.float32]  # (Q, K); -inf where there are fewer than K
    codes: NDArray[np.int64]  # (Q, K, m)


class Candidates(NamedTuple):
    """Documents of the docids' buckets, all queries in one flat list, in the order of the docids."""

    query: NDArray[np.int64]  # (n,)
    row: NDArray[np.int64]  # (n,) the docid's row
    number: NDArray[np.int64]  # (n,) the document's number in the store
    score: NDArray[np.float32]  # (n,) the docid's score


class View(NamedTuple):
    """One moment of the store, and the prefixes of its docids."""

    snapshot: Snapshot
    tree: PrefixTree


class Searcher:
    """Answers queries from a model and a store; sees what is added or deleted at the next search."""

    def __init__(self, loaded: LoadedModel, store: Store, config: SearchConfig | None = None) -> None:
        self.model = loaded.model
        self.tokenise = loaded.tokenise
        self.store = store
        self.config = config or loaded.config.search
        self.view: View | None = None

    def current_view(self) -> View:
        snapshot = self.store.snapshot()
        if self.view is None or self.view.snapshot is not snapshot:
            self.view = View(snapshot, PrefixTree(snapshot.codes, self.model.config.V))
        return self.view

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [[hit for hit, _ in found] for found in self.search_documents(queries, k)]

    def search_documents(self, queries: Sequence[str], k: int) -> list[list[tuple[Hit, Document]]]:
        """Like `search`, with the documents."""
        if k < 1:
            raise ConfigError(f"k must be at least 1, got {k}")
        answers: list[list[tuple[Hit, Document]]] = [[] for _ in queries]
        for rows, query in self.encode(queries):
            for row, answer in zip(rows, self.answer(query, k), strict=True):
                answers[row] = answer
        return answers

    def docids(self, queries: "EncodedQueries", count: int) -> list[list[Docid]]:
        """The best `count` docids for each query in this mode, also those that no document has (in `beam`)."""
        answers: list[list[Docid]] = [[] for rows, _ in queries for _ in rows]
        for rows, query in queries:
            found = self.find_docids(query, self.current_view(), count)
            for row, codes, scores in zip(rows, found.codes, found.scores, strict=True):
                answers[row] = [tuple(docid) for docid in codes[np.isfinite(scores)][:count].tolist()]
        return answers

    def head_docids(self, queries: "EncodedQueries") -> NDArray[np.int64]:
        """The docids (n, m) that the heads give the queries themselves: their "pseudo query ids"."""
        found = np.empty((sum(len(rows) for rows, _ in queries), self.model.config.m), dtype=np.int64)
        for rows, query in queries:
            found[rows] = self.model.heads(query.x).argmax(-1)[: len(rows)].cpu().numpy()
        return found

    def encode(self, texts: Sequence[str]) -> "EncodedQueries":
        tokens = self.tokenise(texts)
        groups = []
        lengths = tokens.padded_lengths
        with torch.inference_mode():
            for length in np.unique(lengths):
                same = np.flatnonzero(lengths == length)
                for start in range(0, len(same), QUERIES_PER_BATCH):
                    rows = same[start : start + QUERIES_PER_BATCH]
                    ids, mask = (part.to(self.model.device) for part in tokens.padded(rows))
                    states = self.model.encoder(ids, mask)
                    groups.append((rows, self.padded(states, mask, len(rows))))
        return groups

    def padded(self, states: Tensor, mask: Tensor, count: int) -> "PaddedQueries":
        if count < SMALLEST_BATCH:
            repeat = [*range(count), *[0] * (SMALLEST_BATCH - count)]
            states, mask = states[repeat], mask[repeat]
        x = self.model.adapt(self.model.pool(states, mask))
        return PaddedQueries(x, states, mask, count)

    def find_docids(self, query: "PaddedQueries", view: View, count: int) -> Docids:
        """At least `count` docids per query, if there are as many."""
        with torch.inference_mode():
            logits = self.model.heads(query.x)
            if self.config.mode == "one-pass":
                return one_pass(logits.log_softmax(-1)[: query.real], view.snapshot, count)
            beams = max(self.config.beams, count) if self.config.mode == "beam" else self.config.beams
            generation = self.model.generation(Encoded(query.x, query.states, query.mask), logits)
            if self.config.mode == "beam":
                return plain_beams(generation, view, beams, query.real)
            return constrained_beams(generation, logits, view, beams, count, query.real)

    def answer(self, query: "PaddedQueries", k: int) -> list[list[tuple[Hit, Document]]]:
        """Ranked hits; started over if a document that was found has been replaced or deleted meanwhile."""
        for _ in range(3):
            view = self.current_view()
            if not len(view.snapshot.codes):
                return [[] for _ in range(query.real)]
            docids = self.find_docids(query, view, max(k, self.config.candidates))
            candidates = candidates_of(docids, view.snapshot, max(k, self.config.candidates))
            scores = self.rank_scores(candidates, query)
            chosen = best_of_each_query(candidates, scores, k, self.config.bucket_cap, query.real)
            documents = self.store.documents(candidates.number[chosen])
            if None not in documents or view.snapshot is self.store.snapshot():
                break
        answers: list[list[tuple[Hit, Document]]] = [[] for _ in range(query.real)]
        codes = view.snapshot.codes[candidates.row[chosen]].tolist()
        for i, document, code in zip(chosen.tolist(), documents, codes, strict=True):
            if document is not None:
                hit = Hit(document.key, float(scores[i]), tuple(code))
                answers[candidates.query[i]].append((hit, document))
        return answers

    def rank_scores(self, candidates: Candidates, query: "PaddedQueries") -> NDArray[np.float32]:
        if self.config.ranking == "docid":
            return candidates.score
        vectors = self.store.vectors(candidates.number).astype(np.float32)  # (n, D)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        x = F.normalize(query.x, dim=-1).cpu().numpy()
        similarity = np.einsum("nd,nd->n", vectors, x[candidates.query])
        if self.config.ranking == "vector":
            return similarity
        return similarity + np.float32(self.config.docid_weight) * candidates.score


class PaddedQueries(NamedTuple):
    """Encoded queries, of which only the first `real` are asked for."""

    x: Tensor  # (Q, D)
    states: Tensor  # (Q, T, D)
    mask: Tensor  # (Q, T)
    real: int


EncodedQueries = list[
    tuple[NDArray[np.int64], PaddedQueries]
]  # groups of one padded length: places in the list, queries


def one_pass(log_probs: Tensor, snapshot: Snapshot, count: int) -> Docids:
    """The best `count` of all docids in use, scored by the heads' log-probabilities (Q, m, V) on the query alone."""
    codes = torch.from_numpy(snapshot.codes.astype(np.int64)).to(log_probs.device)  # (U, m)
    size = max(1, SCORES_AT_ONCE // max(1, len(codes)))
    tops = []
    for part in log_probs.split(size):
        scores = part[:, 0].index_select(1, codes[:, 0])  # (Q, U)
        for i in range(1, part.size(1)):
            scores = scores + part[:, i].index_select(1, codes[:, i])
        tops.append(stable_topk(scores, count))
    scores, rows = (torch.cat(parts).cpu().numpy() for parts in zip(*tops, strict=True))
    return Docids(rows, scores, snapshot.codes[rows].astype(np.int64))


def plain_beams(generation: Generation, view: View, beams: int, count: int) -> Docids:
    """The paper's beam search: any m codes, of which some may be no document's docid."""
    found = beam_search(generation, len(view.tree.levels), beams)
    codes = found.codes[:count].cpu()
    return Docids(view.tree.find(codes).numpy(), found.scores[:count].cpu().numpy(), codes.numpy())


def constrained_beams(
    generation: Generation, logits: Tensor, view: View, beams: int, wanted: int, count: int
) -> Docids:
    """The beam's docids, then the heads' best among the rest, to `wanted` docids in all or as many as there are."""
    beams = min(beams, len(view.snapshot.codes))
    found = beam_search(generation, logits.size(1), beams, view.tree)
    assert found.rows is not None
    rows, scores = found.rows[:count].cpu().numpy(), found.scores[:count].cpu().numpy()
    filled = one_pass(logits.log_softmax(-1)[:count], view.snapshot, min(wanted + beams, len(view.snapshot.codes)))
    is_new = ~(filled.rows[:, :, None] == rows[:, None, :]).any(-1)
    # A filled docid never stands before a generated one: its score is lowered below the last of them.
    gap = np.minimum(scores.min(1, where=np.isfinite(scores), initial=0)[:, None] - filled.scores[:, :1], 0)
    fill_scores = np.where(is_new, filled.scores + gap, -np.inf)
    order = np.argsort(~is_new, axis=1, kind="stable")
    rows = np.concatenate([rows, np.take_along_axis(filled.rows, order, 1)], axis=1)
    scores = np.concatenate([scores, np.take_along_axis(fill_scores, order, 1)], axis=1).astype(np.float32)
    return Docids(rows, scores, view.snapshot.codes[rows].astype(np.int64))


def candidates_of(docids: Docids, snapshot: Snapshot, limit: int) -> Candidates:
    """The documents of the docids' buckets, best docid first, at most `limit` for a query."""
    valid = (docids.rows >= 0) & np.isfinite(docids.scores)
    rows = np.where(valid, docids.rows, 0)
    sizes = np.where(valid, snapshot.offsets[rows + 1] - snapshot.offsets[rows], 0)
    before = np.cumsum(sizes, axis=1) - sizes
    sizes = np.clip(limit - before, 0, sizes)
    starts = snapshot.offsets[rows]
    items, owners = expand_ranges(starts.ravel(), (starts + sizes).ravel())
    K = docids.rows.shape[1]
    return Candidates(
        owners // K, rows.ravel()[owners], snapshot.numbers[items].astype(np.int64), docids.scores.ravel()[owners]
    )


def best_of_each_query(
    candidates: Candidates, scores: NDArray[np.float32], k: int, bucket_cap: int | None, queries: int
) -> NDArray[np.int64]:
    """Indices of each query's k best candidates, best first; equal scores in the order of document numbers."""
    order = np.lexsort((candidates.number, -scores, candidates.query))
    if bucket_cap is not None:
        order = order[rank_within(candidates.query[order], candidates.row[order]) < bucket_cap]
    place = (
        np.arange(len(order)) - np.searchsorted(candidates.query[order], np.arange(queries))[candidates.query[order]]
    )
    return order[place < k]


def rank_within(queries: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each item of a ranked list: how many items of the same query and bucket stand before it."""
    order = np.lexsort((np.arange(len(rows)), rows, queries))
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (queries[order][1:] != queries[order][:-1]) | (rows[order][1:] != rows[order][:-1])
    first = np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - first
    return rank
