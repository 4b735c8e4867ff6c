"""Queries grouped by how new their document is to the model: known, new in content, or new in meaning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asi.datasets import Dataset
from asi.evaluation import DocidMap
from asi.metrics import Report
from asi.records import Qrel, Query

Measure = Callable[[Sequence[Query], Sequence[Qrel]], Report]  # of one system, on these queries
EXISTING, NEW_CONTENT, NEW_SEMANTIC = "Existing", "NewContent", "NewSemantic"


@dataclass(frozen=True)
class Group:
    """The judgements whose document is in the group, and the measures of their queries."""

    documents: int
    report: Report | None  # None if the group has no query


def evaluate_groups(
    measure: Measure,
    dataset: Dataset,
    splits: Sequence[str],
    docid_map: DocidMap,
) -> dict[str, Group]:
    """All measures of a system, for all queries of the splits and for each group.

    Existing: the document has training queries. NewContent: it has none, but its docid is that of one that has.
    NewSemantic: no document with training queries has its docid.
    """
    queries: list[Query] = []
    qrels: list[Qrel] = []
    seen: set[tuple[str, str, str]] = set()  # a split may be a part of another
    for number, split in enumerate(splits):  # two splits may use one key for two queries
        part_queries, part_qrels = dataset.judged(split)
        texts = {query.key: query.text for query in part_queries}
        new = [qrel for qrel in part_qrels if (qrel.query, texts[qrel.query], qrel.document) not in seen]
        seen |= {(qrel.query, texts[qrel.query], qrel.document) for qrel in new}
        queries += [Query(f"{number} {query.key}", query.text) for query in part_queries]
        qrels += [qrel._replace(query=f"{number} {qrel.query}") for qrel in new]
    kinds = kinds_of_documents(dataset, docid_map)
    groups: Mapping[str, list[Qrel]] = {
        "all": qrels,
        **{
            kind: [qrel for qrel in qrels if kinds.get(qrel.document) == kind]
            for kind in (EXISTING, NEW_CONTENT, NEW_SEMANTIC)
        },
    }
    found = {}
    for name, own in groups.items():
        relevant = [qrel for qrel in own if qrel.grade > 0]
        found[name] = Group(len({qrel.document for qrel in relevant}), measure(queries, own) if relevant else None)
    return found


def kinds_of_documents(dataset: Dataset, docid_map: DocidMap) -> dict[str, str]:
    """The group of every document of the index, by key."""
    trained = docid_map.rows_of(sorted({qrel.document for qrel in dataset.judged("train")[1]}))
    is_trained = np.zeros(len(docid_map.documents), dtype=bool)
    is_trained[trained] = True
    known_docids = np.zeros(len(docid_map.buckets.sizes), dtype=bool)
    known_docids[docid_map.buckets.of_document[trained]] = True
    has_known = known_docids[docid_map.buckets.of_document]
    return {
        key: EXISTING if is_trained[row] else NEW_CONTENT if has_known[row] else NEW_SEMANTIC
        for key, row in docid_map.rows.items()
    }
