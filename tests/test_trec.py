import ir_measures
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir_measures import R, nDCG

from asi.errors import DataError
from asi.metrics import document_level
from asi.records import Hit, Qrel
from asi.trec import read_trec_run, write_trec_run

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)
ODD = st.sampled_from(
    ["two words", " ", "%", "%20", "50% of\u2028this", "\u00a0", "\u3000ü", "\ufeffbom", "#", '"', "\t\r\n"]
)


@given(run=st.dictionaries(ODD | TEXT, st.lists(ODD | TEXT, min_size=1, unique=True)), system=ODD)
def test_keys_come_back_as_they_were(tmp_path_factory, run, system):
    path = tmp_path_factory.getbasetemp() / "run.trec"
    write_trec_run(path, {query: [Hit(key, 0.1) for key in keys] for query, keys in run.items()}, system)
    lines = path.read_bytes().decode().split("\n")[:-1]
    assert [len(line.split()) for line in lines] == [6] * sum(map(len, run.values()))
    assert {query: [hit.key for hit in hits] for query, hits in read_trec_run(path).items()} == run


def test_file_layout(tmp_path):
    path = tmp_path / "run.trec"
    write_trec_run(path, {"q 1": [Hit("é", 2.5), Hit("a%b", 0.1)], "q2": [], "q3": [Hit("é", -3.0)]}, "asi")
    assert path.read_text(encoding="utf-8") == (
        "q%201 Q0 é 1 2.5 asi\n"
        "q%201 Q0 a%25b 2 0.1 asi\n"
        "q3 Q0 é 1 -3.0 asi\n"
    )  # fmt: skip
    assert read_trec_run(path) == {"q 1": [Hit("é", 2.5), Hit("a%b", pytest.approx(0.1))], "q3": [Hit("é", -3.0)]}


@given(
    keys=st.permutations("abcdefgh"),
    scores=st.lists(st.sampled_from([0.0, 1.0, 1.0 + 1e-9, -1.0, 1e-30, 1e30, float("nan")]), min_size=8, max_size=8),
)
def test_another_tool_comes_to_the_ranking_that_was_written(tmp_path_factory, keys, scores):
    path = tmp_path_factory.getbasetemp() / "ties.trec"
    run = {"q": [Hit(key, score) for key, score in zip(keys, scores, strict=True)]}
    write_trec_run(path, run, "asi")
    theirs = ir_measures.calc_aggregate(
        [R @ 1, nDCG @ 10], {"q": {"a": 1, "b": 3}}, ir_measures.read_trec_run(path.read_text())
    )
    ours = document_level(run, [Qrel("q", "a"), Qrel("q", "b", 3)])
    assert {str(measure): value for measure, value in theirs.items()} == {
        name: ours[name] for name in ("R@1", "nDCG@10")
    }


def test_foreign_runs_are_ranked_by_score(tmp_path):
    path = tmp_path / "run.trec"
    path.write_bytes(b"q 0 low 1 1 x\r\nq\t0\ttie 1 2.0 x\r\nq 0 high 1 3e0 x\r\nq 0 tied 1 2 x\r\n")
    assert [hit.key for hit in read_trec_run(path)["q"]] == ["high", "tie", "tied", "low"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"q Q0 two words 1 0.5 asi", "7 fields instead of 6"),
        (b"", "0 fields"),
        (b"q Q0 key 1 high asi", "could not convert string to float: 'high'"),
        (b"q Q0 key 1 nan asi", "the score is not a number"),
        (b"q Q0 k\xe9y 1 0.5 asi", "can't decode"),
        (b"q Q0 k%E9y 1 0.5 asi", "can't decode"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "run.trec"
    path.write_bytes(b"q Q0 key 1 0.5 asi\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"run\.trec, line 2: .*{complaint}.*; write `query Q0 key rank score system`"):
        read_trec_run(path)


def test_an_empty_key_is_refused(tmp_path):
    with pytest.raises(DataError, match="empty key"):
        write_trec_run(tmp_path / "run.trec", {"q": [Hit("", 1.0)]}, "asi")
