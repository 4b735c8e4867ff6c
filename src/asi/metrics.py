"""How good a ranking is and how healthy the docids are: pure functions over records and arrays.

Recall is three numbers, never mixed:
    docid        the paper's: a retrieved docid is a hit if any relevant document has it
    expectation  a retrieved docid stands for one document, drawn at random from its bucket in the whole corpus
    document     of the ranked documents, what a user sees
Per query first, mean second; a query with nothing retrieved counts as zero, here and nowhere else.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import sqrt
from operator import attrgetter
from typing import Any, NamedTuple, Self

import ir_measures
import numpy as np
from ir_measures import RR, R, nDCG
from numpy.typing import NDArray

from asi.arrays import Groups, expand_ranges
from asi.errors import DataError
from asi.records import Docid, Hit, Qrel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOP = 10  # docids that count for a query
INVALID, NOTHING = -1, -2  # in place of a bucket: the docid is no document's; fewer than TOP docids were retrieved


class Buckets(NamedTuple):
    """The docids of a corpus, and which documents share them."""

    docids: NDArray[Any]  # (U, m) each docid in use once, ascending
    sizes: Ints  # (U,) documents in each one's bucket
    of_document: Ints  # (N,) row of each document's docid

    @classmethod
    def of(cls, docids: NDArray[Any]) -> Self:
        """Group the documents' docids (N, m)."""
        _, first, rows, sizes = np.unique(packed(docids), return_index=True, return_inverse=True, return_counts=True)
        return cls(docids[first], sizes, rows)

    @property
    def documents(self) -> Groups:
        """The documents of each bucket."""
        return Groups.of(self.of_document, len(self.sizes))

    def find(self, docids: NDArray[Any]) -> Ints:
        """The row of each docid of (n, m), or INVALID where no document has it: (n,)."""
        if not len(self.docids):
            return np.full(len(docids), INVALID)
        table, wanted = packed(self.docids), packed(docids)
        rows = np.searchsorted(table, wanted).clip(max=len(table) - 1)
        return np.where(table[rows] == wanted, rows, INVALID)


def packed(docids: NDArray[Any]) -> NDArray[np.bytes_]:
    """Docids (n, m) as byte strings (n,) with the same order: big-endian, so that bytes compare as the codes do."""
    assert docids.size == 0 or (docids.min() >= 0 and docids.max() < 2**16), "codes are 16-bit"
    return np.ascontiguousarray(docids, dtype=">u2").view(f"S{2 * docids.shape[1]}")[:, 0]


def recall(chance: Floats, k: int) -> Floats:
    """The chance (Q,) of at least one hit among the first k docids, from each docid's own chance of a hit (Q, TOP)."""
    missed: Floats = np.prod(1 - chance[:, :k], axis=1)
    return 1 - missed


def reciprocal_rank(chance: Floats) -> Floats:
    """The expected 1 / rank of the first hit (Q,), from each docid's own chance of a hit (Q, TOP)."""
    missed_before = np.cumprod(np.insert(1 - chance, 0, 1, axis=1), axis=1)[:, :-1]
    ranks = np.arange(1, chance.shape[1] + 1)
    expected: Floats = np.sum(chance * missed_before / ranks, axis=1)
    return expected


DOCID_METRICS: dict[str, Callable[[Floats], Floats]] = {
    "R@1": partial(recall, k=1),
    "R@5": partial(recall, k=5),
    "R@10": partial(recall, k=10),
    "MRR@10": reciprocal_rank,
}


class DocidScores(NamedTuple):
    docid: dict[str, float]
    expectation: dict[str, float]
    d_per_q: float
    invalid: dict[str, float]


