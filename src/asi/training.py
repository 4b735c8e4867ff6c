"""The training loop: the only one of the project.

`fit` knows an objective, not a model: it asks for representations of the pairs of a step, for the losses that compare
all of them with each other, and for the losses of single pairs. Batches of thousands fit in little memory: the first
kind of loss needs only the representations, so these are computed without gradient first, the loss gives their
gradient, and a second pass pushes it through the network in chunks. The gradient is that of the whole batch at once.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asi.batches import Batch, TrainingPairs
from asi.checkpoint import RunFolder, latest_checkpoint, save_checkpoint
from asi.config import TrainConfig
from asi.distributed import Processes
from asi.errors import ConfigError
from asi.metrics import DocidHealth

FINAL_LR_SHARE = 0.05  # of the peak, where the cosine ends
DECAYED_PAIRS = 10_000  # that the weight decay of a residual layer is meant for
MOST_DECAYED = 0.5  # of a weight, in one step


class ParameterGroup(NamedTuple):
    """Parameters that are trained alike; the gradient of each group is clipped by itself."""

    parameters: list[nn.Parameter]
    lr: float
    decay: float | None = None  # weight decay; default: that of the run


def residual_group(parameters: list[nn.Parameter], lr: float, decay: float, pairs: TrainingPairs) -> ParameterGroup:
    """A residual layer on a pretrained vector, whose weight decay draws back to that vector.

    Without it few pairs are learnt by heart in minutes. What is right for `DECAYED_PAIRS` is too much for more of them
    and too little for fewer: a prior counts as much as so many pairs, however many there are.
    """
    return ParameterGroup(parameters, lr, min(decay * DECAYED_PAIRS / pairs.own, MOST_DECAYED / lr))


class Objective(Protocol):
    """What a system has to say about its own training."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def pairs(self) -> TrainingPairs: ...
    def parameter_groups(self) -> dict[str, ParameterGroup]: ...
    def plan(self, steps: int) -> bool: ...  # of the run, before its first one; whether that makes them other steps
    def enter(self, progress: float) -> Any: ...  # begins a part of the run; has the booleans `frozen`, `rewritten`
    def kind_of_step(self, step: int) -> str: ...  # steps of one kind take about the same time
    def course(self, step: int, steps: int) -> tuple[int, int]: ...
    def represent(self, batch: Batch) -> tuple[Any, Any]: ...
    def batch_losses(self, representations: Any, batch: Batch) -> dict[str, Tensor]: ...
    def generated(self, size: int, phase: Any) -> NDArray[np.bool_]: ...
    def pair_losses(
        self, representations: Any, query: Any, batch: Batch, chosen: NDArray[np.bool_], phase: Any
    ) -> dict[str, Tensor]: ...
    def frozen_losses(self, batch: Batch, chosen: NDArray[np.bool_], phase: Any) -> dict[str, Tensor]: ...
    def freeze(self) -> None: ...
    def health(self) -> DocidHealth | None: ...


class NoPhase(NamedTuple):
    """The schedule of an objective that has none."""

    frozen: bool = False
    rewritten: bool = False


class Nothing(NamedTuple):
    """The representations of an objective whose losses compare no pair with another."""


class PlainObjective:
    """What an objective need not say if it has no docids to freeze; it adds losses over the batch or over pairs."""

    def plan(self, steps: int) -> bool:
        return False

    def enter(self, progress: float) -> Any:
        return NoPhase()

    def kind_of_step(self, step: int) -> str:
        return ""

    def course(self, step: int, steps: int) -> tuple[int, int]:
        """Where in its course of the learning rate a step is, and how long that is: by default the whole run."""
        return step, steps

    def batch_losses(self, representations: Any, batch: Batch) -> dict[str, Tensor]:
        return {}

    def pair_losses(
        self, representations: Any, query: Any, batch: Batch, chosen: NDArray[np.bool_], phase: Any
    ) -> dict[str, Tensor]:
        return {}

    def generated(self, size: int, phase: Any) -> NDArray[np.bool_]:
        return np.ones(size, dtype=bool)

    def frozen_losses(self, batch: Batch, chosen: NDArray[np.bool_], phase: Any) -> dict[str, Tensor]:
        raise AssertionError("no phase of this objective is frozen")

    def freeze(self) -> None:
        raise AssertionError("no phase of this objective is frozen")

    def health(self) -> None:
        return None


