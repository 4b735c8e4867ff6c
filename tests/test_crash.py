import shutil

from crash_test import crash


def test_killed_adds_lose_nothing(run_folder, tmp_path):
    """The short form of `make crash-test`."""
    assert crash(shutil.copytree(run_folder, tmp_path / "run"), kills=4) >= 4
