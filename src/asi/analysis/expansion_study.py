"""What pseudo queries give: the same run with and without them, on the data set's own documents."""

from collections.abc import Sequence

import numpy as np

from asi.analysis.bench import Bench, measured_run
from asi.analysis.findings import of_queries, verdict
from asi.analysis.pages import Cell, Section, Table
from asi.analysis.report import PAPER_COLUMNS, docid_cells
from asi.batches import training_texts
from asi.datasets import Dataset, WithMorePairs
from asi.distributed import choose_device
from asi.evaluation import evaluate_documents
from asi.expansion import generator_training, pseudo_queries_file, queries_by_document, suited_steps, with_queries
from asi.generator import GeneratorConfig
from asi.lengths import suited_length
from asi.metrics import Report, Reports
from asi.records import Document
from asi.run import check_same_run
from asi.systems.lexical import LexicalRetriever

QUERIES_PER_DOCUMENT = 3
EXAMPLES = 8
ASI, ASI_WITH_MORE = "ASI", "ASI with pseudo queries"
BM25, BM25_WITH_MORE = "BM25", "BM25 with pseudo queries (DocT5Query)"
EXPANSION_RUNS = ("default", "expanded")  # folders: without pseudo queries, with them


def expansion_section(bench: Bench) -> Section:
    """Train a generator and two runs of the default settings; BM25 with and without the pseudo queries beside them."""
    dataset, splits, config = bench.dataset, bench.splits, bench.config
    steps = suited_steps(training_texts(dataset))
    check_same_run(bench.run_folder(EXPANSION_RUNS[0]), config, dataset.name)
    documents, encoder = list(dataset.documents()), config.model.encoder
    file = pseudo_queries_file(
        dataset, bench.out, generator_training(config.train.seed, steps=steps), QUERIES_PER_DOCUMENT,
        choose_device(bench.device), bench.reporter, bench.stopping, bench.cache,
        GeneratorConfig(encoder, config.model.max_length or suited_length(encoder, documents)),
    )  # fmt: skip
    bench.also.clear()
    expanded = WithMorePairs(dataset, str(file))
    pseudo = queries_by_document(expanded.more)
    longer = with_queries(documents, pseudo)
    reports: Reports = {}
    for name, data, folder in zip((ASI, ASI_WITH_MORE), (dataset, expanded), EXPANSION_RUNS, strict=True):
        measures = measured_run(bench, f"Query expansion: {name}", bench.run_folder(folder), data, config)
        reports[name] = measures["constrained"]
    for name, corpus in ((BM25, documents), (BM25_WITH_MORE, longer)):
        retriever = LexicalRetriever(corpus)
        reports[name] = {split: evaluate_documents(retriever, *dataset.judged(split))[0] for split in splits}
    return Section(
        "Query expansion",
        [expansion_text(dataset, documents, steps), *expansion_findings(reports, splits)],
        [
            Table(
                f"{split}; judge: {bench.judge.name}",
                ("system", *PAPER_COLUMNS, "expected R@10", "document R@10", "document MRR@10"),
                [expansion_row(name, by[split]) for name, by in reports.items()],
            )
            for split in splits
        ]
        + [examples_table(documents, pseudo)],
    )


def expansion_text(dataset: Dataset, documents: Sequence[Document], steps: int) -> str:
    _, qrels = dataset.judged("train")
    return (
        f"{len(qrels):,} training pairs for {len(documents):,} documents, of which "
        f"{len({qrel.document for qrel in qrels}):,} have any. A generator of our own is trained on the pairs "
        f"({steps} steps), samples {QUERIES_PER_DOCUMENT} queries for every document of the corpus, and "
        "these are trained on too. So documents without a training query have pseudo queries here. ASI searches by the "
        "constrained beam, whose recall at docid level is that of decoder, heads and the buckets' centres together."
    )


def expansion_findings(reports: Reports, splits: Sequence[str]) -> list[str]:
    claims = (
        (
            "generated docids are right more often (docid-level R@10, and where one document stands for each docid)",
            ASI, ASI_WITH_MORE, ("docid", "expectation"),
        ),
        ("more documents are found after ranking (R@10)", ASI, ASI_WITH_MORE, ("document",)),
        ("BM25 finds more documents (R@10)", BM25, BM25_WITH_MORE, ("document",)),
    )  # fmt: skip
    found = []
    for split in splits:
        for claim, plain, with_more, levels in claims:
            before, after = (
                [(getattr(reports[name][split], level) or {})["R@10"] for level in levels]
                for name in (plain, with_more)
            )
            changes = list(zip(before, after, strict=True))
            gains = [of_queries(new - old, reports[plain][split].queries) for old, new in changes]
            values = "; ".join(f"{new:.3f} against {old:.3f}" for old, new in changes)
            found.append(verdict(f"{split}, with pseudo queries {claim}", gains, values))
    return found


def expansion_row(name: str, report: Report) -> list[Cell]:
    document = report.document or {}
    expected = (report.expectation or {}).get("R@10")
    return [name, *docid_cells(report), expected, document.get("R@10"), document.get("MRR@10")]


def examples_table(documents: Sequence[Document], pseudo: dict[str, list[str]]) -> Table:
    chosen = np.random.default_rng(0).choice(len(documents), min(EXAMPLES, len(documents)), replace=False)
    rows: list[list[Cell]] = [
        [documents[i].title or documents[i].text[:60], "; ".join(pseudo.get(documents[i].key, [])[:3])] for i in chosen
    ]
    return Table("Pseudo queries of documents drawn at random", ("document", "pseudo queries"), rows)