class StagedObjective(PlainObjective):
    """Learns from one list of pairs after the other."""

    def __init__(self, stages: Sequence[tuple[float, TrainingPairs]]) -> None:
        self.stages = stages  # until which share of the run, from which pairs
        self.stage = 0

    @property
    def pairs(self) -> TrainingPairs:
        return self.stages[self.stage][1]

    def enter(self, progress: float) -> Any:
        self.stage = next((i for i, (until, _) in enumerate(self.stages) if progress < until), len(self.stages) - 1)
        return NoPhase()

    def course(self, step: int, steps: int) -> tuple[int, int]:
        return part_of_run(step, steps, [until for until, _ in self.stages])


def part_of_run(step: int, steps: int, ends: Sequence[float]) -> tuple[int, int]:
    """The place of a step within its part of the run, and the part's steps; `ends` are shares of the run.

    >>> part_of_run(3, 10, [0.4, 1.0]), part_of_run(4, 10, [0.4, 1.0])
    ((3, 4), (0, 6))
    """
    bounds = [0, *(math.ceil(share * steps) for share in ends)]
    part = next(i for i, end in enumerate(bounds) if step < end)
    return step - bounds[part - 1], bounds[part] - bounds[part - 1]


class StepReport(NamedTuple):
    """What the loop tells its caller after a step."""

    step: int  # steps done
    steps: int  # of the whole run
    losses: dict[str, float] | None  # weighted parts, on the steps that are logged
    pairs_per_second: float
    health: DocidHealth | None


Listener = Callable[[StepReport], None]


class Trainer:
    """One run's optimiser and step. The loop around it is `fit`."""

    def __init__(self, objective: Objective, config: TrainConfig, processes: Processes) -> None:
        self.objective = objective
        self.config = config
        self.processes = processes
        self.groups = objective.parameter_groups()
        self.frozen = False
        batch = objective.pairs.batch
        if batch % processes.count:
            raise ConfigError(f"a batch of {batch} pairs can't be shared evenly by {processes.count} processes")
        settings = [
            {
                "params": group.parameters,
                "lr": group.lr,
                "peak": group.lr,
                "weight_decay": config.weight_decay if group.decay is None else group.decay,
            }
            for group in self.groups.values()
        ]
        self.optimizer = torch.optim.AdamW(settings, betas=(0.9, 0.98), fused=True)
        device = next(objective.model.parameters()).device
        self.autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")

    def step(self, step: int, steps: int) -> dict[str, Tensor]:
        """Do step number `step` of `steps`; returns the weighted parts of its loss."""
        phase = self.objective.enter(step / steps)
        if phase.frozen and not self.frozen:
            self.objective.freeze()
            self.frozen = True
        if phase.rewritten:  # by computations that need not round alike in all processes
            self.processes.equalise(self.objective.model.parameters())
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * lr_share(*self.objective.course(step, steps), self.config.warmup_steps)
        self.optimizer.zero_grad(set_to_none=True)
        batch = self.objective.pairs.at(step)
        parts = self.frozen_backward(batch, phase) if phase.frozen else self.joint_backward(batch, phase)
        for parameters, _, _ in self.groups.values():
            if any(parameter.grad is not None for parameter in parameters):  # else the phase leaves the group alone
                self.processes.sum_gradients(parameters)
                nn.utils.clip_grad_norm_(parameters, self.config.clip)
        self.optimizer.step()
        return parts

    def chunks(self, batch: Batch) -> list[slice]:
        """This process's rows of the batch, in parts of at most `chunk` pairs."""
        own = self.processes.share(len(batch.queries))
        size = self.config.chunk
        return [slice(start, min(start + size, own.stop)) for start in range(own.start, own.stop, size)]

    def joint_backward(self, batch: Batch, phase: Any) -> dict[str, Tensor]:
        chosen = self.objective.generated(len(batch.queries), phase)
        count = int(chosen.sum())
        chunks = self.chunks(batch)
        if len(chunks) == 1 and self.processes.count == 1:
            return self.plain_backward(batch, chosen, count, phase)
        with torch.no_grad(), self.autocast:
            own = [self.objective.represent(batch.part(rows))[0] for rows in chunks]
        kind = type(own[0])
        leaves = kind(
            *(self.processes.gather(torch.cat(parts)).float().requires_grad_() for parts in zip(*own, strict=True))
        )
        parts = self.objective.batch_losses(leaves, batch)
        gradients = (
            torch.autograd.grad(torch.stack(list(parts.values())).sum(), leaves, allow_unused=True) if parts else ()
        )
        own_losses: dict[str, Tensor] = {}
        for rows in chunks:
            with self.autocast:
                representations, query = self.objective.represent(batch.part(rows))
                single = self.objective.pair_losses(representations, query, batch.part(rows), chosen[rows], phase)
            surrogate = [
                (part * gradient[rows]).sum()
                for part, gradient in zip(representations, gradients, strict=False)
                if gradient is not None
            ]
            total = torch.stack([*surrogate, *(part / count for part in single.values())]).sum()
            total.backward()
            add_to(own_losses, single, count)
        return {name: part.detach() for name, part in parts.items()} | self.processes.total(own_losses)

    def plain_backward(self, batch: Batch, chosen: NDArray[np.bool_], count: int, phase: Any) -> dict[str, Tensor]:
        """The whole batch in one pass: what the chunked way must equal, and faster where it fits."""
        with self.autocast:
            representations, query = self.objective.represent(batch)
            single = self.objective.pair_losses(representations, query, batch, chosen, phase)
        full = type(representations)(*(part.float() for part in representations))
        parts = self.objective.batch_losses(full, batch) | {name: part / count for name, part in single.items()}
        torch.stack(list(parts.values())).sum().backward()
        return {name: part.detach() for name, part in parts.items()}

    def frozen_backward(self, batch: Batch, phase: Any) -> dict[str, Tensor]:
        chosen = self.objective.generated(len(batch.queries), phase)
        count = int(chosen.sum())
        own_losses: dict[str, Tensor] = {}
        for rows in self.chunks(batch):
            with self.autocast:
                single = self.objective.frozen_losses(batch.part(rows), chosen[rows], phase)
            torch.stack([part / count for part in single.values()]).sum().backward()
            add_to(own_losses, single, count)
        return self.processes.total(own_losses)

    def weights(self) -> dict[str, Tensor]:
        """The weights that training changes; the rest comes with the pretrained encoder."""
        trained = {name for name, parameter in self.objective.model.named_parameters() if parameter.requires_grad}
        return {name: weight for name, weight in self.objective.model.state_dict().items() if name in trained}

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> None:
        self.objective.model.load_state_dict(weights, strict=False)
        self.optimizer.load_state_dict(dict(optimizer))


