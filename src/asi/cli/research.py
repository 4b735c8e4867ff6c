"""Measuring and comparing: evaluate, report, study, expand, systems, compare."""

import json
from pathlib import Path
from typing import Annotated

import typer

from asi.cli.options import (
    AsJson,
    Beams,
    BucketCap,
    Device,
    JudgeName,
    Mode,
    NumberOfCandidates,
    Ranking,
    RunPath,
    SearchSettings,
    SkipBad,
    app,
    bad_records,
    report_skipped,
    resolve_config,
    search_settings,
    splits_to_measure,
    stop_signals,
)
from asi.errors import AsiError


@app.command()
def evaluate(
    run: RunPath,
    data: Annotated[str, typer.Argument(metavar="DATA", help="data set with queries and judgements")],
    split: Annotated[list[str] | None, typer.Option(help="split to evaluate; may be given several times")] = None,
    baselines: Annotated[bool, typer.Option("--baselines", help="also BM25 and the untrained encoder")] = False,
    mode: Mode = None,
    ranking: Ranking = None,
    beams: Beams = None,
    candidates: NumberOfCandidates = None,
    bucket_cap: BucketCap = None,
    settings: SearchSettings = None,
    depth: Annotated[int, typer.Option(min=10, help="hits for each query; with 100 also R@100")] = 10,
    as_json: AsJson = False,
    run_file: Annotated[Path | None, typer.Option(help="write the answers as a TREC run file")] = None,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Measure the answers to the queries of a split."""
    from asi.datasets import open_dataset
    from asi.index import Index
    from asi.metrics import as_json as report_json
    from asi.metrics import report_rows
    from asi.screen import ScreenReporter, table_text
    from asi.ways import evaluate_index

    bad = bad_records(skip_bad)
    if run_file is not None and not run_file.absolute().parent.is_dir():
        raise AsiError(f"there is no folder {run_file.parent} for the run file; make it first")
    wanted = search_settings(
        settings, mode=mode, ranking=ranking, beams=beams, candidates=candidates, bucket_cap=bucket_cap
    )
    with ScreenReporter(lines=False) as reporter, Index.load(run, device) as opened:
        reports = evaluate_index(
            opened, open_dataset(data, bad), split or ["test"], wanted, baselines=baselines, run_file=run_file,
            k=depth, stage=lambda name: reporter.stage(name, 0),
        )  # fmt: skip
    report_skipped(bad)
    if as_json:
        typer.echo(json.dumps(report_json(reports), indent=1))
    else:
        typer.echo(table_text(report_rows(reports)))


@app.command()
def report(
    run: RunPath,
    data: Annotated[str, typer.Argument(metavar="DATA", help="data set with queries and judgements")],
    out: Annotated[Path, typer.Option(help="folder for report.html, report.md, report.json")] = Path("report"),
    split: Annotated[list[str] | None, typer.Option(help="split to look at; default: all test splits")] = None,
    judge: JudgeName = "wordllama",
    baselines: Annotated[bool, typer.Option("--baselines", help="also BM25 and the untrained encoder")] = False,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Write what the paper looks at as one page: measures, quality, new documents, docids and what shares them."""
    from asi.analysis.report import build_report
    from asi.datasets import open_dataset
    from asi.index import Index
    from asi.judges import find_judge
    from asi.screen import ScreenReporter

    bad = bad_records(skip_bad)
    with ScreenReporter() as reporter:
        dataset = open_dataset(data, bad)
        splits = split or splits_to_measure(dataset)
        with Index.load(run, device) as opened:
            built = build_report(
                opened, dataset, splits, find_judge(judge, device), baselines=baselines,
                stage=lambda name: reporter.stage(name, 0),
            )  # fmt: skip
            page = built.write(out)
    report_skipped(bad)
    typer.echo(f"wrote {page}, and the same as report.md and report.json beside it")


@app.command()
def study(
    name: Annotated[
        str, typer.Argument(metavar="STUDY", help="variants, length, range, expansion, or all of them and a report")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="data set with queries and judgements")],
    out: Annotated[Path, typer.Option(help="folder for the runs and the page")] = Path("study"),
    steps: Annotated[int, typer.Option(help="length of every run")] = 300,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="for every run")] = None,
    split: Annotated[list[str] | None, typer.Option(help="split to measure; default: all test splits")] = None,
    judge: JudgeName = "wordllama",
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Train and compare what the paper compares, and write a page. Stopped, it goes on where it was when run again."""
    from asi.analysis.bench import Bench
    from asi.analysis.study_page import write_study
    from asi.config import DOCIDS_IN_EVERY_STEP, LENGTHS
    from asi.datasets import open_dataset
    from asi.judges import find_judge
    from asi.screen import ScreenReporter

    # What is studied are docids: ranking by tokens and more steps for vectors would only take time.
    fixed = ["model.token_width=0", *DOCIDS_IN_EVERY_STEP, "train.freeze_docids=0.8"]
    own = settings or []
    if lengths := [text for text in own if text.strip().startswith(tuple(f"train.{name}=" for name in LENGTHS))]:
        raise AsiError(f"the runs of a study have --steps, not --set {lengths[0]}")
    config = resolve_config("small", None, None, [*fixed, *own, f"train.steps={steps}"])
    bad = bad_records(skip_bad)
    with ScreenReporter() as reporter, stop_signals() as stopping:
        dataset = open_dataset(data, bad)
        splits = split or splits_to_measure(dataset)
        bench = Bench(dataset, splits, config, own, find_judge(judge, device), out, reporter, stopping, device)
        page = write_study(name, bench)
    report_skipped(bad)
    typer.echo(f"wrote {page}, and the same as report.md and report.json beside it")


@app.command()
def expand(
    documents: Annotated[str, typer.Argument(metavar="DOCUMENTS", help="hpo, pydoc, a folder or a file")],
    out: Annotated[Path, typer.Option(help="pairs file to write (.jsonl)")],
    model: Annotated[
        str | None, typer.Option(help="a generator of asi expand, or a Hugging Face seq2seq model")
    ] = None,
    train_on: Annotated[
        str | None, typer.Option("--train", metavar="DATA", help="train a generator on its pairs")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="queries sampled for each document")] = 5,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="length of the generator's training; default: 600, or fewer where pairs are few"),
    ] = None,
    encoder: Annotated[
        str, typer.Option(help="with --train: what reads the documents, a folder or a name")
    ] = "all-MiniLM-L6-v2",
    seed: Annotated[int, typer.Option(help="of training and sampling")] = 0,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Write pseudo queries for documents: more training pairs for asi train --more."""
    from asi.batches import training_texts
    from asi.datasets import open_dataset, read_documents
    from asi.distributed import choose_device
    from asi.expansion import (
        QueryGenerator,
        find_generator,
        generator_training,
        suited_config,
        suited_steps,
        train_on_pairs,
        write_pairs,
    )
    from asi.screen import ScreenReporter

    if (model is None) == (train_on is None):
        raise AsiError("give either --model, a generator, or --train DATA, pairs to train one on")
    if out.suffix != ".jsonl" or out.is_dir():
        raise AsiError(f"--out must be a file whose name ends in .jsonl, got {out}")
    bad = bad_records(skip_bad)
    chosen = choose_device(device)
    with ScreenReporter() as reporter, stop_signals() as stopping:
        items = list(read_documents(documents, bad))
        folder = out.with_suffix(".generator")
        generator: QueryGenerator
        if train_on is not None:
            dataset = open_dataset(train_on, bad)
            texts = training_texts(dataset)
            generator = train_on_pairs(
                dataset, folder, generator_training(seed, steps=steps or suited_steps(texts)), chosen, reporter,
                stopping, config=suited_config(texts, encoder),
            )  # fmt: skip
        else:
            generator = find_generator(model or "", chosen)
        written = write_pairs(generator, items, out, count, seed, reporter, stopping)
    report_skipped(bad)
    kept = f"; the generator is in {folder}" if train_on is not None else ""
    typer.echo(f"wrote {written} pseudo queries to {out}{kept}; train with: asi train DATA --more {out}")


