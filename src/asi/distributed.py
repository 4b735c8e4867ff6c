"""Several processes as one: started by `torchrun`, each with its share of every batch; with one process, all no-ops."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asi.errors import ConfigError


class Processes:
    """This process's place among the processes of a run."""

    def __init__(self, rank: int, count: int, device: torch.device) -> None:
        self.rank = rank
        self.count = count
        self.device = device  # the one that the processes talk over

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait_for_device(self) -> None:
        """Until everything that a GPU was asked for is done: else only the asking would be timed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def share(self, size: int) -> slice:
        """This process's rows of a batch of `size`, a multiple of the number of processes."""
        each = size // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    def gather(self, own: Tensor) -> Tensor:
        """The rows of all processes, in the order of their ranks; without gradient."""
        if self.count == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # a process whose pairs were not chosen takes part too
            dist.all_reduce(parameter.grad)

    def equalise(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give all processes the main one's weights."""
        for parameter in parameters if self.count > 1 else ():
            dist.broadcast(parameter.data, src=0)

    def total(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all processes."""
        if self.count == 1 or not own:
            return own
        values = torch.stack(list(own.values())).to(self.device)
        dist.all_reduce(values)
        return dict(zip(own, values.cpu(), strict=True))

    def agree(self, value: Any) -> Any:
        """The main process's value, in all processes."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process does it before the others, which find what it has left behind."""
        if self.count > 1 and not self.is_main:
            dist.barrier()
        yield
        if self.count > 1 and self.is_main:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        if self.count == 1:
            return flag
        total = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(total)
        return bool(total)


def is_main_process() -> bool:
    """Whether this process may speak for all that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined_processes(device: torch.device) -> Iterator[Processes]:
    """Join the processes that `torchrun` started, if it did."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(0, 1, device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # This module keeps the group that exists when it is imported, as its functions' default. The optimizer imports it;
    # after that the group's threads would outlive the group, and at times abort the process at its end.
    import_module("torch.distributed.nn.functional")
    # The main process may encode for hours while the others wait for it.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=7))
    try:
        yield Processes(dist.get_rank(), count, device)
        dist.barrier()  # all leave when the main one has finished: what it still writes is there when any of them ends
    finally:
        dist.destroy_process_group()


def choose_device(name: str | None) -> torch.device:
    """The named device, or the best that is here; under torchrun each process has its own GPU."""
    if name == "cuda" and torch.cuda.is_available():
        name = None
    if name:
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:  # what torch raises for an unknown or a missing one
            raise ConfigError(f"there is no device {name!r} here: {str(error).splitlines()[0]}") from None
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
