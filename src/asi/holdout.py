"""Part of a data set's training pairs held out for choices, so that its test splits are looked at only in the end."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from asi.corpora import chance, normalised
from asi.datasets import Dataset
from asi.errors import DataError
from asi.records import Document, Qrel, Query

UNSEEN_SHARE = 0.05  # of the documents with training pairs: none of these is trained on
DEV_SHARE = 0.10  # of the other documents with more than one training query: one of them is held out


class HeldOut:
    """A data set with the splits `train`, `dev` and `dev_unseen` (no training pairs left), all out of its `train`.

    A `dev` of its own is kept. What is held out for a document is the query that shares the smallest part of its words
    with it: the others are often found by any means. With `pairs` only so many are left to train on.
    """

    def __init__(self, dataset: Dataset, pairs: int | None = None) -> None:
        self.dataset = dataset
        self.corpus = list(dataset.documents())
        self.queries, qrels = dataset.judged("train")
        has_dev = "dev" in dataset.splits
        self.qrels = held_out(self.corpus, self.queries, qrels, draw_dev=not has_dev)
        if has_dev:
            queries, self.qrels["dev"] = dataset.judged("dev")
            self.queries = list({query.key: query for query in [*self.queries, *queries]}.values())
        if pairs is not None:
            self.qrels = with_fewer_pairs(self.qrels, pairs)

    @property
    def name(self) -> str:
        return self.dataset.name

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "dev", "dev_unseen")

    def documents(self) -> Iterator[Document]:
        return iter(self.corpus)

    def judged(self, split: str) -> tuple[list[Query], list[Qrel]]:
        if split not in self.splits:
            raise DataError(f"what is held out of {self.name} has no split {split!r}; it has {', '.join(self.splits)}")
        wanted = {qrel.query for qrel in self.qrels[split]}
        return [query for query in self.queries if query.key in wanted], self.qrels[split]


def held_out(
    corpus: list[Document], queries: list[Query], qrels: list[Qrel], *, draw_dev: bool
) -> dict[str, list[Qrel]]:
    """The training judgements cut into three splits; only queries with one relevant document are held out."""
    words = {document.key: set(normalised(document.content).split()) for document in corpus}
    texts = {query.key: normalised(query.text).split() for query in queries}
    answers = Counter(qrel.query for qrel in qrels)
    by_document: dict[str, list[Qrel]] = defaultdict(list)
    for qrel in qrels:
        by_document[qrel.document].append(qrel)

    def shared(qrel: Qrel) -> tuple[float, str]:
        query = texts[qrel.query]
        return sum(word in words[qrel.document] for word in query) / max(1, len(query)), qrel.query

    splits: dict[str, list[Qrel]] = {"train": [], "dev": [], "dev_unseen": []}
    for key, own in by_document.items():
        alone = [qrel for qrel in own if answers[qrel.query] == 1]  # a query with other answers may be trained on
        if alone and chance("held out unseen", key) < UNSEEN_SHARE:
            splits["dev_unseen"].append(min(alone, key=shared))
        elif alone and draw_dev and len(own) > 1 and chance("held out", key) < DEV_SHARE:
            hardest = min(alone, key=shared)
            splits["dev"].append(hardest)
            splits["train"] += [qrel for qrel in own if qrel != hardest]
        else:
            splits["train"] += own
    return splits


def with_fewer_pairs(splits: dict[str, list[Qrel]], pairs: int) -> dict[str, list[Qrel]]:
    """The same, drawn `pairs` of `train` alone; a document that has lost all of its pairs is a new one."""
    kept = sorted(splits["train"], key=lambda qrel: chance("few pairs", qrel.query, qrel.document))[:pairs]
    known = {qrel.document for qrel in kept}
    asked = [*splits["dev"], *splits["dev_unseen"]]
    return {
        "train": kept,
        "dev": [qrel for qrel in asked if qrel.document in known],
        "dev_unseen": [qrel for qrel in asked if qrel.document not in known],
    }
