"""How many steps fit into the minutes of a run: some from all over its schedule are timed before it begins."""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asi.config import TrainConfig
from asi.training import Trainer

DEFAULT_MINUTES = 10.0  # the length of a run for which none is given
LEAST_SHARE = 1 / 3  # of a run's minutes that its steps have, however long what comes before them took
# Steps of the run whose speed is measured, and of a part of it: what happens once, at the beginning of a twentieth,
# does not count as an ordinary step.
REHEARSED_RUN, REHEARSED_PART = 1020, 51
REHEARSALS = 8  # of each kind of step in each part, if all of them take no more than
REHEARSED_SHARE = 0.03  # of the minutes


def planned_steps(
    trainer: Trainer, config: TrainConfig, started: float | None, warn: Callable[[str], None] = lambda text: None
) -> int:
    """The length of the run in steps; minutes count from `started`, a time.monotonic(), or are for the steps alone."""
    if config.steps is not None:
        return config.steps
    if config.epochs is not None:
        return max(1, round(config.epochs * trainer.objective.pairs.steps_per_epoch))
    budget = (config.minutes or DEFAULT_MINUTES) * 60
    with rehearsing(trainer, budget) as rehearsal:
        steps, left, spent = steps_within(budget, rehearsal, started)
        if trainer.objective.plan(steps):
            steps, left, spent = steps_within(budget, rehearsal, started)
    if spent > (1 - LEAST_SHARE) * budget:
        warn(
            f"reading and encoding took {spent / 60:.1f} of the run's {budget / 60:g} minutes; "
            f"it trains for {left / 60:.1f} more, so it takes longer than planned"
        )
    return steps


def steps_within(budget: float, rehearsal: "Rehearsal", started: float | None) -> tuple[int, float, float]:
    """As many steps as fit into the seconds; those that are left for them, and those that went before."""
    agree = rehearsal.trainer.processes.agree
    each = agree(rehearsal.seconds_of_a_step())
    spent = time.monotonic() - started if started is not None else 0.0
    left = max(budget - agree(rehearsal.once) - spent, LEAST_SHARE * budget)
    return int(agree(max(10, int(left / each)))), left, spent


@contextmanager
def rehearsing(trainer: Trainer, budget: float) -> Iterator["Rehearsal"]:
    """A rehearsal of the run, after which weights and optimiser are as they were."""
    weights = {name: weight.clone() for name, weight in trainer.weights().items()}
    optimizer = copy.deepcopy(trainer.optimizer.state_dict())
    yield Rehearsal(trainer, budget)
    trainer.load(weights, optimizer)
    trainer.frozen = False


class Rehearsal:
    """What steps from all over the schedule take; a small share of the `budget` in seconds, if they are short."""

    def __init__(self, trainer: Trainer, budget: float) -> None:
        self.trainer = trainer
        self.once = 0.0  # seconds of what happens once
        self.seconds: list[dict[str, float]] = [{} for _ in rehearsed_parts()]  # of a step, by its kind
        self.allowed = REHEARSED_SHARE * budget / len(self.seconds)

    def seconds_of_a_step(self) -> float:
        """On average over the run, as its objective has planned it now. What is known is not timed again."""
        kind_of = self.trainer.objective.kind_of_step
        means = []
        for part, known in zip(rehearsed_parts(), self.seconds, strict=True):
            counts = Counter(map(kind_of, part))
            first = None if known else self.timed_step(part[0])
            self.time_steps(part, known)
            if first is not None:
                self.once += max(first - known[kind_of(part[0])], 0.0)
            means.append(sum(counts[kind] * known[kind] for kind in counts) / len(part))
        return sum(means) / len(means)

    def time_steps(self, part: range, known: dict[str, float]) -> None:
        """Add the kinds of steps of this part that are not known yet."""
        kind_of, agree = self.trainer.objective.kind_of_step, self.trainer.processes.agree
        times: dict[str, list[float]] = {kind: [] for kind in map(kind_of, part) if kind not in known}
        start = time.perf_counter()
        for step in evenly_chosen(part, kind_of):
            own = times.get(kind_of(step))
            if own is not None and (not own or agree(time.perf_counter() - start < self.allowed)):
                own.append(self.timed_step(step))
        known |= {kind: sum(own) / len(own) for kind, own in times.items()}

    def timed_step(self, step: int) -> float:
        self.trainer.processes.wait_for_device()
        start = time.perf_counter()
        self.trainer.step(step, REHEARSED_RUN)
        self.trainer.processes.wait_for_device()
        return time.perf_counter() - start


def rehearsed_parts() -> list[range]:
    """The parts of a run of REHEARSED_RUN steps; the first step of a part pays for what happens once."""
    return [range(first, first + REHEARSED_PART) for first in range(0, REHEARSED_RUN, REHEARSED_PART)]


def evenly_chosen(part: range, kind_of: Callable[[int], str]) -> list[int]:
    """Up to REHEARSALS steps of each kind, spread over the part; first one of each kind, then a second one, and so on.

    >>> evenly_chosen(range(101), lambda step: "docids" if step % 8 == 7 else "vectors")[:6]
    [0, 7, 12, 15, 25, 31]
    """
    kinds = {kind_of(step): None for step in part}
    by_kind = [[step for step in part if kind_of(step) == kind] for kind in kinds]
    spread = ([steps[len(steps) * i // REHEARSALS] for steps in by_kind] for i in range(REHEARSALS))
    return list(dict.fromkeys(step for round_ in spread for step in round_))
