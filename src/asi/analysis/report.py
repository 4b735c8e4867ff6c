"""Everything the paper looks at, for one run on one data set, as a page."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isnan
from pathlib import Path

from asi.analysis import docids, figures
from asi.analysis.new_documents import Group, Measure, evaluate_groups
from asi.analysis.pages import Cell, Figure, Page, Section, Table
from asi.batches import training_texts
from asi.datasets import Dataset
from asi.errors import ConfigError
from asi.evaluation import DocidMap, evaluate_retriever, evaluate_searchers
from asi.index import Index
from asi.judges import EmbeddingJudge, Judge, TfidfJudge, find_judge
from asi.metrics import Report, Reports, as_json, collapse_warning
from asi.records import Docid, Document, Qrel, Query
from asi.run import RunState
from asi.search import Searcher
from asi.ways import baselines_of, evaluate_ways, possible_ways

Stage = Callable[[str], None]

NAMES = {
    "asi": "constrained beam, ranked",
    "asi-beam": "plain beam, as in the paper",
    "asi-one-pass": "one-pass, 100 candidates ranked",
    "asi-one-pass-docids": "one-pass, docids only",
    "bm25": "BM25",
    "encoder": "untrained encoder, exact search",
}


def build_report(
    opened: Index,
    dataset: Dataset,
    splits: Sequence[str],
    judge: Judge,
    *,
    baselines: bool = False,
    stage: Stage = lambda name: None,
) -> Page:
    """The page of a run: measures, new documents, how the docids spread, what shares them."""
    figures.check_packages()
    stage("searching the test queries")
    docid_map = DocidMap(opened.searcher)
    reports, _ = evaluate_ways(opened, dataset, splits, possible_ways(opened), judge)
    systems = {
        name: partial(measured_way, opened.configured(**way), docid_map, judge)
        for name, way in possible_ways(opened).items()
    }
    shown = [name for name in systems if name in ("asi", "asi-beam")] or list(systems)[:1]
    if baselines:
        stage("BM25 and the untrained encoder")
        for name, retriever in baselines_of(opened).items():
            systems[name] = partial(evaluate_retriever, retriever, docid_map=docid_map, judge=judge)
            reports[name] = {split: systems[name](*dataset.judged(split)) for split in splits}
            shown.append(name)
    stage("looking at new documents")
    names = names_of_ways(opened)
    tables = {f"{names[name]}; judge: {judge.name}": systems[name] for name in shown}
    sections = [measures_section(reports, judge, names), new_section(opened, dataset, splits, docid_map, tables)]
    stage("looking at docids")
    sections += [
        density_section(docid_map, opened.loaded.model.config.V),
        map_section(docid_map, opened.loaded.model.config.V),
        similarity_section(docid_map, judge),
        *case_sections(docid_map),
    ]
    config, steps = opened.loaded.config, RunState.load(opened.folder).steps
    introduction = [
        f"Run `{opened.folder.path.name}` on `{dataset.name}`, {', '.join(splits)}, {datetime.date.today()}. "
        f"{len(docid_map.documents):,} documents; docids of {config.model.m} codes, {config.model.V} at each position; "
        f"trained for {steps or 0:,} steps, seed {config.train.seed}, encoder "
        f"`{Path(config.model.encoder).name}`.",
        "Recall is three numbers here. docid: the docid of a relevant document is among the first k (the paper's "
        "recall). expected: one random document per docid. document: after ranking, what a user sees.",
        *stranger_text(judge, config.model.encoder),
    ]
    data = {"measures": as_json(reports), "judge": judge.name}
    return Page(f"Docids of {opened.folder.path.name}", introduction, sections, data)


def stranger_text(judge: Judge, encoder: str) -> list[str]:
    """A warning if the judge took part in training after all."""
    if Path(judge.source).resolve() != Path(encoder).resolve():  # names of the hub are told apart by this too
        return []
    return [
        "The judge is the encoder that was trained with: its scores favour what that finds. To compare with others, "
        "take another."
    ]


def docid_cells(report: Report) -> list[Cell]:
    """R@1/5/10 at docid level, Mi-QS, Ma-QS, D/Q, Acc, D/ID: the paper's columns."""
    docid, quality = report.docid or {}, report.quality or {}
    recalls: list[Cell] = [docid.get(name) for name in ("R@1", "R@5", "R@10")]
    return [*recalls, quality.get("micro"), quality.get("macro"), report.d_per_q, report.acc, report.d_per_id]


def whole_docid_cells(report: Report) -> list[Cell]:
    """The paper's columns, and what they leave out."""
    expected, invalid = report.expectation or {}, report.invalid or {}
    more: list[Cell] = [expected.get("R@1"), expected.get("R@10"), invalid.get("all"), invalid.get("first")]
    return [*docid_cells(report), *more]


def document_cells(report: Report) -> list[Cell]:
    document, ranked = report.document or {}, report.ranked or {}
    return [*(document.get(name) for name in DOCUMENT_MEASURES), ranked.get("mean"), ranked.get("most")]


