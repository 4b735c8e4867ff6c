"""The command line: each command parses, calls one function of the library, and prints.

Heavy modules are imported inside the commands, so that `asi --help` answers at once.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asi.errors import AsiError, Interrupted

if TYPE_CHECKING:
    from asi.config import Config
    from asi.datasets import BadRecords, Dataset
    from asi.index import Index

app = typer.Typer(
    help="Search by generated, learned document identifiers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a trained run", show_default=False)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="count and leave out bad records instead of stopping")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Wait = Annotated[float, typer.Option(help="seconds to wait for another process that is writing")]
Mode = Annotated[str | None, typer.Option(help="beam, constrained or one-pass")]
Ranking = Annotated[str | None, typer.Option(help="order of the candidates: docid, vector or sum")]
JudgeName = Annotated[str, typer.Option("--judge", help="wordllama, tfidf, or a Hugging Face encoder or cross-encoder")]
Beams = Annotated[int | None, typer.Option(help="docids that are generated for a query")]
NumberOfCandidates = Annotated[int | None, typer.Option("--candidates", help="documents that are ranked, at the most")]
BucketCap = Annotated[int | None, typer.Option(help="documents of one bucket in an answer, at the most")]


@app.command()
def train(
    data: Annotated[str, typer.Argument(metavar="DATA", help="hpo, pydoc, a folder or a file of pairs")],
    out: Annotated[Path, typer.Option(help="folder of the run")],
    preset: Annotated[str, typer.Option(help="small or paper")] = "small",
    config: Annotated[Path | None, typer.Option(help="settings in a TOML file")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="e.g. train.lr=3e-4")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="a variant of the paper, e.g. no-contrastive")] = None,
    minutes: Annotated[float | None, typer.Option(help="length of the run: minutes, encoding included")] = None,
    steps: Annotated[int | None, typer.Option(help="length of the run: steps")] = None,
    epochs: Annotated[float | None, typer.Option(help="length of the run: passes over the pairs")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on where the run was stopped")] = False,
    more: Annotated[
        str | None, typer.Option(metavar="PAIRS", help="further training pairs, e.g. of asi expand")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="keep what the frozen layers compute, for other runs")] = None,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Train a model on (query, document) pairs and index the documents."""
    from asi.datasets import WithMorePairs, open_dataset
    from asi.run import train as train_run
    from asi.screen import ScreenReporter

    lengths = [
        f"train.{k}={v}" for k, v in (("minutes", minutes), ("steps", steps), ("epochs", epochs)) if v is not None
    ]
    resolved = resolve_config(preset, config, variant, [*(settings or []), *lengths])
    bad = bad_records(skip_bad)
    with ScreenReporter() as reporter, stop_signals() as stopping:
        dataset = open_dataset(data, bad)
        if more is not None:
            dataset = WithMorePairs(dataset, more, bad)
            data = f"{data} and {more}"
        train_run(
            dataset, out, resolved, data=data, resume=resume, device=device, cache=cache,
            reporter=reporter, stopping=stopping,
        )  # fmt: skip
    report_skipped(bad)
    typer.echo(f'trained and indexed: {out}; try: asi search {out} "a query"')


