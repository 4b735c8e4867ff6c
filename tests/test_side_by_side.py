import os
import time
from functools import partial

import pytest
import torch

from asi.analysis.side_by_side import Task, side_by_side
from asi.errors import AsiError, Interrupted
from asi.run import Silence

WAITS = 30.0  # seconds: for processes that should meet, or be told to stop


class Diary(Silence):
    """A reporter that remembers what it was told."""

    def __init__(self):
        self.told = []

    def message(self, text):
        self.told.append(text)


def meets(own, other, reporter, stopping):
    """Ends when the other one is at work too."""
    own.touch()
    until = time.monotonic() + WAITS
    while not other.exists():
        assert time.monotonic() < until, "alone"
        time.sleep(0.01)
    reporter.message(f"threads {torch.get_num_threads()}, {os.environ['OMP_NUM_THREADS']}")


def reads(file, reporter, stopping):
    reporter.message(file.read_text())


def writes(file, text, reporter, stopping):
    time.sleep(0.5)
    file.write_text(text)


def fails(kind, reporter, stopping):
    raise kind("no such thing")


def dies(reporter, stopping):
    os._exit(7)


def waits_until_stopped(begun, reporter, stopping):
    begun.touch()
    while not stopping():
        time.sleep(0.01)
    raise Interrupted("saved")


def run(*tasks, jobs=2, stopping=lambda: False):
    diary, begun = Diary(), []
    ended = dict(side_by_side([Task(*task) for task in tasks], jobs, diary, stopping, lambda task: begun.append(task)))
    return ended, diary.told, [task.name for task in begun]


def test_two_at_a_time_share_the_cores(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    ended, told, _ = run(("a", partial(meets, one, two), ()), ("b", partial(meets, two, one), ()))
    assert ended == {"a": None, "b": None}
    own = max(1, torch.get_num_threads() // 2)
    assert told == [f"threads {own}, {own}"] * 2


def test_what_builds_on_another_waits_for_it_and_others_do_not(tmp_path):
    file, other = tmp_path / "file", tmp_path / "other"
    ended, told, begun = run(
        ("first", partial(writes, file, "made"), ()),
        ("needs it", partial(reads, file), ("first", "never asked for")),
        ("free", partial(writes, other, ""), ()),
    )
    assert list(ended.values()) == [None] * 3
    assert told == ["made"]
    assert begun == ["first", "free", "needs it"]


def test_a_failure_is_told_and_costs_no_other(tmp_path):
    file = tmp_path / "file"
    ended, _, _ = run(
        ("ours", partial(fails, AsiError), ()),
        ("unforeseen", partial(fails, ValueError), ()),
        ("killed", dies, ()),
        ("good", partial(writes, file, "made"), ("killed",)),
    )
    assert ended["ours"] == "no such thing"
    assert ended["unforeseen"] == "ValueError: no such thing"
    assert "died with exit code 7" in ended["killed"]
    assert ended["good"] is None
    assert file.read_text() == "made"


@pytest.mark.parametrize("waiting", [0, 1])
def test_told_to_stop_all_save_and_nothing_new_begins(tmp_path, waiting):
    begun = [tmp_path / "a", tmp_path / "b", *[tmp_path / "c"] * waiting]
    tasks = [(file.name, partial(waits_until_stopped, file), ()) for file in begun]
    with pytest.raises(Interrupted, match="saved"):
        run(*tasks, stopping=lambda: begun[0].exists() and begun[1].exists())
    assert not (tmp_path / "c").exists()