PAPER_COLUMNS = ("R@1", "R@5", "R@10", "Mi-QS", "Ma-QS", "D/Q", "Acc", "D/ID")
DOCID_COLUMNS = (*PAPER_COLUMNS, "expected R@1", "expected R@10", "invalid", "invalid first")
DOCUMENT_MEASURES = ("R@1", "R@5", "R@10", "MRR@10", "nDCG@10")
DOCUMENT_COLUMNS = (*DOCUMENT_MEASURES, "documents ranked", "at most")


def names_of_ways(opened: Index) -> dict[str, str]:
    """What the ways to search are called in the tables of this run."""
    if opened.loaded.config.search.ranking != "docid":
        return NAMES
    return NAMES | {"asi": "constrained beam, by docid alone", "asi-beam": f"{NAMES['asi-beam']}, by docid alone"}


def measures_section(reports: Reports, judge: Judge, names: Mapping[str, str]) -> Section:
    docid_rows: list[list[Cell]] = []
    document_rows: list[list[Cell]] = []
    for system, by in reports.items():
        for split, report in by.items():
            start: list[Cell] = [names.get(system, system), split]
            if report.docid is not None or report.quality is not None:
                docid_rows.append([*start, *whole_docid_cells(report)])
            document_rows.append([*start, *document_cells(report), report.ms_per_query, report.queries])
    columns = ("search", "split")
    return Section(
        "Measures",
        [
            f"Mi-QS and Ma-QS: mean score of the documents that the first ten docids open, by the judge {judge.name}, "
            "over all of them and over queries first (a query that opens nothing counts as 0 in the second only). D/Q: "
            "documents that they open. Systems without docids open the ten documents that they find. Acc: the heads "
            "give query and document the same docid. D/ID: documents per docid. Expected: one random document stands "
            "for each docid. Invalid: generated docids that no document has, of all and of the first.",
            "The constrained beam looks ahead to what the buckets are near to, so its docid level says how well "
            "decoder, heads and these together find a bucket. What decoder and heads generate alone is the plain beam.",
        ],
        [
            Table(f"Docid level; judge: {judge.name}", (*columns, *DOCID_COLUMNS), docid_rows),
            Table("Document level", (*columns, *DOCUMENT_COLUMNS, "ms a query, 32 at once", "queries"), document_rows),
        ],
    )


def more_pairs_text(count: int) -> str:
    return (
        f"The run was trained on {count:,} further pairs (--more), which this table does not know: if they are about "
        "documents without training queries of their own, those are not as new as they seem here."
    )


CHANGED = (
    "The documents or pairs of this data set are not those that the run was trained on: Existing documents are those "
    "with a training query now, of which the run may not know some."
)


def measured_way(
    searcher: Searcher, docid_map: DocidMap, judge: Judge, queries: Sequence[Query], qrels: Sequence[Qrel]
) -> Report:
    reports, _ = evaluate_searchers({"asi": searcher}, queries, qrels, docid_map, judge)
    return reports["asi"]


def new_section(
    opened: Index, dataset: Dataset, splits: Sequence[str], docid_map: DocidMap, systems: Mapping[str, Measure]
) -> Section:
    """Two tables for each system, which have its title."""
    title = "New documents"
    if "train" not in dataset.splits:
        return Section(
            title, [f"{dataset.name} has no split train, which would tell the known documents from new ones."]
        )
    state = RunState.load(opened.folder)
    is_changed = not state.more_pairs and state.texts not in (None, training_texts(dataset).fingerprint())
    return Section(
        title,
        [
            "Queries grouped by their document. Existing: it has training queries. NewContent: it has none, but shares "
            "its docid with one that has. NewSemantic: its docid is new too. A query that asks for documents of two "
            "groups counts in both. The constrained beam knows all docids in use, those of new documents too, and what "
            "their buckets are near to; the plain one generates what it has learnt.",
            *([more_pairs_text(state.more_pairs)] if state.more_pairs else []),
            *([CHANGED] if is_changed else []),
        ],
        [
            table
            for name, measure in systems.items()
            for table in group_tables(name, evaluate_groups(measure, dataset, splits, docid_map))
        ],
    )


def group_tables(name: str, groups: Mapping[str, Group]) -> list[Table]:
    """The measures of one system by group: at docid level, and at document level."""
    docid_rows: list[list[Cell]] = []
    document_rows: list[list[Cell]] = []
    for group, own in groups.items():
        report = own.report or Report(queries=0)
        start: list[Cell] = [group, report.queries, own.documents]
        docid_rows.append([*start, *whole_docid_cells(report)])
        document_rows.append([*start, *document_cells(report)])
    columns = ("group", "queries", "documents")
    return [
        Table(f"{name}: docid level", (*columns, *DOCID_COLUMNS), docid_rows),
        Table(f"{name}: document level", (*columns, *DOCUMENT_COLUMNS), document_rows),
    ]