def docid_scores(
    buckets: Buckets, retrieved: Sequence[Sequence[Docid]], relevant: Sequence[Collection[int]]
) -> DocidScores:
    """Score the distinct docids retrieved for each query, best first; only the first TOP count.

    `relevant` holds each query's relevant documents, as rows of the array that the buckets were made of; a query whose
    relevant documents are not in the corpus has none, and counts as zero.
    """
    assert len(retrieved) == len(relevant) > 0
    opened = opened_buckets(buckets, retrieved)  # (Q, TOP)
    found = relevant_found(buckets, opened, relevant)  # (Q, TOP)
    sizes = np.append(buckets.sizes, [0, 0])[opened]  # (Q, TOP); INVALID and NOTHING index the zeros at the end
    chances = {"docid": np.minimum(found, 1.0), "expectation": found / np.maximum(sizes, 1)}
    means = {
        level: {name: float(metric(chance).mean()) for name, metric in DOCID_METRICS.items()}
        for level, chance in chances.items()
    }
    invalid = {"all": invalid_share(opened), "first": invalid_share(opened[:, :1])}
    return DocidScores(**means, d_per_q=float(sizes.sum(axis=1).mean()), invalid=invalid)


def opened_buckets(buckets: Buckets, retrieved: Sequence[Sequence[Docid]]) -> Ints:
    """The bucket that each of a query's first TOP docids opens: (Q, TOP), filled up with NOTHING."""
    docids = [docid for ranked in retrieved for docid in ranked[:TOP]]
    opened = np.full((len(retrieved), TOP), NOTHING)
    is_retrieved = np.arange(TOP) < np.array([len(ranked) for ranked in retrieved])[:, None]
    opened[is_retrieved] = buckets.find(np.array(docids, dtype=np.int64).reshape(len(docids), buckets.docids.shape[1]))
    return opened


def relevant_found(buckets: Buckets, opened: Ints, relevant: Sequence[Collection[int]]) -> Ints:
    """How many of its query's relevant documents each opened bucket holds: (Q, TOP)."""
    pairs = [(query, document) for query, documents in enumerate(relevant) for document in set(documents)]
    queries, documents = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    found = np.zeros(opened.shape, dtype=np.int64)
    np.add.at(found, queries, opened[queries] == buckets.of_document[documents][:, None])
    return found


