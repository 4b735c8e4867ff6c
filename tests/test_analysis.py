"""The analyses on corpora that can be checked by hand, and the report and a study as a user runs them."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from asi.analysis import docids
from asi.analysis.expansion_study import ASI, ASI_WITH_MORE, BM25, BM25_WITH_MORE, expansion_findings
from asi.analysis.findings import health_text, length_findings, range_findings, trend, variant_findings
from asi.analysis.new_documents import EXISTING, NEW_CONTENT, NEW_SEMANTIC, kinds_of_documents
from asi.analysis.pages import Figure, Page, Section, Table
from asi.analysis.report import stranger_text
from asi.analysis.studies import STUDIES
from asi.config import VARIANTS
from asi.judges import EmbeddingJudge, TfidfJudge, find_judge, quality_score, sampled
from asi.metrics import Buckets, Report, docid_health, opened_buckets, opened_documents
from asi.records import Document, Qrel, Query

DOCIDS = np.array([[1, 2], [1, 2], [1, 3], [4, 2], [1, 2], [9, 9]])


class Map:
    """A docid map without a store."""

    def __init__(self, codes, texts):
        self.docids = np.asarray(codes)
        self.buckets = Buckets.of(self.docids)
        self.documents = [Document(f"d{i}", text) for i, text in enumerate(texts)]
        self.rows = {document.key: i for i, document in enumerate(self.documents)}
        self.health = docid_health(self.docids)

    def rows_of(self, keys):
        return [self.rows[key] for key in keys if key in self.rows]


TEXTS = ["red apple pie", "red apple cake", "blue stone", "apple tree", "green apple red", "iron nail"]


def test_documents_that_docids_open():
    buckets = Buckets.of(DOCIDS)
    opened = opened_buckets(buckets, [[(1, 2), (7, 7)], [], [(9, 9), (1, 3)]])
    pairs = {tuple(pair) for pair in opened_documents(buckets, opened).tolist()}
    assert pairs == {(0, 0), (0, 1), (0, 4), (2, 5), (2, 2)}


def test_quality_is_a_mean_over_pairs_and_over_queries():
    vectors = {"q": [1, 0], "r": [0, 1], "a": [1, 0], "b": [3, 4], "c": [0, 2]}
    judge = EmbeddingJudge("toy", lambda texts: np.array([vectors[text] for text in texts], dtype=np.float32), "toy")
    pairs = np.array([[0, 0], [0, 1], [0, 2], [1, 1]])  # cosines 1, .6, 0 and .8; query 2 found nothing
    quality = quality_score(judge, ["q", "r", "q"], ["a", "b", "c"], [pairs[:3], pairs[3:]])
    assert quality.micro == pytest.approx((1 + 0.6 + 0 + 0.8) / 4)
    means = [(1 + 0.6 + 0) / 3, 0.8, 0]
    assert quality.macro == pytest.approx(np.mean(means))
    assert quality.deviation == pytest.approx(np.std(means))
    assert quality_score(judge, ["q"], ["a"], [np.empty((0, 2), dtype=np.int64)])[1:] == (0, 0, 0)


def test_sampling_keeps_whole_queries_that_are_small_enough():
    pairs = np.array([[0, i] for i in range(50)] + [[1, 3], [1, 4]])
    kept = sampled(pairs, 10)
    assert np.bincount(kept[:, 0]).tolist() == [10, 2]
    assert len({tuple(pair) for pair in kept.tolist()}) == 12


def test_sampling_does_not_change_how_much_a_query_weighs():
    judge = EmbeddingJudge("toy", lambda texts: np.array([[len(text), 1] for text in texts], dtype=np.float32), "toy")
    judge.documents_per_query = 5
    pairs = np.array([[0, 0]] * 40 + [[1, 1]])  # all alike, so that the sample can't matter
    quality = quality_score(judge, ["", "aaaa"], ["", "aaaa"], [pairs])
    assert quality.micro == pytest.approx(1)
    other = quality_score(judge, ["aaaa", ""], ["", "aaaa"], [np.array([[0, 0]] * 40 + [[1, 0]])])
    cosine = 1 / np.sqrt(17)
    assert other.micro == pytest.approx((40 * cosine + 1) / 41, rel=1e-5)
    assert other.macro == pytest.approx((cosine + 1) / 2, rel=1e-5)


def test_judges_from_folders(encoder_folder, tmp_path):
    """An encoder's folder judges by cosine, a cross-encoder's by reading both texts; each under its own name."""
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    pairs = np.array([[0, 0], [0, 1]])
    by_cosine = find_judge(str(encoder_folder))
    assert by_cosine.name == f"{encoder_folder.name} cosine"
    same, other = by_cosine.scores(["red house"], ["red house", "yellow lamp in the north"], pairs)
    assert same == pytest.approx(1, abs=1e-5)
    assert other < same
    tokeniser = Tokenizer.from_file(str(encoder_folder / "tokenizer.json"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokeniser, pad_token="[PAD]", sep_token="[SEP]", cls_token="[CLS]")
    fast.save_pretrained(tmp_path / "cross")
    config = BertConfig(
        vocab_size=len(fast), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=1,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path / "cross")
    by_reading = find_judge(str(tmp_path / "cross"))
    assert by_reading.name == "cross, 20 documents a query at most"
    scores = by_reading.scores(["red house"], ["red house", "yellow lamp"], pairs)
    assert ((scores > 0) & (scores < 1)).all()


def test_tfidf_against_another_implementation():
    from sklearn.feature_extraction.text import TfidfVectorizer

    reference = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+")
    documents = [*TEXTS, "apple apple apple red"]
    d = reference.fit_transform(documents)
    q = reference.transform(["red apple apple", "nail unknown"])
    pairs = np.array([[i, j] for i in range(2) for j in range(len(documents))])
    expected = (q @ d.T).toarray()[pairs[:, 0], pairs[:, 1]]
    scores = TfidfJudge().scores(["red apple apple", "nail unknown"], documents, pairs)
    assert scores == pytest.approx(expected, abs=1e-6)


def test_density_counts_every_docid_and_document_once():
    rows = docids.density(Buckets.of(np.array([[0]] * 1 + [[1]] * 2 + [[2]] * 2 + [[3]] * 7)))
    assert [(name, count) for name, count, *_ in rows] == [("1", 1), ("2", 2), ("5 to 7", 1)]
    assert sum(row[2] for row in rows) == pytest.approx(1)
    assert [row[3] for row in rows] == pytest.approx([1 / 12, 4 / 12, 7 / 12])


def test_pairs_with_one_docid_are_two_documents_of_one_bucket():
    buckets = Buckets.of(np.random.default_rng(0).integers(0, 40, (300, 1)))
    pairs = docids.pairs_with_one_docid(buckets, np.random.default_rng(1))
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert (buckets.of_document[pairs[:, 0]] == buckets.of_document[pairs[:, 1]]).all()
    assert not len(docids.pairs_with_one_docid(Buckets.of(np.arange(5)[:, None]), np.random.default_rng(1)))


def test_similarity_sees_that_a_bucket_is_about_one_thing():
    draw = random.Random(0)
    texts = [
        f"{word} {draw.choice('abcdefgh')} {draw.choice('abcdefgh')}"
        for word in ("apple", "stone", "river")
        for _ in range(30)
    ]
    about = docids.similarity(TfidfJudge(), Map(np.repeat(np.arange(3), 30)[:, None], texts))
    assert about.same[0] > about.random[0]
    assert about.p_value < 1e-6
    mixed = docids.similarity(TfidfJudge(), Map(np.tile(np.arange(3), 30)[:, None], texts))
    assert mixed.p_value > 1e-3

    class Sure(TfidfJudge):
        def scores(self, queries, documents, pairs):
            alike = np.array([queries[first][0] == documents[second][0] for first, second in pairs.tolist()])
            return (alike + np.random.default_rng(0).normal(0, 0.2, len(pairs))).astype(np.float32)

    sure = docids.similarity(Sure(), Map(np.repeat(np.arange(3), 30)[:, None], texts))
    assert 0 < sure.p_value < 1e-50  # too small for the type that judges score in


def test_cases():
    docid_map = Map(DOCIDS, TEXTS)
    common = docids.CommonWords(docid_map.documents)
    [case] = docids.bucket_cases(docid_map, common, count=1)
    assert case.docid == (1, 2)
    assert case.size == 3
    assert "red" in case.common
    [group] = docids.neighbour_cases(docid_map, common, count=1)
    no_words = docids.CommonWords([Document(f"d{i}", str(i)) for i in range(len(TEXTS))])
    assert docids.neighbour_cases(docid_map, no_words, count=1)[0][0].docid == (1, 2)
    assert docids.neighbour_cases(Map(DOCIDS[:, :1], TEXTS), common) == []  # all others are neighbours then
    assert group[0].docid == (1, 2)
    assert {other.docid for other in group[1:]} == {(1, 3), (4, 2)}
    first = docids.first_codes(docid_map, common)[0]
    assert (first.code, first.docids, first.documents) == (1, 2, 4)
    [_, few] = docids.first_codes(Map([[1], [1], [2], [2], [2], [2]], TEXTS), common)
    assert (few.code, few.common) == (1, ["red 100%"])  # and apple is everywhere


def test_a_judge_that_took_part_in_training_is_named(tmp_path):
    def judge(source):
        return EmbeddingJudge("toy", lambda texts: np.ones((len(texts), 1), np.float32), source)

    assert stranger_text(judge(f"{tmp_path}/./encoder/"), str(tmp_path / "encoder"))
    assert not stranger_text(judge("wordllama"), str(tmp_path / "encoder"))


class Judged:
    def judged(self, split):
        return [Query("q", "text")], [Qrel("q", "d0"), Qrel("q", "d3")]


def test_new_documents_are_told_apart_by_their_docids():
    kinds = kinds_of_documents(Judged(), Map(DOCIDS, TEXTS))
    assert kinds == {
        "d0": EXISTING, "d3": EXISTING, "d1": NEW_CONTENT, "d4": NEW_CONTENT, "d2": NEW_SEMANTIC, "d5": NEW_SEMANTIC,
    }  # fmt: skip


def test_a_page_says_the_same_three_ways(tmp_path):
    table = Table("Things <b>", ("name", "count", "share"), [["a|b & <c>", 1234, 0.5], ["d", None, 2e-9]])
    page = Page("Title", ["about `code`"], [Section("One", ["text"], [table], [Figure("picture", "p", "<svg/>")])])
    file = page.write(tmp_path)
    html = file.read_text()
    assert "a|b &amp; &lt;c&gt;" in html
    assert "<code>code</code>" in html
    assert "http" not in html.replace("http://www.w3.org", "")
    assert "| a\\|b & <c> | 1,234 | 0.500 |" in (tmp_path / "report.md").read_text()
    [[first, second]] = json.loads((tmp_path / "report.json").read_text())["tables"].values()
    assert first == {"name": "a|b & <c>", "count": 1234, "share": 0.5}
    assert second["count"] is None
    assert (tmp_path / "figures" / "p.svg").exists()


def variant_report(r1, r10, acc, d_per_id, queries=10_000):
    docid, expected = {"R@1": r1, "R@10": r10}, {"R@10": r10 / d_per_id}
    quality = {"micro": d_per_id / 100, "deviation": 0.1}
    report = Report(
        docid=docid, expectation=expected, heads=acc, d_per_id=d_per_id, docids=round(10_000 / d_per_id),
        quality=quality, queries=queries,
    )  # fmt: skip
    return {way: {"test": report} for way in ("beam", "constrained")}


def test_findings_follow_the_figures():
    results = {
        "unique": variant_report(0.4, 0.7, 0.3, 1.2),
        "share": variant_report(0.4, 0.7, 0.3, 1.2),
        "no-contrastive": variant_report(1, 1, 1, 900),
        "no-reverse": variant_report(0.5, 0.8, 0.4, 1.5),
        "no-reparameterization": variant_report(0.3, 0.6, 0.35, 1.1),
        "random-docids": variant_report(0.1, 0.2, 0, 1.0),
    }
    assert all("holds here" in line for line in variant_findings(results))
    turned = results | {"no-contrastive": results["unique"], "no-reverse": results["random-docids"]}
    turned |= {"no-reparameterization": results["unique"], "random-docids": variant_report(0.9, 0.9, 0, 1.0)}
    turned |= {"share": variant_report(0.2, 0.7, 0.3, 1.2)}
    assert all("does not hold here" in line for line in variant_findings(turned))
    close = results | {"no-reverse": variant_report(0.4, 0.705, 0.3, 1.5)}
    assert "too close to tell here (R@10 0.705 against 0.700" in variant_findings(close)[1]
    few = results | {"no-reverse": variant_report(0.5, 0.72, 0.4, 1.5, queries=400)}
    many = results | {"no-reverse": variant_report(0.5, 0.72, 0.4, 1.5, queries=10_000)}
    few["unique"] = variant_report(0.4, 0.7, 0.3, 1.2, queries=400)
    assert "too close to tell here" in variant_findings(few)[1]
    assert "holds here" in variant_findings(many)[1]
    coarse = results | {"unique": variant_report(0.4, 0.7, 0.3, 10)}  # easy to find, because so many share a docid
    assert (
        "does not hold here (R@10 0.700 against 0.200, of one document for each docid 0.070"
        in (variant_findings(coarse)[5])
    )
    barely = results | {"no-reverse": variant_report(0.5, 0.8, 0.4, 1.25)}  # other seeds give as much
    assert "too close to tell here (D/ID 1.25 against 1.20)" in variant_findings(barely)[2]
    one_bucket = results | {"no-contrastive": variant_report(1, 1, 1, 10_000)}
    one_bucket["unique"] = variant_report(0.4, 0.7, 0.3, 1500)  # ten times as large is more than the corpus
    assert "holds here (D/ID 10000.0 against 1500.00)" in variant_findings(one_bucket)[0]
    whole = {way: {"test": replace(by["test"], collapsed="one docid")} for way, by in results["unique"].items()}
    assert len(variant_findings(results | {"unique": whole})) == 1  # nothing can be said
    assert [trend(values) for values in ([1, 2, 3], [3, 2, 1], [1, 3, 2], [3, 1, 2], [1, 1])] == [
        "rises", "falls", "rises overall", "falls overall", "stays",
    ]  # fmt: skip
    by_length = {str(m): variant_report(0.5, 1 - m / 10, 0.4, 9 / m) for m in (2, 3, 4)}
    assert ["holds here" in line for line in length_findings(by_length)] == [True, False, True]
    better = {m: variant_report(0.5, 0.7, 0.4, float(m)) for m in ("2", "3", "4")}  # and coarser, by the toy's figures
    assert "Mi-QS rises as docids grow: holds here (it rises: 0.02, 0.03, 0.04)." in length_findings(better)
    unsure = {m: variant_report(0.5, 0.7, 0.4, float(m), queries=100) for m in ("2", "3", "4")}
    assert "Mi-QS rises as docids grow: too close to tell here (it rises: 0.02, 0.03, 0.04)." in length_findings(unsure)
    few_queries = {str(m): variant_report(0.5, 0.7, 0.4, 9 / m, queries=9) for m in (2, 3, 4)}
    assert "holds here" in length_findings(few_queries)[2]  # D/ID is of the corpus, however few queries there are
    steady = {str(V): variant_report(0.5, 0.7 + V / 10_000, 0.4, 2.0) for V in (32, 512)}
    assert "holds here (from 0.703 to 0.751)" in range_findings(steady)[3]
    assert range_findings(steady)[0].startswith("R@10 falls as codes per position grow in number: ")
    moved = {str(V): variant_report(0.5, 0.7 - V / 1000, 0.4, 2.0) for V in (32, 512)}
    assert "does not hold here (from 0.188 to 0.668)" in range_findings(moved)[3]


def test_docids_of_which_little_can_be_said_are_named():
    def run(d_per_id, largest, perplexity, collapsed=None):
        made = variant_report(0.5, 0.7, 0.4, d_per_id)["beam"]["test"]
        return {"beam": {"test": replace(made, largest_bucket=largest, perplexity=perplexity, collapsed=collapsed)}}

    results = {
        "good": run(1.5, 100, [200.0, 90.0]),
        "coarse": run(6.5, 100, [200.0, 90.0]),
        "one large": run(1.5, 101, [200.0, 90.0]),
        "uneven": run(1.5, 100, [200.0, 80.0]),
        "gone": run(900, 9000, [1.0, 1.0], "nearly all share one"),
    }
    gone, weak = health_text(results, dict.fromkeys(results, 256))
    assert gone.endswith(": gone.")
    assert ": coarse, one large, uneven. " in weak
    assert health_text({"good": results["good"]}, {"good": 256}) == []
    assert health_text({"good": results["good"]}, {"good": 512}) != []


def test_expansion_is_judged_where_sharing_a_docid_is_no_help_too():
    def found(docid, expected):
        return {
            "test": Report(
                docid={"R@10": docid}, expectation={"R@10": expected}, document={"R@10": 0.5}, queries=10_000
            )
        }

    def first(*with_more):
        reports = {
            ASI: found(0.5, 0.3),
            ASI_WITH_MORE: found(*with_more),
            BM25: found(0, 0),
            BM25_WITH_MORE: found(0, 0),
        }
        return expansion_findings(reports, ["test"])[0]

    assert "holds here (0.600 against 0.500; 0.350 against 0.300)" in first(0.6, 0.35)
    assert "too close to tell" in first(0.6, 0.3)  # coarser docids alone would give that
    assert "does not hold" in first(0.6, 0.2)


def asi(*arguments, cwd):
    command = [sys.executable, "-m", "asi", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_report_of_a_run(run_folder, beir, tmp_path):
    done = asi("report", run_folder, beir, "--out", "page", "--judge", "tfidf", "--baselines", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = json.loads((tmp_path / "page" / "report.json").read_text())
    assert page["judge"] == "TF-IDF cosine"
    new, *others = (rows for title, rows in page["tables"].items() if title.startswith("New documents"))
    assert len(others) == 7  # of docids and of documents, also of the plain beam and the two baselines
    assert all([row["queries"] for row in rows] == [row["queries"] for row in new] for rows in others)
    counts = {row["group"]: row["queries"] for row in new}
    assert counts["all"] == counts["Existing"] + counts["NewContent"] + counts["NewSemantic"]
    assert counts["Existing"] == 42
    assert {"asi", "asi-beam", "bm25", "encoder"} <= page["measures"].keys()
    bm25 = page["measures"]["bm25"]["test"]
    assert 0 < bm25["d_per_q"] <= 10  # the documents that it finds, of which the judge scores each
    assert bm25["quality"]["judge"] == "TF-IDF cosine"
    assert page["measures"]["asi"]["test"]["quality"]["micro"] > 0
    [generated] = (rows for title, rows in page["tables"].items() if title.startswith("Measures: Docid level"))
    assert len({row["search"] for row in generated if row["R@1"] is not None}) == 4  # every way finds docids of its own
    unknown = asi("report", run_folder, beir, "--judge", "no/such-judge", cwd=tmp_path)
    assert unknown.returncode == 1
    assert len(unknown.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_study_is_resumed_and_refuses_other_settings(beir, encoder_folder, tmp_path):
    settings = [
        f"model.encoder={encoder_folder}",
        "model.max_length=16",
        "model.adapter=16",
        "model.V=8",
        "train.batch=32",
    ]
    sets = [word for setting in settings for word in ("--set", setting)]
    shutil.copytree(beir, tmp_path / "data")
    command = ("study", "length", "data", "--out", "s", "--judge", "tfidf", *sets)
    minutes = asi(*command, "--set", "train.minutes=1", cwd=tmp_path)
    assert minutes.stderr.splitlines() == ["Error: the runs of a study have --steps, not --set train.minutes=1"]
    first = asi(*command, "--steps", 4, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "Docid length: 3, 4 runs to go, about" in first.stderr
    page = json.loads((tmp_path / "s" / "length" / "report.json").read_text())
    [rows] = [rows for title, rows in page["tables"].items() if "test: plain beam" in title]
    assert [row["length"] for row in rows] == list(STUDIES["length"].runs)
    assert page["judge"] == "TF-IDF cosine"
    settings = {run: config["model"] for run, config in page["settings"].items()}
    assert [model["m"] for model in settings.values()] == [2, 3, 4, 5, 6]
    assert {model["V"] for model in settings.values()} == {8}  # the user's, not the study's 256
    assert "Docids of 2 to 6 codes out of 8;" in page["texts"]["Docid length"][0]
    assert (
        json.loads((tmp_path / "s" / "runs" / "docid-length-4" / "run.json").read_text())["config"]["model"]["V"] == 8
    )
    assert any("R@10 falls as docids grow: " in line for line in page["texts"]["Docid length"])
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "runs").glob("*/study.json")}
    assert len(kept) == 5
    (tmp_path / "s" / "runs" / "docid-length-4" / "study.json").unlink()
    resumed = asi(*command, "--steps", 4, cwd=tmp_path)
    assert resumed.returncode == 0
    assert resumed.stderr.count("measured already") == 4
    assert "Docid length: 4, 1 run to go" in resumed.stderr
    again = {path: path.stat().st_mtime_ns for path in kept}
    assert [path.parent.name for path in kept if again[path] != kept[path]] == ["docid-length-4"]
    models = {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "runs").glob("*/model/manifest.json")}
    searched = asi(*command, "--steps", 4, "--set", "search.beams=2", cwd=tmp_path)  # measured again, not trained again
    assert searched.returncode == 0, searched.stderr
    assert {path: path.stat().st_mtime_ns for path in models} == models
    page = json.loads((tmp_path / "s" / "length" / "report.json").read_text())
    [fewer] = [rows for title, rows in page["tables"].items() if "test: plain beam" in title]
    assert all(row["D/Q"] < before["D/Q"] for row, before in zip(fewer, rows, strict=True))
    other = asi(*command, "--steps", 5, cwd=tmp_path)
    assert other.returncode == 1
    assert "other settings" in other.stderr
    corpus = tmp_path / "data" / "corpus.jsonl"
    corpus.write_text(corpus.read_text().replace('"text": "', '"text": "New '))
    changed = asi(*command, "--steps", 4, cwd=tmp_path)  # a finished run is not measured as if it knew the new texts
    assert changed.returncode == 1
    assert "the texts of 'data' have changed" in changed.stderr


@pytest.mark.slow
def test_all_studies_make_one_page(beir, encoder_folder, tmp_path):
    settings = [f"model.encoder={encoder_folder}", "model.max_length=16", "model.adapter=16", "model.decoder_width=16"]
    sets = [word for setting in settings for word in ("--set", setting)]
    command = ("study", "all", beir, "--out", "s", "--judge", "tfidf", "--steps", 3, *sets)
    done = asi(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = json.loads((tmp_path / "s" / "report.json").read_text())
    for title in (
        "Measures",
        "New documents",
        "Docid density",
        "Variants",
        "Docid length",
        "Docid range",
        "Query expansion",
    ):
        assert any(name.startswith(title) for name in page["tables"]), title
    variants = page["tables"]["Variants: test: plain beam, as in the paper; judge: TF-IDF cosine"]
    assert [row["variant"] for row in variants] == list(VARIANTS)
    assert all(0 <= row["R@1"] <= row["R@5"] <= row["R@10"] <= 1 for row in variants)
    verdicts = [line for line in page["texts"]["Variants"] if "here (" in line]
    collapsed = any("have collapsed" in line for line in page["texts"]["Variants"])
    assert len(verdicts) == (0 if collapsed else 6)  # one for each finding
    assert len(list((tmp_path / "s" / "runs").iterdir())) == 17  # 4 codes of 256 are trained once for two studies
    expansion = page["tables"]["Query expansion: test; judge: TF-IDF cosine"]
    assert [row["system"] for row in expansion][:2] == ["ASI", "ASI with pseudo queries"]
    found = [line for line in page["texts"]["Query expansion"] if line.startswith("test, with pseudo queries")]
    assert f"({expansion[1]['R@10']:.3f} against {expansion[0]['R@10']:.3f}; " in found[0]
    assert f"; {expansion[1]['expected R@10']:.3f} against {expansion[0]['expected R@10']:.3f})" in found[0]
    assert f"({expansion[3]['document R@10']:.3f} against {expansion[2]['document R@10']:.3f})" in found[2]
    again = asi(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("measured already") == 18