@app.command()
def index(
    run: RunPath,
    documents: Annotated[
        str, typer.Argument(metavar="DOCUMENTS", help="hpo, a folder, a file, or - for JSONL on stdin")
    ],
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Give documents docids and build the store anew."""
    from asi.datasets import read_documents
    from asi.index import rebuild

    bad = bad_records(skip_bad)
    count = rebuild(run, read_documents(documents, bad), device=device)
    report_skipped(bad)
    typer.echo(f"indexed {count} documents in {run}")


@app.command()
def add(
    run: RunPath,
    documents: Annotated[str, typer.Argument(metavar="NEW.jsonl", help="a file of documents, or - for JSONL on stdin")],
    print_keys: Annotated[
        bool, typer.Option("--print-keys", help="print each key once its document is durable")
    ] = False,
    batch: Annotated[int, typer.Option(help="documents that become visible together")] = 1024,
    skip_bad: SkipBad = False,
    wait: Wait = 0.0,
    device: Device = None,
) -> None:
    """Add documents, or replace those with a known key: searchable when the command returns."""
    from asi.datasets import read_documents
    from asi.index import Index

    def acknowledge(added: Any) -> None:
        if print_keys:
            sys.stdout.write("".join(f"{document.key}\n" for document in added))
            sys.stdout.flush()

    bad = bad_records(skip_bad)
    with Index.load(run, device) as opened:
        count = opened.add(read_documents(documents, bad), added=acknowledge, batch=batch, wait=wait)
        total = len(opened)
    report_skipped(bad)
    typer.echo(f"added {count} documents; {run} has {total}", err=print_keys)


@app.command()
def delete(
    run: RunPath,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="keys of documents")],
    wait: Wait = 0.0,
) -> None:
    """Delete documents by key: all of them, or none if one is unknown."""
    from asi.checkpoint import RunFolder
    from asi.index import delete_documents

    delete_documents(RunFolder(run), keys, wait=wait)
    typer.echo(f"deleted {len(keys)} document{'s' * (len(keys) != 1)} from {run}")


@app.command()
def search(
    run: RunPath,
    query: Annotated[str | None, typer.Argument(metavar="[QUERY]", help="no query: an interactive prompt")] = None,
    k: Annotated[int, typer.Option("-k", help="documents to return")] = 10,
    mode: Mode = None,
    ranking: Ranking = None,
    beams: Beams = None,
    candidates: NumberOfCandidates = None,
    bucket_cap: BucketCap = None,
    as_json: AsJson = False,
    device: Device = None,
) -> None:
    """Answer a query, or queries typed at a prompt."""
    from asi.index import Index
    from asi.screen import print_hits

    with Index.load(run, device) as opened:
        searcher = opened.configured(
            mode=mode, ranking=ranking, beams=beams, candidates=candidates, bucket_cap=bucket_cap
        )
        for text in [query] if query is not None else typed_queries():
            [found] = searcher.search_documents([text], k)
            if as_json:
                typer.echo(
                    json.dumps(
                        {"query": text, "hits": [hit_record(hit, document) for hit, document in found]},
                        ensure_ascii=False,
                    )
                )
            else:
                print_hits(found)


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
    as_json: AsJson = False,
    run_file: Annotated[Path | None, typer.Option(help="write the answers as a TREC run file")] = None,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Measure the answers to the queries of a split."""
    from asi.compare import evaluate_index
    from asi.datasets import open_dataset
    from asi.index import Index
    from asi.metrics import report_rows
    from asi.screen import table_text

    bad = bad_records(skip_bad)
    settings = {"mode": mode, "ranking": ranking, "beams": beams, "candidates": candidates}
    with Index.load(run, device) as opened:
        reports = evaluate_index(opened, open_dataset(data, bad), split or ["test"], settings, baselines, run_file)
    report_skipped(bad)
    if as_json:
        typer.echo(json.dumps({s: {n: r.to_dict() for n, r in by.items()} for s, by in reports.items()}, indent=1))
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
    from asi.analysis.report import write_report
    from asi.datasets import open_dataset
    from asi.index import Index
    from asi.judges import find_judge
    from asi.screen import ScreenReporter

    bad = bad_records(skip_bad)
    with ScreenReporter() as reporter:
        dataset = open_dataset(data, bad)
        splits = split or test_splits(dataset)
        with Index.load(run, device) as opened:
            page = write_report(
                opened, dataset, splits, find_judge(judge), out, baselines=baselines,
                stage=lambda name: reporter.stage(name, 0),
            )  # fmt: skip
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
    steps: Annotated[int, typer.Option(min=1, help="length of the generator's training")] = 600,
    seed: Annotated[int, typer.Option(help="of training and sampling")] = 0,
    skip_bad: SkipBad = False,
    device: Device = None,
) -> None:
    """Write pseudo queries for documents: more training pairs for asi train --more."""
    from asi.datasets import open_dataset, read_documents
    from asi.distributed import choose_device
    from asi.expansion import QueryGenerator, find_generator, train_on_pairs, write_pairs
    from asi.screen import ScreenReporter

    if (model is None) == (train_on is None):
        raise AsiError("give either --model, a generator, or --train DATA, pairs to train one on")
    bad = bad_records(skip_bad)
    chosen = choose_device(device)
    with ScreenReporter() as reporter, stop_signals() as stopping:
        folder = out.with_suffix(".generator")
        generator: QueryGenerator
        if train_on is not None:
            generator = train_on_pairs(open_dataset(train_on, bad), folder, steps, seed, chosen, reporter, stopping)
        else:
            generator = find_generator(model or "", chosen)
        written = write_pairs(generator, list(read_documents(documents, bad)), out, count, seed, reporter)
    report_skipped(bad)
    kept = f"; the generator is in {folder}" if train_on is not None else ""
    typer.echo(f"wrote {written} pseudo queries to {out}{kept}; train with: asi train DATA --more {out}")


