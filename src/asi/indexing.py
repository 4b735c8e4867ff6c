"""Documents to docids to store: the same path for old and new documents."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from asi.checkpoint import LoadedModel, RunFolder, folder_beside, put_in_place
from asi.encoder import TokenisedTexts
from asi.features import Features, docids_of, encode
from asi.model import Asi
from asi.records import Document
from asi.store import Store

DOCUMENTS_PER_BATCH = 1024
TOKENS_PER_BATCH = 4096

Added = Callable[[Sequence[Document]], None]  # called when the documents are durable


def assign(model: Asi, features: Features) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """The docids (n, m) and the ranking vectors (n, D), one byte per dimension, of all texts."""
    count = len(features.tokens)
    docids = np.empty((count, model.config.m), dtype=np.uint16)
    vectors = np.empty((count, model.encoder.shape.width), dtype=np.int8)
    for rows in features.tokens.batches(TOKENS_PER_BATCH):
        # A batch of few rows takes another path through the matrix products: fill it up, so that a document gets
        # the same docid whatever it is added with.
        filled = np.resize(rows, max(len(rows), 4))
        with torch.inference_mode():
            x = encode(model, features, filled).x
            codes = docids_of(model, features, filled, x)
        docids[rows] = codes[: len(rows)].cpu().numpy()
        vectors[rows] = quantised(x[: len(rows)].float().cpu().numpy())
    return docids, vectors


def quantised(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    """Each vector scaled so that its largest component is 127: cosine needs no more."""
    largest = np.maximum(np.abs(vectors).max(axis=1, keepdims=True), 1e-9)
    return np.rint(vectors * (127 / largest)).astype(np.int8)


def assign_texts(model: Asi, tokens: TokenisedTexts) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
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
        store.add(batch, docids, vectors)
        count += len(batch)
        if added is not None:
            added(batch)
    return count


def build_store(
    folder: RunFolder,
    loaded: LoadedModel,
    documents: Iterable[Document],
    features: Features | None = None,
    added: Added | None = None,
) -> int:
    """Build the store of a run anew, beside the old one, and put it in its place when it is complete.

    `features` are those of the same documents, if training has computed them already.
    """
    beside = folder_beside(folder.store)
    shape = {"m": loaded.model.config.m, "V": loaded.model.config.V, "width": loaded.model.encoder.shape.width}
    with Store.create(beside, **shape, fingerprint=loaded.fingerprint) as store, store.bulk():
        if features is None:
            count = add_documents(loaded, store, documents, added)
        else:
            count = 0
            docids, vectors = assign(loaded.model, features)
            for batch in batched(documents, DOCUMENTS_PER_BATCH):
                store.add(batch, docids[count : count + len(batch)], vectors[count : count + len(batch)])
                count += len(batch)
                if added is not None:
                    added(batch)
    put_in_place(beside, folder.store)
    return count
