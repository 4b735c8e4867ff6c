"""Generative retrieval by n-grams (SEAL, MINDER): the decoder writes parts of documents, and these vote for documents.

The beam writes only what stands somewhere in the corpus (see windows.py), and all partial hypotheses count.
Letters: L window length, G n-grams.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asi.beam import Step, beam_search
from asi.model import Decoder
from asi.records import Hit
from asi.systems.decoders import Shape, TextDecoder
from asi.systems.identifiers import END
from asi.systems.sequences import SequenceObjective, batch_of, generation
from asi.systems.windows import LENGTH, TextView
from asi.systems.words import WordCodes
from asi.systems.workplace import Built, Workplace, parameters_of

Rows = NDArray[np.integer[Any]]

SOURCES = ("queries", "spans")  # what the decoder learns to read
NGRAMS_PER_TEXT = 4  # that are trained on, for each view: those that share most with the text, of DRAWN at random
DRAWN = 10
BEAMS = 15
ALPHA = 2.0  # SEAL's exponent of an n-gram's weight
BETA = 0.8  # SEAL's discount for pieces that a heavier n-gram covers already
SMOOTHING = 5  # added to counts
LIGHTEST = 1e-9


def training_ngrams(
    texts: Sequence[Rows], pairs: Rows, views: Sequence[TextView], seed: int
) -> tuple[Rows, NDArray[np.int64]]:
    """For every pair and view some windows of the document that share most with the text: the text's row, the window.

    `texts` are the codes of each text.
    """
    draw = np.random.default_rng(seed)
    rows, windows = [], []
    for view in views:
        by_document = np.argsort(view.documents, kind="stable")
        sorted_documents = view.documents[by_document]
        begins, ends = (np.searchsorted(sorted_documents, pairs[:, 1], side) for side in ("left", "right"))
        for text, begin, end in zip(pairs[:, 0].tolist(), begins.tolist(), ends.tolist(), strict=True):
            if begin == end:
                continue  # no text of this view
            drawn = view.windows[by_document[begin + draw.choice(end - begin, min(DRAWN, end - begin), replace=False)]]
            shared = (np.isin(drawn[:, 1:], texts[text]) & (drawn[:, 1:] != END)).sum(axis=1)
            windows.append(drawn[np.argsort(-shared, kind="stable")[:NGRAMS_PER_TEXT]])
            rows.append(np.full(len(windows[-1]), text))
    return np.concatenate(rows), np.concatenate(windows).astype(np.int64)


def ngram_objective(
    workplace: Workplace, decoder: Decoder, views: Sequence[TextView], words: WordCodes
) -> SequenceObjective:
    """Queries and parts of documents to n-grams of their documents; the marker before an n-gram is given."""
    reading = workplace.reading(SOURCES)
    tokens = reading.features.tokens
    codes = np.split(words.of_piece[tokens.ids], tokens.offsets[1:-1])
    rows, windows = training_ngrams(codes, reading.all_pairs, views, workplace.terms.seed)
    batch = batch_of(windows, decoder.V, ends=True)
    drawn = workplace.pairs(np.stack([rows, np.arange(len(rows))], axis=1), batch)
    return SequenceObjective(
        decoder, workplace.encoder, reading.features, torch.from_numpy(windows), [(1.0, drawn)],
        ends=True, words=words, given=1,
    )  # fmt: skip


class Ngrams(NamedTuple):
    """The n-grams that were written for a query, heaviest first."""

    weights: NDArray[np.float64]  # (G,)
    pieces: Rows  # (G, L), END where it is shorter
    documents: list[Rows]  # for each n-gram, those that it counts for


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

    def __init__(self, workplace: Workplace, decoder: Decoder, views: Sequence[TextView], words: WordCodes) -> None:
        self.workplace = workplace
        self.decoder = decoder.eval()
        self.views = views
        self.words = words

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        written = [self.written(queries, view) for view in self.views]
        return [self.ranked([by_query[i] for by_query in written], k) for i in range(len(queries))]

    def ranked(self, views: Sequence[Ngrams], k: int) -> list[Hit]:
        total = np.zeros(len(self.workplace.keys))
        for ngrams in views:
            documents, scores = document_scores(ngrams)
            total[documents] += scores
        found = np.flatnonzero(total)
        best = found[np.argsort(-total[found], kind="stable")[:k]].tolist()
        return [Hit(self.workplace.keys[document], float(total[document])) for document in best]

    @torch.inference_mode()
    def written(self, queries: Sequence[str], view: TextView) -> list[Ngrams]:
        """The n-grams that the beam has written for each query, the unfinished ones too."""
        found: list[list[tuple[float, int, int]]] = [[] for _ in queries]  # score, depth, prefix

        def visit(depth: int, scores: Tensor, prefixes: Tensor, codes: Tensor) -> None:
            if depth == 0:
                return  # only the marker
            written = scores.isfinite().tolist()
            for own, is_written, values, rows in zip(found, written, scores.tolist(), prefixes.tolist(), strict=True):
                own += [(values[j], depth, rows[j]) for j in range(len(rows)) if is_written[j]]

        step = MarkedStart(generation(self.workplace, self.decoder, queries, self.words), view.marker)
        beam_search(step, self.decoder.m, BEAMS, view.tree, visit, end=END)
        return [ngrams_of(view, own) for own in found]


def ngrams_of(view: TextView, hypotheses: Sequence[tuple[float, int, int]]) -> Ngrams:
    """Hypotheses (score, depth, prefix) as n-grams with weights, heaviest first; those of no weight are dropped.

    As in SEAL's scoring, an n-gram counts for a document only where no heavier one stands already.
    """
    best = {(depth, prefix): score for score, depth, prefix in sorted(hypotheses)}  # a prefix once, with its best score
    spans = [(view.starts[depth][prefix], view.starts[depth][prefix + 1]) for depth, prefix in best]
    counts = np.array([end - start for start, end in spans], dtype=np.float64)
    weights = weight_of(np.array(list(best.values())), counts, len(view.windows))
    order = [i for i in np.argsort(-weights, kind="stable").tolist() if weights[i] > 0]
    pieces = np.zeros((len(order), view.windows.shape[1] - 1), dtype=np.int64)
    keys = list(best)
    documents, taken = [], np.zeros(len(view.tokens.ids), dtype=bool)
    for row, i in enumerate(order):
        depth, windows = keys[i][0], slice(*spans[i])
        pieces[row, :depth] = view.windows[windows.start, 1 : depth + 1]
        covers = view.places[windows, None] + np.arange(depth)  # (occurrences, depth)
        is_free = ~taken[covers].any(axis=1)
        taken[covers[is_free]] = True
        documents.append(np.unique(view.documents[windows][is_free]))
    return Ngrams(weights[order], pieces, documents)


class MarkedStart:
    """A step function whose first code is given."""

    def __init__(self, step: Step, marker: int) -> None:
        self.step = step
        self.marker = marker

    def __call__(self, moves: tuple[Tensor, Tensor] | None) -> Tensor:
        log_probs = self.step(moves)
        if moves is None:
            log_probs = torch.full_like(log_probs, -torch.inf)
            log_probs[..., self.marker] = 0
        return log_probs


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
    tokens = {kind: workplace.tokenise_whole(texts[kind][0]) for kind in kinds}
    words = WordCodes.of_texts(list(tokens.values()), workplace.tokenise, len(kinds))
    views = [
        TextView.of(tokens[kind], texts[kind][1], len(words) - len(kinds) + i, words, workplace.tokenise.starts)
        for i, kind in enumerate(kinds)
    ]
    shape = Shape(LENGTH + 1, len(words), shared_tokens=True, head_prior=True)
    width = workplace.encoder.encoder.shape.width
    decoder = workplace.new_model(lambda: TextDecoder(width, shape))
    words.start(decoder, workplace.encoder.encoder.words.weight)
    training = workplace.train(name, ngram_objective(workplace, decoder, views, words))
    retriever = NgramRetriever(workplace, decoder, views, words)
    return Built(retriever, parameters_of(decoder), training, sum(view.bytes for view in views) / len(documents))