def add_to(sums: dict[str, Tensor], losses: Mapping[str, Tensor], count: int) -> None:
    for name, loss in losses.items():
        sums[name] = sums.get(name, torch.zeros(())) + loss.detach().cpu() / count


def lr_share(step: int, steps: int, warmup: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine down to a small rest."""
    warmup = min(warmup, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine


def fit(
    trainer: Trainer, steps: int, folder: RunFolder, listener: Listener, stopping: Callable[[], bool] = lambda: False
) -> bool:
    """Train to the end from the newest checkpoint of `folder`, if it has one. False if `stopping` ended it early.

    The final weights are the same, bit for bit on a CPU, however often the run was interrupted.
    """
    config, processes = trainer.config, trainer.processes
    step = 0
    if (checkpoint := latest_checkpoint(folder)) is not None:
        step = checkpoint.step
        trainer.load(checkpoint.weights, checkpoint.optimizer)
        torch.set_rng_state(checkpoint.random)
    trainer.objective.plan(steps)
    clock, clocked = time.perf_counter(), step
    while step < steps:
        parts = trainer.step(step, steps)
        step += 1
        is_last = step == steps
        logged = step % config.log_every == 0 or is_last
        health = None
        if processes.is_main and (step % config.health_every == 0 or is_last):
            health = trainer.objective.health()
        if processes.is_main:
            now = time.perf_counter()
            speed = (step - clocked) * trainer.objective.pairs.batch / max(now - clock, 1e-9)
            losses = {name: float(part) for name, part in parts.items()} if logged else None
            listener(StepReport(step, steps, losses, speed, health))
            if logged:
                clock, clocked = now, step
        stop = processes.any(stopping()) and not is_last
        due = stop or is_last or step % config.checkpoint_every == 0
        if due and processes.is_main:
            save_checkpoint(folder, step, trainer.weights(), trainer.optimizer.state_dict())
        if stop:
            return False
    return True
