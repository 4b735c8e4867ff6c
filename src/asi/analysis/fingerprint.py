"""Whether measures that were kept are still those of this data."""

import hashlib
from collections.abc import Sequence

from asi.batches import training_texts
from asi.datasets import Dataset


def data_fingerprint(dataset: Dataset, splits: Sequence[str]) -> str:
    """Changes with the documents, the training pairs, and the queries and judgements of the splits."""
    digest = hashlib.sha256(training_texts(dataset).fingerprint().encode())
    for split in splits:
        queries, qrels = dataset.judged(split)
        digest.update(repr((split, list(queries), list(qrels))).encode())
    return digest.hexdigest()[:32]
