"""Generative retrieval by n-grams (SEAL, MINDER): the decoder writes parts of documents, and these vote for documents.

Every text of the corpus is cut into all its windows of up to LENGTH word pieces; sorted, they are a suffix array that
is cut off at that length, and a prefix tree over them lets the beam write only what stands somewhere in the corpus.
All partial hypotheses count. Letters: W windows, L window length, V word pieces, Q queries, K beams, G n-grams.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.batches import Batch
from asi.beam import PrefixTree, beam_search
from asi.encoder import TokenisedTexts
from asi.model import Decoder, Encoded, Generation
from asi.records import Hit
from asi.systems.identifiers import END
from asi.systems.sequences import BATCH, CODES_AT_ONCE, SequenceObjective, Shape, UntilTheEnd, sequence_loss
from asi.systems.workplace import Built, Workplace, trained_parameters
from asi.training import Nothing

Rows = NDArray[np.int64]

LENGTH = 8  # word pieces of an n-gram, at most
NGRAMS_PER_QUERY = (
    4  # that are trained on, for each view: those that share most with the query, of some drawn at random
)
DRAWN = 10
BEAMS = 15
ALPHA = 2.0  # SEAL's exponent of an n-gram's weight
BETA = 0.8  # SEAL's discount for pieces that a heavier n-gram covers already
SMOOTHING = 5  # added to counts
LIGHTEST = 1e-9


class View(NamedTuple):
    """One kind of text of every document, as all windows over its word pieces."""

    tokens: TokenisedTexts  # of the view's texts
    owners: Rows  # (texts,) the document of each text
    windows: Rows  # (W, L) sorted, marker first
    documents: Rows  # (W,) the document that each window stands in
    tree: PrefixTree
    starts: list[Rows]  # per depth: where the windows with each prefix begin

    @classmethod
    def of(
        cls, tokens: TokenisedTexts, owners: Rows, marker: int, number: NDArray[np.int64], V: int, starts: int = 1
    ) -> "View":
        """`number` gives each word piece of the encoder its number here; `marker` stands before every window.

        Every text has one token behind it that is none of its own, and `starts` before it.
        """
        places, owner_of_window = windows_of(tokens, starts)
        pieces = np.where(places >= 0, number[tokens.ids[np.maximum(places, 0)]], END)
        windows = np.concatenate([np.full((len(pieces), 1), marker), pieces], axis=1)
        order = np.lexsort(windows.T[::-1])
        windows = windows[order]
        firsts, is_new = [], np.zeros(len(windows), dtype=bool)
        is_new[:1] = True
        for depth in range(windows.shape[1]):
            is_new[1:] |= windows[1:, depth] != windows[:-1, depth]
            firsts.append(np.append(np.flatnonzero(is_new), len(windows)))
        return cls(tokens, owners, windows, owners[owner_of_window][order], PrefixTree(windows, V), firsts)


def windows_of(tokens: TokenisedTexts, starts: int) -> tuple[Rows, Rows]:
    """Places of the pieces of every window (W, LENGTH), -1 behind the text's end, and the text of each window."""
    texts = np.repeat(np.arange(len(tokens)), tokens.lengths)
    place = np.arange(len(tokens.ids))
    inner = (place >= tokens.offsets[texts] + starts) & (place < tokens.offsets[texts + 1] - 1)
    first, last = place[inner], tokens.offsets[texts[inner] + 1] - 1
    places = first[:, None] + np.arange(LENGTH)
    return np.where(places < last[:, None], places, -1), texts[inner]


