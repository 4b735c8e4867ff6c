"""Documents to docids to store: the same path for old and new documents."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asi.checkpoint import LoadedModel, RunFolder, folder_beside, put_in_place
from asi.encoder import TokenisedTexts
from asi.features import Features, docids_of, encode
from asi.model import Asi
from asi.ranking import (
    KnownQueries,
    by_text,
    by_text_and_queries,
    chosen_share,
    pack,
    row_width,
)
from asi.records import Document
from asi.store import Store

DOCUMENTS_PER_BATCH = 1024
TOKENS_PER_BATCH = 4096

Added = Callable[[Sequence[Document]], None]  # called when the documents are durable


def assign(model: Asi, features: Features) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """The docids (n, m) and the vectors (n, D) of all texts."""
    count = len(features.tokens)
    docids = np.empty((count, model.config.m), dtype=np.uint16)
    vectors = np.empty((count, model.encoder.shape.width), dtype=np.float32)
    for rows in features.tokens.batches(TOKENS_PER_BATCH):
        # A batch of few rows takes another path through the matrix products: fill it up, so that a document gets
        # the same docid whatever it is added with.
        filled = np.resize(rows, max(len(rows), 4))
        with torch.inference_mode():
            x = encode(model, features, filled).x
            codes = docids_of(model, features, filled, x)
        docids[rows] = codes[: len(rows)].cpu().numpy()
        vectors[rows] = x[: len(rows)].float().cpu().numpy()
    return docids, vectors


def assign_texts(model: Asi, tokens: TokenisedTexts) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    return assign(model, Features(tokens, None, None))


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
        docids, vectors = assign_texts(loaded.model, loaded.tokenise([document.content for document in batch]))
        store.add(batch, docids, pack(by_text(vectors)))
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
) -> int:
    """Build the store of a run anew, beside the old one, and put it in its place when it is complete.

    With `corpus`, which has the same documents in the same order, these are ranked by their training queries too.
    """
    beside = folder_beside(folder.store)
    config = loaded.model.config
    shape = {"m": config.m, "V": config.V, "width": row_width(loaded.model.encoder.shape.width)}
    with Store.create(beside, **shape, fingerprint=loaded.fingerprint) as store, store.bulk():
        if corpus is None:
            count = add_documents(loaded, store, documents, added)
        else:
            count = 0
            docids, rows = corpus_rows(loaded, corpus)
            for batch in batched(documents, DOCUMENTS_PER_BATCH):
                store.add(batch, docids[count : count + len(batch)], rows[count : count + len(batch)])
                count += len(batch)
                if added is not None:
                    added(batch)
    put_in_place(beside, folder.store)
    return count


def corpus_rows(loaded: LoadedModel, corpus: CorpusFeatures) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """Docids and ranking rows of all documents of a corpus."""
    docids, vectors = assign(loaded.model, corpus.documents)
    ranked = by_text(vectors)
    if loaded.config.index.known_queries and corpus.documents.pooled is not None:
        _, queries = assign(loaded.model, corpus.queries)
        known = KnownQueries(queries, corpus.pairs, corpus.queries.pooled, corpus.documents.pooled)
        ranked = by_text_and_queries(vectors, known, chosen_share(known))
    return docids, pack(ranked)
