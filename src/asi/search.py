"""Query to docids to candidates to ranked hits.

Three ways to docids: `beam` (the paper's plain beam search), `constrained` (the beam follows only docids that exist
and looks ahead to how near their buckets are; the list is filled up with the nearest) and `one-pass` (m look-ups for
each, in what every code is worth to the query: by the heads, and by the documents that have it).
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

from asi.beam import stable_topk
from asi.candidates import Candidates, best_of_each_query, candidates_of
from asi.checkpoint import LoadedModel
from asi.config import SearchConfig
from asi.docid_search import Docids, NearDocids, constrained_beams, one_pass, one_pass_scores, plain_beams
from asi.encoder import TokenisedTexts
from asi.errors import ConfigError
from asi.features import Features
from asi.indexing import row_shape
from asi.matching import match, query_tokens
from asi.model import Encoded
from asi.ranking import unpack
from asi.records import Docid, Document, Hit
from asi.store import Store
from asi.view import BucketCentres, View, Views

QUERIES_PER_BATCH = 64
SMALLEST_BATCH = 4  # below this, matrix products take another path and round differently
CANDIDATE_SHARE = 0.02  # of the corpus, that is ranked where no number is given
LEAST_CANDIDATES = 100
WORST_MATCH = -1.0


class Searcher:
    """Answers queries from a model and a store; sees what is added or deleted at the next search."""

    def __init__(
        self, loaded: LoadedModel, store: Store, config: SearchConfig | None = None, views: Views | None = None
    ) -> None:
        self.model = loaded.model
        self.tokenise = loaded.tokenise
        self.store = store
        self.config = config or loaded.config.search
        self.has_decoder = loaded.config.loss.generation > 0
        self.views = views or Views(self.model, store)
        shape = row_shape(self.model)
        self.ranked, self.tokens = slice(0, shape.ranked), slice(shape.ranked, shape.whole)  # of a row in the store

    @property
    def looks_at_centres(self) -> bool:
        """Whether the docids behind the generated ones are chosen by their buckets' centres, not by codes alone."""
        return self.config.mode == "constrained" and self.config.ranking != "docid" and self.config.centre_share > 0

    @property
    def looks_at_codes(self) -> bool:
        """Whether docids are scored by what their codes stand for in the corpus, not by the heads alone."""
        return self.config.mode != "beam" and self.config.ranking != "docid" and self.config.code_weight > 0

    def current_view(self) -> View:
        if (lack := self.lacks()) is not None:
            raise ConfigError(lack)
        return self.views.current()

    def lacks(self) -> str | None:
        """What this way to search needs and the run has not."""
        if not self.has_decoder and self.config.mode != "one-pass":
            return "this model was trained without a decoder (loss.generation = 0): use --mode one-pass"
        if not self.store.meta.width and self.config.ranking != "docid":
            return "this index has no vectors (index.vectors = false): use --ranking docid"
        return None

    def candidates(self, view: View, k: int) -> int:
        """How many documents are ranked."""
        share = max(LEAST_CANDIDATES, int(CANDIDATE_SHARE * len(view.snapshot.numbers)))
        return max(k, self.config.candidates or share)

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
        view = self.current_view()
        for rows, query in queries if len(view.snapshot.codes) else ():
            for row, own in zip(rows, self.find_docids(query, view, count).best(count), strict=True):
                answers[row] = own
        return answers

    def docids_and_ranked(
        self, queries: "EncodedQueries", count: int, k: int
    ) -> tuple[list[list[Docid]], NDArray[np.int64]]:
        """The best `count` docids for each query, and how many documents are ranked for it (n,) to find k."""
        docids: list[list[Docid]] = [[] for rows, _ in queries for _ in rows]
        ranked = np.zeros(len(docids), dtype=np.int64)
        view = self.current_view()
        for rows, query in queries if len(view.snapshot.codes) else ():
            found = self.find_docids(query, view, max(count, self.candidates(view, k)))
            for row, own in zip(rows, found.best(count), strict=True):
                docids[row] = own
            ranked[rows] = np.bincount(self.candidates_of(found, view, k).query, minlength=len(rows))
        return docids, ranked

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
                    repeated = np.append(rows, np.full(max(0, SMALLEST_BATCH - len(rows)), rows[0]))
                    among = torch.from_numpy(np.searchsorted(rows, repeated)).to(states.device)
                    encoded = self.model.finish(states[among], mask[among])
                    groups.append(
                        (rows, PaddedQueries(encoded, self.token_vectors(tokens, repeated, encoded), len(rows)))
                    )
        return groups

    def token_vectors(self, tokens: TokenisedTexts, rows: NDArray[np.int64], encoded: Encoded) -> Tensor | None:
        if self.model.matcher is None:
            return None
        return query_tokens(self.model.matcher, self.model, Features(tokens, None, None), rows, encoded)

    def find_docids(self, query: "PaddedQueries", view: View, count: int) -> Docids:
        """At least `count` docids per query, if there are as many; the plain beam has as many as it has beams."""
        with torch.inference_mode():
            logits = self.model.heads(query.x)
            if self.config.mode == "one-pass":
                return one_pass(self.code_scores(query, logits, view)[: query.real], view, count)
            beams = self.config.beams
            generation = self.model.generation(query.encoded, logits)
            if self.config.mode == "beam":
                return plain_beams(generation, view, beams, query.real)
            nearness = self.nearness(query, view)
            promise = self.promise(query, logits, nearness, view)
            ahead = view.tree.look_ahead(self.config.ahead_weight * promise) if self.config.ahead_weight else None
            if nearness is not None:
                near = NearDocids(*stable_topk(nearness[: query.real], count + beams))
            else:
                near = self.near_docids(query, promise[: query.real], view, count + beams)
            return constrained_beams(generation, near, ahead, view, beams, query.real)

    def code_scores(self, query: "PaddedQueries", logits: Tensor, view: View) -> Tensor:
        """What every code is worth to the queries (Q, m, V): by the heads, and by the documents that have the code."""
        by_heads = logits.log_softmax(-1)
        if not self.looks_at_codes or (codes := view.code_vectors) is None:
            return by_heads
        return by_heads + self.config.code_weight * codes.scores(query.direction)

    def all_centres(self, view: View) -> BucketCentres | None:
        """The centres of all buckets, if all of them are looked at: then nothing depends on what codes stand for."""
        return view.centres if self.looks_at_centres and self.config.centre_share == 1 else None

    def nearness(self, query: "PaddedQueries", view: View) -> Tensor | None:
        """How near every bucket's centres are to the queries (Q, U), if all of them are looked at."""
        centres = self.all_centres(view)
        return centres.scores(query.direction) if centres is not None else None

    def promise(self, query: "PaddedQueries", logits: Tensor, nearness: Tensor | None, view: View) -> Tensor:
        """What every docid in use is worth to the queries (Q, U), for the beam that looks ahead: by its codes, or by
        the heads and the centres of its bucket, which say better than its codes what documents it has."""
        if nearness is None:
            return one_pass_scores(self.code_scores(query, logits, view), view)
        return one_pass_scores(logits.log_softmax(-1), view) + self.config.code_weight * nearness

    def near_docids(self, query: "PaddedQueries", by_codes: Tensor, view: View, count: int) -> NearDocids:
        """`count` docids in use that are near to each query, if there are as many: by their codes alone, or by the
        centres of those buckets that are best by their codes, if some are looked at."""
        if not self.looks_at_centres or (centres := view.centres) is None:
            return NearDocids(*stable_topk(by_codes, count))
        looked_at = max(count, int(self.config.centre_share * by_codes.size(1)))
        rows = stable_topk(by_codes, looked_at)[1]
        x = query.direction[: len(rows)]
        nearness = torch.stack([centres.scores_of(*own) for own in zip(x, rows, strict=True)])
        scores, order = stable_topk(nearness, count)
        return NearDocids(scores, rows.gather(1, order))

    def candidates_of(self, docids: Docids, view: View, k: int) -> Candidates:
        return candidates_of(docids, view.snapshot, self.candidates(view, k), k, self.config.bucket_cap)

    def answer(self, query: "PaddedQueries", k: int) -> list[list[tuple[Hit, Document]]]:
        """Ranked hits; started over if a document that was found has been replaced or deleted meanwhile."""
        for _ in range(3):
            view = self.current_view()
            if not len(view.snapshot.codes):
                return [[] for _ in range(query.real)]
            candidates = self.candidates_of(self.find_docids(query, view, self.candidates(view, k)), view, k)
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
        similarity = self.similarities(candidates, query.direction.cpu().numpy())
        if query.tokens is not None and self.config.token_weight:
            similarity = similarity + np.float32(self.config.token_weight) * self.matches(candidates, similarity, query)
        if self.config.ranking == "vector":
            return similarity
        return similarity + np.float32(self.config.docid_weight) * candidates.score

    def similarities(self, candidates: Candidates, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of each candidate's vector with its query's, query by query: all of them at once would be much to hold."""
        found = np.empty(len(candidates.number), dtype=np.float32)
        bounds = np.searchsorted(candidates.query, np.arange(len(x) + 1))
        for own, start, end in zip(x, bounds[:-1], bounds[1:], strict=True):
            rows = unpack(self.store.vectors(candidates.number[start:end], self.ranked))
            found[start:end] = rows.vectors @ own + rows.bias
        return found

    def matches(
        self, candidates: Candidates, similarity: NDArray[np.float32], query: "PaddedQueries"
    ) -> NDArray[np.float32]:
        """How well the tokens of the most similar candidates match the query's; the worst for the others."""
        assert query.tokens is not None
        assert self.model.matcher is not None
        found = np.full(len(similarity), WORST_MATCH, dtype=np.float32)
        chosen = best_of_each_query(candidates, similarity, self.config.matched, None, query.real)
        with torch.inference_mode():
            for i in range(query.real):
                own = chosen[candidates.query[chosen] == i]
                stored = self.store.vectors(candidates.number[own], self.tokens)
                found[own] = match(query.tokens[i], stored, self.model.matcher.kept)
        return found


class PaddedQueries(NamedTuple):
    """Encoded queries, of which only the first `real` are asked for."""

    encoded: Encoded
    tokens: Tensor | None  # (Q, T, d), if the model matches tokens
    real: int

    @property
    def x(self) -> Tensor:
        return self.encoded.x  # (Q, D)

    @property
    def direction(self) -> Tensor:
        return F.normalize(self.x, dim=-1)  # (Q, D) what documents, buckets and codes are compared with


EncodedQueries = list[
    tuple[NDArray[np.int64], PaddedQueries]
]  # groups of one padded length: places in the list, queries
