"""Whole commands, run as a user runs them."""

import json
import shutil
import subprocess
import sys
import time

import pytest

from asi.trec import read_trec_run

ASI = [sys.executable, "-m", "asi"]


def asi(*arguments, stdin=None, check=True):
    done = subprocess.run([*ASI, *map(str, arguments)], capture_output=True, text=True, input=stdin, timeout=120)
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def run(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


def test_help_is_quick_and_loads_no_torch():
    start = time.perf_counter()
    text = asi("--help").stdout
    assert time.perf_counter() - start < 2  # half a second on an idle machine
    for command in ("train", "index", "add", "delete", "search", "evaluate", "show", "doctor", "demo"):
        assert command in text
    script = "import sys, asi.cli; print(any(name in sys.modules for name in ('torch', 'numpy', 'rich')))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


def test_search_add_delete_show_doctor(run, tmp_path):
    found = json.loads(asi("search", run, "red house", "-k", 3, "--json").stdout)
    assert found["query"] == "red house"
    assert found["hits"][0]["key"] == "red/house"
    assert "red/house" in asi("search", run, "red house").stdout
    new = tmp_path / "new.jsonl"
    new.write_text(json.dumps({"_id": "ключ 1", "title": "green lamp", "text": "a lamp that is green"}) + "\n")
    assert asi("add", run, new, "--print-keys").stdout == "ключ 1\n"
    keys = [hit["key"] for hit in json.loads(asi("search", run, "green lamp", "--json").stdout)["hits"]]
    assert "ключ 1" in keys
    shown = json.loads(asi("show", run, "key", "ключ 1", "--json").stdout)
    bucket = json.loads(asi("show", run, "docid", ",".join(map(str, shown["docid"])), "--json").stdout)
    assert "ключ 1" in [document["key"] for document in bucket["documents"]]
    assert "docids in use" in asi("show", run, "stats").stdout
    asi("delete", run, "ключ 1")
    assert "no document has the key" in asi("show", run, "key", "ключ 1", check=False).stderr
    assert asi("doctor", run).stdout == "model: ok\nstore: ok\n"


def test_interactive_search_reads_queries_line_by_line(run):
    lines = asi("search", run, "--json", "-k", 1, stdin="red house\n\nblue river\n").stdout.splitlines()
    assert [json.loads(line)["hits"][0]["key"] for line in lines] == ["red/house", "blue/river"]


def test_evaluate_prints_a_table_json_and_a_run_file(run, beir, tmp_path):
    table = asi("evaluate", run, beir, "--split", "test").stdout
    assert "R@100" not in table
    deep = asi("evaluate", run, beir, "--split", "test", "--depth", "100").stdout
    assert "R@100" in deep
    assert table.splitlines()[0].startswith("system")
    out = asi("evaluate", run, beir, "--split", "test", "--split", "test_unseen", "--baselines", "--json",
              "--run-file", tmp_path / "out.trec").stdout  # fmt: skip
    report = json.loads(out)
    assert set(report) == {"asi", "bm25", "encoder"}
    assert set(report["asi"]) == {"test", "test_unseen"}
    block = report["asi"]["test"]
    assert {
        "docid",
        "expectation",
        "document",
        "acc",
        "d_per_id",
        "d_per_q",
        "invalid",
        "queries",
        "ms_per_query",
    } <= set(block)
    assert block["document"]["R@10"] > 0.8
    assert block["invalid"] == {"all": 0, "first": 0}
    assert set(report["bm25"]["test"]) == {"document", "queries", "ms_per_query"}
    assert len(read_trec_run(tmp_path / "out.trec")) == block["queries"] + report["asi"]["test_unseen"]["queries"]


def test_search_settings_of_one_command(run, beir):
    answers = [asi("search", run, "red house", "--json", *given).stdout for given in (
        ["--ranking", "docid"], ["--set", "search.ranking=docid"],
        ["--set", "search.ranking=sum", "--ranking", "docid"], [],
    )]  # fmt: skip
    assert answers[0] == answers[1] == answers[2] != answers[3]
    reports = [
        json.loads(asi("evaluate", run, beir, "--json", "--set", f"search.candidates={n}").stdout) for n in (12, 40)
    ]
    few, many = (report["asi"]["test"]["ranked"]["most"] for report in reports)
    assert few <= 12 < many <= 40


def test_index_builds_the_store_anew(run, tmp_path):
    documents = tmp_path / "docs.tsv"
    documents.write_text("key\ttitle\ttext\n1\tred house\ta house\n2\tblue bird\ta bird\n")
    assert "indexed 2 documents" in asi("index", run, documents).stdout
    hits = json.loads(asi("search", run, "blue bird", "--json").stdout)["hits"]
    assert {hit["key"] for hit in hits} == {"1", "2"}


def test_doctor_finds_damage(run):
    weights = run / "model" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    done = asi("doctor", run, check=False)
    assert done.returncode == 1
    assert "weights.safetensors does not have its checksum" in done.stdout


def test_train_from_a_pairs_file_with_settings(tmp_path, encoder_folder):
    pairs = tmp_path / "pairs.csv"
    rows = [f'"find {c} {t}","{c} {t} thing"' for c in ("red", "green", "blue") for t in ("house", "tree", "bird")]
    pairs.write_text("query,document\n" + "\n".join(rows) + "\n")
    overrides = [f"model.encoder={encoder_folder}", "model.max_length=16", "model.decoder_width=32", "train.batch=8"]
    sets = [part for override in overrides for part in ("--set", override)]
    done = asi("train", pairs, "--out", tmp_path / "run", "--steps", 5, *sets)
    assert "[model]" in done.stderr
    assert "trained and indexed" in done.stdout
    assert asi("search", tmp_path / "run", "red house").returncode == 0
    again = asi("train", pairs, "--out", tmp_path / "run", "--steps", 5, *sets, check=False)
    assert "holds a run already; continue it with --resume" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "{run}/none", "x"], "Error: there is no folder"),
        (["search", "{empty}", "x"], "Error: {empty} holds no trained model; run: asi train"),
        (["search", "{run}", "x", "--mode", "fast"], "Error: search.mode must be one of beam, constrained, one-pass"),
        (["search", "{run}", "x", "-k", "0"], "Error: k must be at least 1"),
        (
            ["search", "{run}", "x", "--set", "model.m=3"],
            "Error: --set takes settings of search here; [model] is fixed",
        ),
        (["search", "{run}", "x", "--set", "search.share=1"], "Error: [search] has no setting share; its settings are"),
        (["evaluate", "{run}", "{beir}", "--set", "search.beams=few"], "Error: search.beams must be int, got 'few'"),
        (["add", "{run}", "{bad}"], "{bad}:2: "),
        (["delete", "{run}", "red/house", "nobody"], "nobody"),
        (["show", "{run}", "docid", "1,x"], "Error: a docid is integers with commas"),
        (["show", "{run}", "docid", "1"], "Error: docids of this run have 3 codes"),
        (["evaluate", "{run}", "{beir}", "--split", "nope"], "test_unseen"),
        (["evaluate", "{run}", "pydoc"], "Error: the index has none of the documents that these queries ask for"),
        (["evaluate", "{run}", "{beir}", "--run-file", "{empty}/none/x.trec"], "Error: there is no folder"),
        (["train", "nowhere", "--out", "{empty}/x"], "hpo"),
        (["train", "hpo", "--out", "{empty}/x", "--set", "train.lr"], "Error: --set takes section.name=value"),
        (
            ["train", "hpo", "--out", "{empty}/x", "--variant", "none"],
            "Error: unknown variant 'none'; variants are unique",
        ),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message, run, beir, tmp_path):
    bad, empty = tmp_path / "bad.jsonl", tmp_path / "empty"
    bad.write_text('{"_id": "ok", "text": "red house"}\n{"_id": "broken\n')
    empty.mkdir()
    fill = {"run": run, "bad": bad, "empty": empty, "beir": beir}
    done = asi(*(argument.format(**fill) for argument in arguments), check=False)
    assert done.returncode == 1, done.stdout
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert message.format(**fill) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_record_loses_nothing_that_was_there(run, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"_id": "ok", "text": "red house"}\n{"_id": ""}\n')
    assert asi("add", run, bad, check=False).returncode == 1
    assert asi("doctor", run).returncode == 0
    done = asi("add", run, bad, "--skip-bad")
    assert "added 1 document;" in done.stdout
    assert "skipped bad records: 1" in done.stderr


def test_the_papers_preset_trains_and_answers(beir, encoder_folder, tmp_path):
    """The preset on a toy encoder: its objective, batches in chunks, trained layers, plain beam."""
    overrides = [f"model.encoder={encoder_folder}", "model.max_length=16", "model.decoder_width=24", "train.batch=32"]
    overrides += ["train.chunk=8", "train.generation_batch=32"]
    settings = [word for setting in overrides for word in ("--set", setting)]
    trained = asi("train", beir, "--preset", "paper", "--out", tmp_path / "run", "--steps", 4, *settings)
    assert trained.returncode == 0, trained.stderr
    found = asi("search", tmp_path / "run", "red house", "--json")
    assert found.returncode == 0, found.stderr
    measured = asi("evaluate", tmp_path / "run", beir, "--mode", "constrained", "--ranking", "vector")
    assert measured.returncode == 0, measured.stderr


def test_the_demo_deletes_no_run_of_its_users(run_folder):
    refused = asi("demo", "--out", run_folder, check=False)
    assert refused.returncode == 1
    assert "not a demo" in refused.stderr
    assert (run_folder / "model").exists()
