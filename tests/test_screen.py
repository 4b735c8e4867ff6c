from io import StringIO

from rich.console import Console

from asi.screen import ScreenReporter


def test_a_long_study_keeps_its_newest_bar_on_a_small_screen():
    screen = Console(file=StringIO(), force_terminal=True, width=80, height=6, highlight=False)
    with ScreenReporter(screen) as reporter:
        for run in range(30):
            reporter.stage(f"training {run}", 100)
            reporter.advance(50)
        [task] = reporter.bar.tasks
        assert (task.description, task.completed) == ("training 29", 50)
    assert "training 28 took 0 s" in screen.file.getvalue()


def test_elsewhere_lines_say_what_begins_and_ends():
    page = Console(file=StringIO(), width=80, highlight=False)
    with ScreenReporter(page) as reporter:
        reporter.stage("training", 100)
        reporter.stage("measuring", 0)
    assert page.file.getvalue().splitlines() == ["training: 100", "training took 0 s", "measuring"]