def density_section(docid_map: DocidMap, V: int) -> Section:
    health = docid_map.health
    warning = collapse_warning(health, V)
    perplexities = ", ".join(f"{value:.0f}" for value in health.perplexity)
    return Section(
        "Docid density",
        [
            f"{health.docids:,} docids are in use for {health.documents:,} documents (D/ID {health.d_per_id:.2f}); the "
            f"fullest holds {health.largest_bucket} ({health.largest_share:.2%} of the corpus). Perplexity per "
            f"position, of {V} codes: {perplexities}.",
            *([f"Warning: {warning}."] if warning else []),
        ],
        [
            Table(
                "Docids by the number of their documents",
                ("documents", "docids", "share of docids", "share of documents"),
                docids.density(docid_map.buckets),
            )
        ],
        [
            Figure(
                "Documents behind each docid, the fullest first",
                "density",
                figures.density_figure(docid_map.buckets.sizes),
            )
        ],
    )


def map_section(docid_map: DocidMap, V: int) -> Section:
    picture = figures.tsne_figure(docid_map.buckets.docids, V)
    if picture is None:
        return Section("Map of the docids", ["Too few docids to draw."])
    text = (
        f"{min(figures.TSNE_POINTS, len(docid_map.buckets.docids)):,} of {len(docid_map.buckets.docids):,} docids as "
        "vectors of their codes, laid out by t-SNE, coloured by the first code. Codes are names, not sizes, so an even "
        "spread is what health looks like; clumps would be codes that always come together."
    )
    return Section("Map of the docids", [text], figures=[Figure("t-SNE of docids in use", "map", picture)])


def similarity_section(docid_map: DocidMap, judge: Judge) -> Section:
    found = [docids.similarity(by, docid_map) for by in (TfidfJudge(), *embedding_judges(judge))]
    rows: list[list[Cell]] = [
        [
            s.judge,
            s.pairs,
            s.equal,
            plus_minus(s.random),
            plus_minus(s.same),
            p_value_text(s.p_value),
        ]
        for s in found
        if s is not None
    ]
    text = (
        "Similarity of two documents with the same docid, and of two drawn at random: mean ± standard "
        "deviation, and the p-value of a one-sided t-test with unequal variances."
        if rows
        else "Hardly any documents share a docid."
    )
    table = Table("Similarity of documents", ("by", "pairs", "of equal texts", "random", "same docid", "p-value"), rows)
    return Section("Documents that share a docid", [text], [table] if rows else [])


def embedding_judges(judge: Judge) -> list[Judge]:
    """The report's own judge if it compares vectors, else the default one if its package is there."""
    if isinstance(judge, EmbeddingJudge):
        return [judge]
    try:
        return [find_judge("wordllama")]
    except ConfigError:
        return []


def p_value_text(value: float) -> str | None:
    """Nothing where there is none: all pairs are alike."""
    if isnan(value):
        return None
    return f"{value:.1e}" if value else "below 1e-300"


def plus_minus(values: tuple[float, float]) -> str:
    return f"{values[0]:.3f} ± {values[1]:.3f}"


def case_sections(docid_map: DocidMap) -> list[Section]:
    common = docids.CommonWords(docid_map.documents)
    buckets = docids.bucket_cases(docid_map, common)
    groups = docids.neighbour_cases(docid_map, common)
    return [
        Section(
            "Buckets",
            ["Some docids with some of their documents, and the words that two and at least a third of these share."],
            [Table("Docids and their documents", CASE_COLUMNS, [case_row(case) for case in buckets])],
        ),
        Section(
            "Neighbouring docids",
            [
                "Docids that differ in one position. Chosen are groups around a docid whose documents have words in "
                "common, if there are any."
                if groups
                else "No docid has two neighbours that differ in one position only."
            ],
            [
                Table(f"Around {named(group[0].docid)}", CASE_COLUMNS, [case_row(case) for case in group])
                for group in groups
            ],
        ),
        Section(
            "First codes",
            [
                "What the documents whose docids start with one code have in common: words that are at least twice as "
                "frequent among them as in the corpus, with the share of the documents that have them, and titles from "
                "all over the group."
            ],
            [
                Table(
                    "Codes of the first position with the most documents",
                    ("first code", "docids", "documents", "words in common", "examples"),
                    [
                        [
                            first.code,
                            first.docids,
                            first.documents,
                            ", ".join(first.common) or None,
                            "; ".join(first.examples),
                        ]
                        for first in docids.first_codes(docid_map, common)
                    ],
                )
            ],
        ),
    ]


CASE_COLUMNS = ("docid", "documents", "words in common", "some of the documents")


def case_row(case: docids.Case) -> list[Cell]:
    shown = "; ".join(brief(document) for document in case.documents)
    return [named(case.docid), case.size, ", ".join(case.common) or None, shown]


def named(docid: Docid) -> str:
    return ",".join(map(str, docid))


def brief(document: Document, length: int = 70) -> str:
    text = document.title or " ".join(document.text.split())
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"