def opened_documents(buckets: Buckets, opened: Ints) -> Ints:
    """All (query, document) rows (n, 2) that the opened buckets (Q, TOP) hold, query by query."""
    by_bucket = buckets.documents
    starts = np.append(by_bucket.offsets[:-1], [0, 0])  # INVALID and NOTHING index the empty ranges at the end
    ends = np.append(by_bucket.offsets[1:], [0, 0])
    items, owners = expand_ranges(starts[opened.ravel()], ends[opened.ravel()])
    return np.stack([owners // opened.shape[1], by_bucket.rows[items]], axis=1)


def invalid_share(opened: Ints) -> float:
    """The share of the retrieved docids that no document has."""
    return float(np.sum(opened == INVALID) / max(np.sum(opened != NOTHING), 1))


DOCUMENT_METRICS = {
    "R@1": R @ 1,
    "R@5": R @ 5,
    "R@10": R @ 10,
    "R@100": R @ 100,
    "MRR@10": RR @ 10,
    "nDCG@10": nDCG @ 10,
}


def relevant_keys(qrels: Iterable[Qrel]) -> dict[str, list[str]]:
    """The relevant documents of each query that has any: the queries that every metric here is a mean over."""
    return {query: [key for key in grades if grades[key] > 0] for query, grades in judged_grades(qrels).items()}


def judged_grades(qrels: Iterable[Qrel]) -> dict[str, dict[str, int]]:
    """Query -> key -> grade, without the queries that have no relevant document: no system can be right about them."""
    grades: dict[str, dict[str, int]] = {}
    for query, key, grade in qrels:
        grades.setdefault(query, {})[key] = grade
    judged = {query: keys for query, keys in grades.items() if max(keys.values()) > 0}
    if not judged:
        raise DataError("no query has a relevant document; a judgement needs a grade of at least 1")
    return judged


def document_level(run: Mapping[str, Sequence[Hit]], qrels: Iterable[Qrel], k: int = TOP) -> dict[str, float]:
    """trec_eval's measures of a run with up to k hits for each query; those with a cutoff beyond k are left out.

    With several relevant documents R is their share that was found, so R@1 may be below 1 for a perfect ranking.
    """
    grades = judged_grades(qrels)
    ranked = {query: falling_scores(query, hits) for query, hits in run.items() if query in grades}
    measures = {name: measure for name, measure in DOCUMENT_METRICS.items() if measure["cutoff"] <= k}
    means = ir_measures.calc_aggregate(list(measures.values()), grades, ranked)
    return {name: float(means[measure]) for name, measure in measures.items()}


def reciprocal_ranks(run: Mapping[str, Sequence[Hit]], qrels: Iterable[Qrel]) -> dict[str, float]:
    """1 / rank of each judged query's first relevant hit among TOP, 0 without one: what MRR@10 is the mean of."""
    ranks = {}
    for query, keys in relevant_keys(qrels).items():
        places = [rank for rank, hit in enumerate(run.get(query, [])[:TOP], start=1) if hit.key in keys]
        ranks[query] = 1 / places[0] if places else 0.0
    return ranks


def falling_scores(query: str, hits: Sequence[Hit]) -> dict[str, float]:
    """The hits in a form that keeps their order: key -> score, by rank."""
    # trec_eval sorts by score in 32 bits and then by key, so with our own scores it would reorder ties.
    scores = {hit.key: -float(rank) for rank, hit in enumerate(hits)}
    if len(scores) < len(hits):
        raise DataError(f"the hits of query {query!r} have a document twice; leave only its first place in the run")
    return scores


def accuracy(query_docids: NDArray[Any], document_docids: NDArray[Any]) -> float:
    """Acc: the share of (query, document) pairs that get the same docid from the heads; both (n, m)."""
    assert query_docids.shape == document_docids.shape
    return float(np.mean(np.all(query_docids == document_docids, axis=1)))


class DocidHealth(NamedTuple):
    """How the docids spread over the corpus."""

    documents: int
    docids: int  # in use
    d_per_id: float  # documents per docid in use
    largest_bucket: int  # documents with the most common docid
    perplexity: list[float]  # per position, from 1 (all documents have the same code) to V (all codes equally often)
    docid_perplexity: float  # likewise of whole docids: how many matter, where `docids` counts the rarest too

    @property
    def largest_share(self) -> float:
        return self.largest_bucket / max(self.documents, 1)


def docid_health(docids: NDArray[Any]) -> DocidHealth:
    """The health of a corpus's docids (N, m)."""
    buckets = Buckets.of(docids)
    return DocidHealth(
        documents=len(docids),
        docids=len(buckets.sizes),
        d_per_id=len(docids) / max(len(buckets.sizes), 1),
        largest_bucket=int(buckets.sizes.max(initial=0)),
        perplexity=[perplexity(codes) for codes in docids.T],
        docid_perplexity=perplexity(buckets.of_document),
    )


def perplexity(codes: NDArray[Any]) -> float:
    """exp of the entropy of their usage: so many codes, used equally often, would be as varied."""
    share = np.unique(codes, return_counts=True)[1] / max(len(codes), 1)
    return float(np.exp(-np.sum(share * np.log(share))))


def collapse_warning(health: DocidHealth, V: int) -> str | None:
    """A line for the user if the docids have collapsed, which docid-level recall hides: it rises to 1 then.

    Two signs, each of which holds at any size of corpus. The docids that matter are fewer than the documents behind one
    of them, that is, than the root of the corpus: then finding a document inside its bucket is the larger part of the
    search (but a docid space that is itself so small has not collapsed). Or one bucket holds a fifth of the corpus.
    """
    expected = min(sqrt(health.documents), V ** len(health.perplexity) / 4)
    is_coarse = health.docid_perplexity < expected
    is_lopsided = health.largest_share > 0.2 and health.largest_bucket > 10  # a few twins in a tiny corpus are no sign
    if not (is_coarse or is_lopsided):
        return None
    perplexities = " ".join(f"{value:.1f}" for value in health.perplexity)
    return (
        f"docids have collapsed: {health.docids:,} in use for {health.documents:,} documents, the largest bucket holds "
        f"{health.largest_share:.0%} of them, perplexity per position {perplexities} (of {V}); raise loss.contrastive "
        "or loss.balance, let train.straight_through_start come later, or use a larger train.batch"
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """All numbers of one system on one split, in the order of the JSON; None is left out there."""

    docid: dict[str, float] | None = None  # names as in DOCID_METRICS
    expectation: dict[str, float] | None = None  # likewise
    document: dict[str, float] | None = None  # names as in DOCUMENT_METRICS
    acc: float | None = None
    heads: float | None = None  # docid-level R@1 of the heads' own docids; Acc, if each query has one relevant document
    d_per_id: float | None = None
    d_per_q: float | None = None  # documents that a query's docids open
    ranked: dict[str, float] | None = None  # documents that were ranked for a query: `mean` and `most`
    invalid: dict[str, float] | None = None  # share of docids that no document has: of `all` retrieved, of the `first`
    quality: dict[str, Any] | None = None  # of the documents that the docids open, entries as in judges.Quality
    docids: int | None = None
    largest_bucket: int | None = None
    perplexity: list[float] | None = None
    collapsed: str | None = None  # the warning, if the docids have
    queries: int
    ms_per_query: float | None = None

    def with_docids(self, scores: DocidScores, health: DocidHealth, acc: float | None = None) -> "Report":
        """The same report with what a system with docids adds."""
        return replace(
            self,
            **scores._asdict(),
            acc=acc,
            d_per_id=health.d_per_id,
            docids=health.docids,
            largest_bucket=health.largest_bucket,
            perplexity=health.perplexity,
        )

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Report":
        known = [field.name for field in fields(cls)]
        if unknown := sorted(values.keys() - set(known)):
            raise DataError(f"a report has no entry {', '.join(unknown)}; its entries are {', '.join(known)}")
        if "queries" not in values:
            raise DataError("a report needs the entry queries; write the report again")
        return cls(**values)


Reports = dict[str, dict[str, Report]]  # system -> split -> report: a whole report file


def as_json(reports: Reports) -> dict[str, dict[str, dict[str, Any]]]:
    """The layout of a report file."""
    return {system: {split: report.to_dict() for split, report in by.items()} for system, by in reports.items()}


def from_json(values: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Reports:
    """The reports of a report file."""
    return {system: {split: Report.from_dict(own) for split, own in by.items()} for system, by in values.items()}


def entry(block: str, name: str) -> Callable[[Report], float | None]:
    return lambda report: (getattr(report, block) or {}).get(name)


COLUMNS: dict[str, tuple[Callable[[Report], float | None], str]] = {  # title: value, format
    "docid R@1": (entry("docid", "R@1"), ".3f"),
    "docid R@10": (entry("docid", "R@10"), ".3f"),
    "docid MRR@10": (entry("docid", "MRR@10"), ".3f"),
    "expected R@10": (entry("expectation", "R@10"), ".3f"),
    "R@1": (entry("document", "R@1"), ".3f"),
    "R@10": (entry("document", "R@10"), ".3f"),
    "R@100": (entry("document", "R@100"), ".3f"),
    "MRR@10": (entry("document", "MRR@10"), ".3f"),
    "nDCG@10": (entry("document", "nDCG@10"), ".3f"),
    "Acc": (attrgetter("acc"), ".3f"),
    "D/ID": (attrgetter("d_per_id"), ".2f"),
    "D/Q": (attrgetter("d_per_q"), ".1f"),
    "ranked": (entry("ranked", "mean"), ".0f"),
    "invalid": (entry("invalid", "all"), ".3f"),
    "ms": (attrgetter("ms_per_query"), ".2f"),
}


def report_rows(reports: Reports) -> list[list[str]]:
    """The reports as rows of cells, titles first; a number that a system does not have is `-`, and a measure that none
    has is left out."""
    every = [report for splits in reports.values() for report in splits.values()]
    columns = {
        title: (value, form)
        for title, (value, form) in COLUMNS.items()
        if any(value(report) is not None for report in every)
    }
    rows = [["system", "split", *columns]]
    for system, splits in reports.items():
        for split, report in splits.items():
            cells = [(value(report), form) for value, form in columns.values()]
            rows.append([system, split, *("-" if number is None else f"{number:{form}}" for number, form in cells)])
    return rows
