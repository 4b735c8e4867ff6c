"""From data to answers: train, index, add, delete, search, show, doctor, demo."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asi.cli.options import (
    AsJson,
    Beams,
    BucketCap,
    Device,
    Mode,
    NumberOfCandidates,
    Ranking,
    RunPath,
    SearchSettings,
    SkipBad,
    Wait,
    app,
    bad_records,
    report_skipped,
    resolve_config,
    search_settings,
    stop_signals,
)
from asi.errors import AsiError

if TYPE_CHECKING:
    from asi.index import Index


@app.command()
def train(
    data: Annotated[str, typer.Argument(metavar="DATA", help="hpo, pydoc, a folder or a file of pairs")],
    out: Annotated[Path, typer.Option(help="folder of the run")],
    preset: Annotated[str, typer.Option(help="small, docids (no vectors, no decoder) or paper")] = "small",
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
    from asi.distributed import is_main_process
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
        train_run(
            dataset, out, resolved, resume=resume, device=device, cache=cache,
            reporter=reporter, stopping=stopping,
        )  # fmt: skip
    if is_main_process():
        report_skipped(bad)
        typer.echo(f'trained and indexed: {out}; try: asi search {out} "a query"')


@app.command()
def index(
    run: RunPath,
    documents: Annotated[
        str, typer.Argument(metavar="DOCUMENTS", help="hpo, a folder, a file, or - for JSONL on stdin")
    ],
    skip_bad: SkipBad = False,
    wait: Wait = 0.0,
    device: Device = None,
) -> None:
    """Give documents docids and build the store anew."""
    from asi.datasets import open_dataset
    from asi.index import rebuild
    from asi.screen import ScreenReporter

    bad = bad_records(skip_bad)
    with ScreenReporter(lines=False) as reporter:
        count = rebuild(run, open_dataset(documents, bad), device=device, reporter=reporter, wait=wait)
    report_skipped(bad)
    typer.echo(f"indexed {count} documents in {run}")


@app.command()
def add(
    run: RunPath,
    documents: Annotated[str, typer.Argument(metavar="NEW.jsonl", help="a file of documents, or - for JSONL on stdin")],
    print_keys: Annotated[
        bool, typer.Option("--print-keys", help="print each key once its document is durable")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="documents that become visible together")] = 1024,
    skip_bad: SkipBad = False,
    wait: Wait = 0.0,
    device: Device = None,
) -> None:
    """Add documents, or replace those with a known key: searchable when the command returns."""
    from asi.datasets import read_documents
    from asi.index import Index
    from asi.screen import ScreenReporter

    durable = 0

    def acknowledge(added: Any) -> None:
        nonlocal durable
        if durable == batch:  # there are more than can be added in no time
            reporter.stage("adding", 0)
        durable += len(added)
        reporter.advance(durable)
        if print_keys:
            sys.stdout.write("".join(f"{document.key}\n" for document in added))
            sys.stdout.flush()

    bad = bad_records(skip_bad)
    with ScreenReporter(lines=False) as reporter, Index.load(run, device) as opened:
        try:
            count = opened.add(read_documents(documents, bad), added=acknowledge, batch=batch, wait=wait)
        except AsiError as error:
            before = f" ({durable} documents before it were added)" if durable else ""
            raise type(error)(f"{error}{before}") from error
        total = len(opened)
    report_skipped(bad)
    typer.echo(f"added {count} document{'s' * (count != 1)}; {run} has {total}", err=print_keys)


@app.command()
def delete(
    run: RunPath,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="keys of documents")],
    wait: Wait = 0.0,
) -> None:
    """Delete documents by key: all of them, or none if one is unknown."""
    from asi.checkpoint import RunFolder
    from asi.index import delete_documents

    wanted = list(dict.fromkeys(keys))
    delete_documents(RunFolder(run), wanted, wait=wait)
    typer.echo(f"deleted {len(wanted)} document{'s' * (len(wanted) != 1)} from {run}")


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
    settings: SearchSettings = None,
    as_json: AsJson = False,
    device: Device = None,
) -> None:
    """Answer a query, or queries typed at a prompt."""
    from asi.index import Index
    from asi.screen import print_hits

    wanted = search_settings(
        settings, mode=mode, ranking=ranking, beams=beams, candidates=candidates, bucket_cap=bucket_cap
    )
    with Index.load(run, device) as opened:
        searcher = opened.configured(**wanted)
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
    """Check the model files against their checksums, and the store against itself and the model."""
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
    minutes: Annotated[float, typer.Option(help="minutes of training, encoding included")] = 6.0,
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
