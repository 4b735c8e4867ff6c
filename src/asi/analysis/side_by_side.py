"""Several pieces of work at a time, each in a process of its own with its share of the processor's cores."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import torch

from asi.errors import Interrupted, one_line
from asi.run import Reporter
from asi.training import StepReport

# A process reads them when its libraries are loaded: those of torch and faiss, of numpy, of the tokeniser.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
POLL = 0.2  # seconds until it is noticed that all is to stop


class Task(NamedTuple):
    name: str
    work: Callable[[Reporter, Callable[[], bool]], None]  # can be pickled; raises Interrupted if it is told to stop
    after: Sequence[str]  # tasks that must have ended before, if they are to be done at all


class Ended(NamedTuple):
    """The last thing that a process says."""

    error: str | None = None
    interrupted: bool = False


class Sender:
    """A reporter whose listener is in another process."""

    def __init__(self, listener: Connection) -> None:
        self.listener = listener

    def stage(self, name: str, total: int) -> None:
        self.listener.send(("stage", (name, total)))

    def advance(self, done: int) -> None:
        self.listener.send(("advance", (done,)))

    def step(self, report: StepReport) -> None:
        self.listener.send(("step", (report,)))

    def message(self, text: str) -> None:
        self.listener.send(("message", (text,)))

    def warning(self, text: str) -> None:
        self.listener.send(("warning", (text,)))

    def lane(self, label: str) -> AbstractContextManager[Reporter]:
        return nullcontext(self)


@dataclass(frozen=True)
class Running:
    task: Task
    process: SpawnProcess
    heard: Connection
    reporter: Reporter
    closing: ExitStack

    def listen(self) -> Ended | None:
        """Pass on what the process says; its end, if that has come."""
        try:
            said: Ended | tuple[str, tuple[Any, ...]] = self.heard.recv()
        except EOFError:
            self.process.join()
            return Ended(f"its process died with exit code {self.process.exitcode} (killed, or out of memory)")
        if isinstance(said, Ended):
            return said
        method, arguments = said
        getattr(self.reporter, method)(*arguments)
        return None


def side_by_side(
    tasks: Sequence[Task],
    jobs: int,
    reporter: Reporter,
    stopping: Callable[[], bool],
    starting: Callable[[Task], None],
) -> Iterator[tuple[str, str | None]]:
    """Do the tasks, at most `jobs` at a time; as each ends, its name and what went wrong with it.

    Raises Interrupted when all that run have stopped, if `stopping` says so.
    """
    context = get_context("spawn")
    stop = context.Event()
    waiting, running = list(tasks), list[Running]()
    last_words: str | None = None
    try:
        while waiting or running:
            if stopping():
                stop.set()
            while not stop.is_set() and len(running) < jobs and (task := next_of(waiting, running)) is not None:
                waiting.remove(task)
                starting(task)
                running.append(start(context, task, threads_of(jobs), stop, reporter))
            if stop.is_set() and not running:
                raise Interrupted(last_words or "nothing had begun")
            ready = wait([one.heard for one in running], POLL)
            for one in [one for one in running if one.heard in ready]:
                if (ended := one.listen()) is None:
                    continue
                running.remove(one)
                one.process.join()
                one.closing.close()
                if ended.interrupted:
                    stop.set()
                    last_words = ended.error
                else:
                    yield one.task.name, ended.error
        if last_words is not None:  # the last ones were stopped, with nothing waiting behind them
            raise Interrupted(last_words)
    finally:  # what still runs if the caller has left
        for one in running:
            one.process.kill()
            one.closing.close()


def next_of(waiting: Sequence[Task], running: Sequence[Running]) -> Task | None:
    """The first task that waits for no other."""
    unfinished = {task.name for task in waiting} | {one.task.name for one in running}
    return next((task for task in waiting if unfinished.isdisjoint(task.after)), None)


def threads_of(jobs: int) -> int:
    return max(1, torch.get_num_threads() // jobs)


def start(context: Any, task: Task, threads: int, stop: Event, reporter: Reporter) -> Running:
    heard, said = context.Pipe(duplex=False)
    process = context.Process(target=work_alone, args=(task, threads, said, stop), name=task.name, daemon=True)
    with with_threads(threads):
        process.start()
    said.close()  # so that the end of the process is the end of what is heard
    closing = ExitStack()
    closing.callback(heard.close)
    return Running(task, process, heard, closing.enter_context(reporter.lane(task.name)), closing)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Processes that are started meanwhile have so many threads."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, str(count)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def work_alone(task: Task, threads: int, said: Connection, stop: Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches all processes: the first one decides
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        task.work(Sender(said), stop.is_set)
        said.send(Ended())
    except BrokenPipeError:  # nobody listens any more
        pass
    except Interrupted as error:
        said.send(Ended(str(error), interrupted=True))
    except Exception as error:  # one task's failure must not cost the others
        said.send(Ended(one_line(error)))
