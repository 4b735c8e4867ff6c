"""Whether measures that were kept are still those of this data."""

import hashlib
from collections.abc import Sequence

from asi.batches import TrainingTexts
from asi.datasets import Dataset


def data_fingerprint(texts: TrainingTexts, dataset: Dataset, splits: Sequence[str]) -> str:
    """Changes with the data set's documents and training pairs (`texts`), and the queries and judgements of splits."""
    digest = hashlib.sha256(texts.fingerprint().encode())
    for split in splits:
        queries, qrels = dataset.judged(split)
        digest.update(repr((split, list(queries), list(qrels))).encode())
    return digest.hexdigest()[:32]