@app.command()
def study(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="variants, length, range, or all of them and a report")],
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
    from asi.analysis.studies import write_study
    from asi.datasets import open_dataset
    from asi.judges import find_judge
    from asi.screen import ScreenReporter

    config = resolve_config("small", None, None, [*(settings or []), f"train.steps={steps}"])
    bad = bad_records(skip_bad)
    with ScreenReporter() as reporter, stop_signals() as stopping:
        dataset = open_dataset(data, bad)
        splits = split or test_splits(dataset)
        page = write_study(
            name, dataset, splits, config, find_judge(judge), out, reporter, stopping=stopping, device=device
        )
    report_skipped(bad)
    typer.echo(f"wrote {page}, and the same as report.md and report.json beside it")


@app.command(name="show")
def show_command(
    run: RunPath,
    what: Annotated[str, typer.Argument(metavar="docid|key|stats")],
    value: Annotated[str | None, typer.Argument(metavar="[VALUE]", help="12,187,16,208 or a document's key")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a bucket (docid 12,187,16,208), a document and its docid (key HP:0100785), or the docids' health (stats)."""
    from asi.index import Index

    if what not in SHOWN:
        raise typer.BadParameter(f"{what!r}: show one of {', '.join(SHOWN)}")
    if what != "stats" and value is None:
        raise typer.BadParameter(f"which {what}? write: asi show {run} {what} VALUE")
    with Index.load(run) as opened:
        record, lines = SHOWN[what](opened, value or "")
    typer.echo(json.dumps(record, ensure_ascii=False) if as_json else "\n".join(lines))


@app.command()
def doctor(run: RunPath) -> None:
    """Check every file of a run against its checksum, and the store against the model."""
    from asi.index import examine

    sick = False
    for part, problems in examine(run):
        typer.echo(f"{part}: {'; '.join(problems) if problems else 'ok'}")
        sick = sick or bool(problems)
    if sick:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder of the run")] = Path("runs/demo"),
    data: Annotated[str, typer.Option(help="built-in corpus")] = "hpo",
    minutes: Annotated[float, typer.Option(help="minutes of training, encoding included")] = 6.2,
    device: Device = None,
) -> None:
    """Train on a built-in corpus, index, evaluate beside the baselines, and answer three queries."""
    from asi.demo import run_demo
    from asi.screen import ScreenReporter, print_hits, table_text

    with ScreenReporter() as reporter, stop_signals() as stopping:
        result = run_demo(data, out, minutes, reporter, stopping, device)
    typer.echo(table_text(result.rows))
    for query, found in result.answers:
        typer.echo(f"\n> {query}")
        print_hits(found)
    typer.echo(f"\n{result.summary}")


# Helpers --------------------------------------------------------------------------------------------------------------


def resolve_config(preset: str, path: Path | None, variant: str | None, overrides: list[str]) -> "Config":
    from asi.config import VARIANTS, load_config, with_overrides
    from asi.config import preset as find_preset
    from asi.errors import ConfigError

    config = find_preset(preset)
    if path is not None:
        config = load_config(path, config)
    if variant is not None:
        if variant not in VARIANTS:
            raise ConfigError(f"unknown variant {variant!r}; variants are {', '.join(VARIANTS)}")
        config = with_overrides(config, VARIANTS[variant])
    return with_overrides(config, overrides)


def test_splits(dataset: "Dataset") -> list[str]:
    found = [name for name in dataset.splits if name.startswith("test")]
    if not found:
        raise AsiError(f"{dataset.name} has no test split (it has {', '.join(dataset.splits)}); name one with --split")
    return found


def bad_records(skip: bool) -> "BadRecords | None":
    from asi.datasets import BadRecords

    return BadRecords() if skip else None


def report_skipped(bad: "BadRecords | None") -> None:
    if bad is not None and bad.counts:
        kinds = ", ".join(f"{count} {kind}" for kind, count in bad.counts.items())
        typer.echo(f"skipped bad records: {kinds}; the first: {bad.first}", err=True)


def typed_queries() -> Iterator[str]:
    """Queries from the keyboard, or one per line from a pipe, until the end of input."""
    interactive = sys.stdin.isatty()
    while True:
        try:
            text = input("query> " if interactive else "")
        except EOFError:
            return
        if text.strip():
            yield text.strip()


def hit_record(hit: Any, document: Any) -> dict[str, Any]:
    return {"key": hit.key, "score": hit.score, "docid": hit.docid, "title": document.title, "text": document.text}


def parse_docid(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(code) for code in text.split(","))
    except ValueError:
        raise AsiError(f"a docid is integers with commas, like 12,187,16,208; got {text!r}") from None


def show_docid(opened: "Index", value: str) -> tuple[Any, list[str]]:
    from asi.screen import preview

    docid = parse_docid(value)
    if len(docid) != opened.loaded.model.config.m:
        raise AsiError(f"docids of this run have {opened.loaded.model.config.m} codes, got {value!r}")
    documents = opened.bucket(docid)
    lines = [f"{len(documents)} documents have the docid {value}"] + [f"{d.key}  {preview(d)}" for d in documents]
    return {"docid": docid, "documents": [d._asdict() for d in documents]}, lines


def show_key(opened: "Index", value: str) -> tuple[Any, list[str]]:
    found = opened.lookup(value)
    shown = ",".join(map(str, found.docid))
    others = len(opened.bucket(found.docid)) - 1
    lines = [
        f"key    {value}",
        f"docid  {shown} ({others} other documents)",
        f"title  {found.document.title}",
        f"text   {found.document.text}",
    ]
    return {"docid": found.docid, **found.document._asdict()}, lines


def show_stats(opened: "Index", value: str) -> tuple[Any, list[str]]:
    from asi.metrics import collapse_warning
    from asi.screen import health_rows, table_text

    health = opened.health()
    warning = collapse_warning(health, opened.loaded.model.config.V)
    return health._asdict(), [table_text(health_rows(health)), *([f"Warning: {warning}"] if warning else [])]


SHOWN: dict[str, Callable[["Index", str], tuple[Any, list[str]]]] = {
    "docid": show_docid,
    "key": show_key,
    "stats": show_stats,
}


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM and the first Ctrl-C ask the run to save and leave."""
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: received.append(n)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """The entry point: every foreseen error is one line on stderr."""
    try:
        app()
    except Interrupted as stopped:
        sys.stderr.write(f"Stopped: {stopped}\n")
        sys.exit(1)
    except AsiError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(1)
    except OSError as error:
        sys.stderr.write(f"Error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}\n")
        sys.exit(1)
