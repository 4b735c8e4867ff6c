"""How docids spread over a corpus, and what the documents that share them have in common.

Letters: N documents, U docids in use, m docid length.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy.stats
from numpy.typing import NDArray

from asi.evaluation import DocidMap
from asi.judges import Judge
from asi.metrics import Buckets
from asi.records import Docid, Document
from asi.texts import words

SIMILAR_PAIRS = 1000
FEWEST_PAIRS = 10  # for a test
NEIGHBOURS_TRIED = 500  # docids that are compared with all others
BUCKET_SIZES = (1, 2, 3, 5, 10, 20, 50, 100)


def bucket_of(buckets: Buckets, row: int) -> NDArray[np.int64]:
    """The documents with the docid of that row."""
    return np.flatnonzero(buckets.of_document == row)


def density(buckets: Buckets) -> list[tuple[str, int, float, float]]:
    """Buckets by size: range of sizes, how many docids, their share of docids, their share of documents."""
    total, rows = int(buckets.sizes.sum()), []
    edges = [*BUCKET_SIZES, np.inf]
    for low, high in pairwise(edges):
        inside = buckets.sizes[(buckets.sizes >= low) & (buckets.sizes < high)]
        if len(inside):
            last = int(min(high - 1, buckets.sizes.max()))
            name = str(int(low)) if last == low else f"{int(low)} to {last}"
            rows.append((name, len(inside), len(inside) / len(buckets.sizes), float(inside.sum() / total)))
    return rows


class Similarity(NamedTuple):
    """Cosine similarity of pairs of documents: with the same docid, and drawn at random."""

    judge: str
    pairs: int  # with the same docid
    equal: int  # of these, with the same text
    same: tuple[float, float]  # mean and standard deviation
    random: tuple[float, float]
    p_value: float  # of a t-test for a larger mean of the pairs with the same docid, unequal variances


def similarity(judge: Judge, docid_map: DocidMap, seed: int = 0) -> Similarity | None:
    """None if hardly any documents share a docid."""
    draw = np.random.default_rng(seed)
    same = pairs_with_one_docid(docid_map.buckets, draw)
    if len(same) < FEWEST_PAIRS:
        return None
    random = distinct_pairs(len(docid_map.documents), len(same), draw)
    texts = [document.content for document in docid_map.documents]
    scores = judge.scores(texts, texts, np.concatenate([same, random])).astype(np.float64)  # or small p-values are 0
    mine, other = scores[: len(same)], scores[len(same) :]
    with np.errstate(invalid="ignore", divide="ignore"):  # where all pairs are alike there is no p-value
        test = scipy.stats.ttest_ind(mine, other, equal_var=False, alternative="greater")
    equal = sum(texts[first] == texts[second] for first, second in same.tolist())
    values = mean_and_deviation(mine), mean_and_deviation(other)
    return Similarity(judge.name, len(same), equal, *values, float(test.pvalue))


def mean_and_deviation(values: NDArray[np.float64]) -> tuple[float, float]:
    return float(values.mean()), float(values.std())


def pairs_with_one_docid(buckets: Buckets, draw: np.random.Generator) -> NDArray[np.int64]:
    """Different pairs of documents of one bucket, the bucket drawn in proportion to its documents: (n, 2)."""
    order, offsets = buckets.documents
    shared = np.flatnonzero(buckets.sizes[buckets.of_document] > 1)
    if not len(shared):
        return np.empty((0, 2), dtype=np.int64)
    first = draw.choice(shared, SIMILAR_PAIRS)
    rows = buckets.of_document[first]
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    start, size = offsets[rows], buckets.sizes[rows]
    step = draw.integers(1, size)  # to another document of the bucket
    pairs = np.stack([first, order[start + (place[first] - start + step) % size]], axis=1)
    return once(pairs)


def distinct_pairs(count: int, pairs: int, draw: np.random.Generator) -> NDArray[np.int64]:
    first = draw.integers(0, count, pairs)
    return once(np.stack([first, (first + draw.integers(1, count, pairs)) % count], axis=1))


def once(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """A pair that is drawn twice is no more evidence."""
    return np.unique(np.sort(pairs, axis=1), axis=0)


class Case(NamedTuple):
    """A docid with its documents, and the words that set them apart."""

    docid: Docid
    size: int
    documents: list[Document]
    common: list[str]


class CommonWords:
    """Which words a group of documents has in common that the corpus has not."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.bags = [set(words(document.content)) for document in documents]
        self.frequency = Counter(word for bag in self.bags for word in bag)

    def of(self, rows: NDArray[np.int64], least: float = 1 / 3, most: int = 5) -> list[str]:
        """Words that at least two and `least` of the documents have, and twice as often as others; surprising first."""
        inside = Counter(word for row in rows for word in self.bags[row])
        lifts = {
            word: count * len(self.bags) / (len(rows) * self.frequency[word])
            for word, count in inside.items()
            if count >= max(2, least * len(rows)) and len(word) > 2
        }
        chosen = [word for word, lift in lifts.items() if lift >= 2]
        return sorted(chosen, key=lambda word: (-inside[word] * np.log(lifts[word]), word))[:most]

    def share(self, word: str, rows: NDArray[np.int64]) -> float:
        """Of these documents, those that have the word."""
        return sum(word in self.bags[row] for row in rows) / len(rows)


