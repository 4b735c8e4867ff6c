"""Documents to docids to store: the same path for old and new documents."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asi.checkpoint import LoadedModel, RunFolder
from asi.encoder import TokenisedTexts
from asi.features import TOKENS_PER_BATCH, Features, docids_of, encode
from asi.folders import folder_beside, put_in_place
from asi.matching import document_tokens, to_bytes
from asi.model import Asi
from asi.ranking import (
    KnownQueries,
    RowShape,
    by_text,
    by_text_and_queries,
    chosen_share,
    pack,
)
from asi.records import Document
from asi.store import Store, only_writer

DOCUMENTS_PER_BATCH = 1024

Added = Callable[[Sequence[Document]], None]  # called when the documents are durable


def counted(advance: Callable[[int], None]) -> Added:
    """Tells `advance` how many documents have been added in all."""
    done = 0

    def added(batch: Sequence[Document]) -> None:
        nonlocal done
        done += len(batch)
        advance(done)

    return added


class Assigned(NamedTuple):
    """What the model says about n texts."""

    docids: NDArray[np.uint16]  # (n, m)
    vectors: NDArray[np.float32]  # (n, D)
    tokens: NDArray[np.int8]  # (n, bytes of the token vectors); no bytes if they were not asked for


def row_shape(model: Asi) -> RowShape:
    return RowShape(model.encoder.shape.width, model.matcher.kept * model.matcher.width if model.matcher else 0)


def assign(model: Asi, features: Features, *, tokens: bool = False) -> Assigned:
    """The docids and vectors of all texts, and the vectors of their tokens if wanted."""
    count = len(features.tokens)
    matcher = model.matcher if tokens else None
    if matcher is not None and features.states is None:
        features = Features(features.tokens, None, None)  # pooled vectors alone do not say what the tokens' states are
    matched = np.empty((count, row_shape(model).tokens if matcher is not None else 0), dtype=np.int8)
    docids = np.empty((count, model.config.m), dtype=np.uint16)
    vectors = np.empty((count, model.encoder.shape.width), dtype=np.float32)
    for rows in features.tokens.batches(TOKENS_PER_BATCH):
        # A batch of few rows takes another path through the matrix products: fill it up, so that a document gets
        # the same docid whatever it is added with.
        filled = np.resize(rows, max(len(rows), 4))
        with torch.inference_mode():
            text = encode(model, features, filled, states=False)
            x = text.x
            codes = docids_of(model, features, filled, x)
            if matcher is not None:
                matched[rows] = to_bytes(document_tokens(matcher, model, features, filled, text))[: len(rows)]
        docids[rows] = codes[: len(rows)].cpu().numpy()
        vectors[rows] = x[: len(rows)].float().cpu().numpy()
    return Assigned(docids, vectors, matched)


def assign_texts(model: Asi, tokens: TokenisedTexts) -> Assigned:
    return assign(model, Features(tokens, None, None), tokens=True)


def batched(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    remaining = iter(documents)
    while batch := list(islice(remaining, size)):
        yield batch


def add_documents(
    loaded: LoadedModel,
    store: Store,
    documents: Iterable[Document],
    added: Added | None = None,
    size: int = DOCUMENTS_PER_BATCH,
) -> int:
    """Give the documents docids and store them, batch by batch; each batch is durable when `added` is called."""
    count = 0
    for batch in batched(documents, size):
        found = assign_texts(loaded.model, loaded.tokenise([document.content for document in batch]))
        rows = pack(by_text(found.vectors), found.tokens)
        store.add(batch, found.docids, rows[:, : store.meta.width])
        count += len(batch)
        if added is not None:
            added(batch)
    return count


class CorpusFeatures(NamedTuple):
    """The documents of a corpus and its training queries, with the pairs they are in."""

    documents: Features
    queries: Features
    pairs: NDArray[np.int64]


def build_store(
    folder: RunFolder,
    loaded: LoadedModel,
    documents: Iterable[Document],
    corpus: CorpusFeatures | None = None,
    added: Added | None = None,
    wait: float = 0.0,
) -> int:
    """Build the store of a run anew, beside the old one, and put it in its place when it is complete.

    With `corpus`, which has the same documents in the same order, these are ranked by their training queries too.
    Nobody else can write meanwhile: what was added to the old store would be lost.
    """
    with only_writer(folder.store, wait):
        return replace_store(folder, loaded, documents, corpus, added)


def replace_store(
    folder: RunFolder,
    loaded: LoadedModel,
    documents: Iterable[Document],
    corpus: CorpusFeatures | None = None,
    added: Added | None = None,
) -> int:
    """What `build_store` does, for the only writer."""
    beside = folder_beside(folder.store)
    config = loaded.model.config
    width = row_shape(loaded.model).whole if loaded.config.index.vectors else 0
    with (
        Store.create(beside, m=config.m, V=config.V, width=width, fingerprint=loaded.fingerprint) as store,
        store.bulk(),
    ):
        if corpus is None:
            count = add_documents(loaded, store, documents, added)
        else:
            count = 0
            docids, rows = corpus_rows(loaded, corpus)
            for batch in batched(documents, DOCUMENTS_PER_BATCH):
                store.add(batch, docids[count : count + len(batch)], rows[count : count + len(batch), :width])
                count += len(batch)
                if added is not None:
                    added(batch)
    put_in_place(beside, folder.store)
    return count


def corpus_rows(loaded: LoadedModel, corpus: CorpusFeatures) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """Docids and ranking rows of all documents of a corpus."""
    found = assign(loaded.model, corpus.documents, tokens=True)
    ranked = by_text(found.vectors)
    if loaded.config.index.known_queries and corpus.documents.pooled is not None:
        queries = assign(loaded.model, corpus.queries).vectors
        known = KnownQueries(queries, corpus.pairs, corpus.queries.pooled, corpus.documents.pooled)
        ranked = by_text_and_queries(found.vectors, known, chosen_share(known))
    return found.docids, pack(ranked, found.tokens)