class NgramObjective(SequenceObjective):
    """Queries to n-grams of their documents; a step draws one n-gram for every pair."""

    def __init__(self, model: Decoder, workplace: Workplace, targets: Rows) -> None:
        features = workplace.features(workplace.texts.queries)
        batch = max(16, min(BATCH, CODES_AT_ONCE // (model.m * model.V)))
        pairs = workplace.pairs(np.stack([targets[:, 0], np.arange(len(targets))], axis=1), batch)
        codes = torch.from_numpy(targets[:, 2:])
        super().__init__(model, workplace.encoder, features, codes, [(1.0, pairs)], ends=True)

    def pair_losses(
        self, representations: Nothing, text: Encoded, batch: Batch, chosen: NDArray[np.bool_], phase: Any
    ) -> dict[str, Tensor]:
        codes = self.codes[torch.from_numpy(batch.documents)].to(text.x.device)
        log_probs = self.model(text, codes)
        log_probs = torch.cat([torch.zeros_like(log_probs[:, :1]), log_probs[:, 1:]], dim=1)  # the marker is given
        return {"generation": sequence_loss(log_probs, codes, ends=True).sum()}


def training_ngrams(workplace: Workplace, views: Sequence[View], number: Rows, seed: int) -> Rows:
    """(query, document, codes...) for every pair and view: windows of the document that share most with the query."""
    draw = np.random.default_rng(seed)
    queries = workplace.tokenise(workplace.texts.queries)
    ids = number[queries.ids]
    starts, ends = queries.offsets[:-1] + workplace.tokenise.starts, queries.offsets[1:] - 1
    pieces = [ids[start:end] for start, end in zip(starts, ends, strict=True)]
    found = []
    for view in views:
        by_document = np.argsort(view.documents, kind="stable")
        bounds = np.searchsorted(view.documents[by_document], np.arange(len(workplace.keys) + 1))
        for query, document in workplace.texts.pairs.tolist():
            own = by_document[bounds[document] : bounds[document + 1]]
            if not len(own):
                continue
            drawn = view.windows[draw.choice(own, min(DRAWN, len(own)), replace=False)]
            shared = (np.isin(drawn[:, 1:], pieces[query]) & (drawn[:, 1:] != END)).sum(axis=1)
            best = drawn[np.argsort(-shared, kind="stable")[:NGRAMS_PER_QUERY]]
            found.append(np.concatenate([np.full((len(best), 2), (query, document)), best], axis=1))
    return np.concatenate(found)


class Ngrams(NamedTuple):
    """The n-grams that were written for a query, heaviest first."""

    weights: NDArray[np.float64]  # (G,)
    pieces: Rows  # (G, L), END where it is shorter
    documents: list[Rows]  # for each n-gram, where it stands


def weight_of(log_probability: NDArray[np.float64], count: NDArray[np.float64], total: int) -> NDArray[np.float64]:
    """SEAL's weight: how much likelier an n-gram is with the query than without, as log odds, to the power ALPHA."""
    with_query = np.clip(np.exp(log_probability), LIGHTEST, 1 - LIGHTEST)
    alone = np.clip((count + SMOOTHING) / (total + SMOOTHING), LIGHTEST, 1 - LIGHTEST)
    odds = np.log(with_query * (1 - alone)) - np.log(alone * (1 - with_query))
    return np.maximum(odds, 0) ** ALPHA


def document_scores(ngrams: Ngrams) -> tuple[Rows, NDArray[np.float64]]:
    """SEAL's intersective score: a document's n-grams add up, each less the more of its pieces are covered already."""
    if not len(ngrams.weights):
        return np.empty(0, np.int64), np.empty(0)
    documents = np.unique(np.concatenate(ngrams.documents))
    used = np.unique(ngrams.pieces)
    covered = np.zeros((len(documents), len(used)), dtype=bool)
    scores = np.zeros(len(documents))
    for weight, pieces, own in zip(ngrams.weights, ngrams.pieces, ngrams.documents, strict=True):
        rows = np.searchsorted(documents, own)
        columns = np.searchsorted(used, np.unique(pieces[pieces != END]))
        new = 1 - covered[np.ix_(rows, columns)].mean(axis=1)
        scores[rows] += weight * (1 - BETA + BETA * new)
        covered[np.ix_(rows, columns)] = True
    return documents, scores


class NgramRetriever:
    """Writes n-grams under the constraint of each view, and adds up what they say about documents."""

    def __init__(self, workplace: Workplace, decoder: Decoder, views: Sequence[View], markers: Sequence[int]) -> None:
        self.workplace = workplace
        self.decoder = decoder.eval()
        self.views = views
        self.markers = markers

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        encoded = self.workplace.encode(queries)
        written = [self.written(encoded, view, marker) for view, marker in zip(self.views, self.markers, strict=True)]
        return [self.ranked([by_query[i] for by_query in written], k) for i in range(len(queries))]

    def ranked(self, views: Sequence[Ngrams], k: int) -> list[Hit]:
        total: dict[int, float] = {}
        for ngrams in views:
            documents, scores = document_scores(ngrams)
            for document, score in zip(documents.tolist(), scores.tolist(), strict=True):
                total[document] = total.get(document, 0.0) + score
        best = sorted(total, key=lambda document: (-total[document], document))[:k]
        return [Hit(self.workplace.keys[document], total[document]) for document in best]

    @torch.inference_mode()
    def written(self, query: Encoded, view: View, marker: int) -> list[Ngrams]:
        """The n-grams that the beam has written for each query, the unfinished ones too."""
        found: list[list[tuple[float, int, int]]] = [[] for _ in range(len(query.x))]  # score, depth, prefix

        def visit(depth: int, scores: Tensor, prefixes: Tensor, codes: Tensor) -> None:
            if depth == 0:
                return  # only the marker
            written = (scores.isfinite() & (codes[:, :, -1] != END)).tolist()
            for own, is_written, values, rows in zip(found, written, scores.tolist(), prefixes.tolist(), strict=True):
                own += [(values[j], depth, rows[j]) for j in range(len(rows)) if is_written[j]]

        step = MarkedStart(UntilTheEnd(Generation(self.decoder, query)), marker)
        beam_search(step, self.decoder.m, BEAMS, view.tree, visit)
        return [ngrams_of(view, own) for own in found]


class MarkedStart:
    """A step function whose first code is given."""

    def __init__(self, step: UntilTheEnd, marker: int) -> None:
        self.step = step
        self.marker = marker

    def __call__(self, moves: tuple[Tensor, Tensor] | None) -> Tensor:
        log_probs = self.step(moves)
        if moves is None:
            log_probs = torch.full_like(log_probs, -torch.inf)
            log_probs[..., self.marker] = 0
        return log_probs


def ngrams_of(view: View, hypotheses: Sequence[tuple[float, int, int]]) -> Ngrams:
    """Hypotheses (score, depth, prefix) as n-grams with weights, heaviest first; those of no weight are dropped."""
    best = {(depth, prefix): score for score, depth, prefix in sorted(hypotheses)}  # a prefix once, with its best score
    spans = [(view.starts[depth][prefix], view.starts[depth][prefix + 1]) for depth, prefix in best]
    counts = np.array([end - start for start, end in spans], dtype=np.float64)
    weights = weight_of(np.array(list(best.values())), counts, len(view.windows))
    order = [i for i in np.argsort(-weights, kind="stable").tolist() if weights[i] > 0]
    pieces = np.zeros((len(order), view.windows.shape[1] - 1), dtype=np.int64)
    keys = list(best)
    for row, i in enumerate(order):
        depth = keys[i][0]
        pieces[row, :depth] = view.windows[spans[i][0], 1 : depth + 1]
    return Ngrams(weights[order], pieces, [np.unique(view.documents[slice(*spans[i])]) for i in order])


def build_ngrams(workplace: Workplace, name: str, kinds: Sequence[str]) -> Built:
    """`kinds` are the views: body, title, pseudo."""
    documents = workplace.texts.documents
    rows = np.arange(len(documents))
    pseudo = workplace.pseudo_queries if "pseudo" in kinds else []
    texts = {
        "body": ([document.content for document in documents], rows),
        "title": ([document.title or document.text[:80] for document in documents], rows),
        "pseudo": ([text for own in pseudo for text in own], np.repeat(rows, [len(own) for own in pseudo] or 0)),
    }
    tokens = {kind: workplace.tokenise(texts[kind][0]) for kind in kinds}
    used = np.unique(np.concatenate([own.ids for own in tokens.values()]))
    number = np.zeros(workplace.encoder.encoder.shape.vocabulary, dtype=np.int64)
    number[used] = np.arange(1, len(used) + 1)
    V = 1 + len(used) + len(kinds)
    markers = [1 + len(used) + i for i in range(len(kinds))]
    views = [
        View.of(tokens[kind], texts[kind][1], marker, number, V, workplace.tokenise.starts)
        for kind, marker in zip(kinds, markers, strict=True)
    ]
    torch.manual_seed(workplace.seed)
    decoder = Decoder(workplace.encoder.encoder.shape.width, Shape(LENGTH + 1, V, shared_tokens=True)).to(
        workplace.device
    )
    targets = training_ngrams(workplace, views, number, workplace.seed)
    minutes = workplace.train(name, NgramObjective(decoder, workplace, targets))
    each = sum(view.windows.shape[0] * (8 + 4) for view in views) / len(documents)  # a place in the text, a document
    return Built(NgramRetriever(workplace, decoder, views, markers), trained_parameters(decoder), minutes, each)