def bucket_cases(docid_map: DocidMap, common: CommonWords, count: int = 6, seed: int = 0) -> list[Case]:
    """Buckets of an ordinary size (3 to 12 documents), drawn at random; the largest ones if there are none."""
    sizes = docid_map.buckets.sizes
    ordinary = np.flatnonzero((sizes >= 3) & (sizes <= 12))
    if len(ordinary):
        chosen = np.random.default_rng(seed).permutation(ordinary)[:count]
    else:
        chosen = np.argsort(-sizes, kind="stable")[:count]
    return [case_of(docid_map, common, int(row)) for row in chosen]


def case_of(docid_map: DocidMap, common: CommonWords, row: int, most: int = 4) -> Case:
    rows = bucket_of(docid_map.buckets, row)
    documents = [docid_map.documents[i] for i in rows[:most]]
    return Case(tuple(docid_map.buckets.docids[row].tolist()), len(rows), documents, common.of(rows))


def neighbour_cases(docid_map: DocidMap, common: CommonWords, count: int = 3, seed: int = 0) -> list[list[Case]]:
    """Groups of docids that differ in one position only, around buckets that have words in common, if any have."""
    if docid_map.buckets.docids.shape[1] == 1:  # every other docid would be a neighbour
        return []
    groups = neighbour_groups(docid_map, common, count, seed, themed=True)
    return groups or neighbour_groups(docid_map, common, count, seed, themed=False)


def neighbour_groups(
    docid_map: DocidMap, common: CommonWords, count: int, seed: int, *, themed: bool
) -> list[list[Case]]:
    buckets = docid_map.buckets
    groups: list[list[Case]] = []
    used: set[int] = set()
    shared = np.flatnonzero(buckets.sizes > 1)
    tried = np.random.default_rng(seed).permutation(shared if len(shared) else len(buckets.sizes))[:NEIGHBOURS_TRIED]
    for row in tried.tolist():
        near = np.flatnonzero((buckets.docids == buckets.docids[row]).sum(1) == buckets.docids.shape[1] - 1)
        near = near[np.argsort(-buckets.sizes[near], kind="stable")][:3]
        if len(near) < 2 or used & {row, *near.tolist()} or (themed and not common.of(bucket_of(buckets, row))):
            continue
        used |= {row, *near.tolist()}
        groups.append([case_of(docid_map, common, i, most=2) for i in (row, *near.tolist())])
        if len(groups) == count:
            break
    return groups


class FirstCode(NamedTuple):
    """The docids that start with one code."""

    code: int
    docids: int
    documents: int
    common: list[str]  # words, each with the share of the documents that have it
    examples: list[str]


def first_codes(docid_map: DocidMap, common: CommonWords, count: int = 12) -> list[FirstCode]:
    """What the documents whose docids start with one code have in common, for the codes with the most documents."""
    starts = docid_map.docids[:, 0]
    codes, sizes = np.unique(starts, return_counts=True)
    found = []
    for code in codes[np.argsort(-sizes, kind="stable")][:count].tolist():
        rows = np.flatnonzero(starts == code)
        examples = [
            docid_map.documents[row].title or docid_map.documents[row].text[:60]
            for row in rows[:: len(rows) // 4 or 1][:4]
        ]
        docids = int(np.sum(docid_map.buckets.docids[:, 0] == code))
        shared = [f"{word} {common.share(word, rows):.0%}" for word in common.of(rows, least=0, most=6)]
        found.append(FirstCode(int(code), docids, len(rows), shared, examples))
    return found