@app.command()
def systems(as_json: AsJson = False) -> None:
    """Show the systems that `asi compare` can run."""
    from asi.screen import table_text
    from asi.systems.table import ROWS

    facts = [
        {
            "system": row.name,
            "mechanism": row.mechanism,
            "paper": row.paper,
            "new documents": "yes" if row.takes_new else "no",
            "differs from the original": row.differs,
        }
        for row in ROWS
    ]
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    else:
        typer.echo(table_text([list(facts[0]), *([*fact.values()] for fact in facts)], texts=len(facts[0])))


@app.command(name="compare")
def compare_command(
    data: Annotated[str, typer.Argument(metavar="DATA", help="data set with queries and judgements")],
    out: Annotated[Path, typer.Option(help="folder for the systems and the page")] = Path("compare"),
    names: Annotated[str, typer.Option("--systems", help="names with commas between them, or all")] = "all",
    minutes: Annotated[float, typer.Option(help="of training, for every system that is trained")] = 10.0,
    split: Annotated[list[str] | None, typer.Option(help="split to measure; default: all test splits")] = None,
    encoder: Annotated[str, typer.Option(help="the encoder of all systems: a folder or a name")] = "all-MiniLM-L6-v2",
    max_length: Annotated[
        int | None, typer.Option(help="tokens of a text that are read; default: 64, or 256 if many are longer")
    ] = None,
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    jobs: Annotated[int, typer.Option(help="systems at a time; they share the processor's cores")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a comparison that was stopped")] = False,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Train and measure many systems on the same data with the same encoder and minutes, and write one table."""
    from asi.analysis.comparison import compare, open_comparison
    from asi.datasets import open_dataset
    from asi.distributed import choose_device
    from asi.lengths import suited_length
    from asi.screen import ScreenReporter
    from asi.systems.table import chosen_systems
    from asi.systems.workplace import Terms, Workplace

    chosen = chosen_systems(names)
    bad = bad_records(skip_bad)
    with ScreenReporter() as reporter, stop_signals() as stopping:
        dataset = open_dataset(data, bad)
        splits = split or splits_to_measure(dataset)
        max_length = max_length or suited_length(encoder, list(dataset.documents()))
        terms = Terms(minutes, encoder, max_length, seed, jobs)
        workplace = Workplace(dataset, out, terms, choose_device(device), reporter, stopping)
        open_comparison(workplace, splits, resume=resume)
        page = compare(chosen, workplace, splits)
    report_skipped(bad)
    typer.echo(f"wrote {page}, and the same as report.md and report.json beside it")
