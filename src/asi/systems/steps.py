"""Step functions for beam search that narrow what another one allows."""

import torch
from torch import Tensor

from asi.beam import Step
from asi.systems.identifiers import END


class UntilTheEnd:
    """A docid that has ended only goes on with END, at no cost."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.ended: Tensor | None = None  # (Q, K)
        self.only_end: Tensor | None = None  # (1, 1, V)

    def __call__(self, moves: tuple[Tensor, Tensor] | None) -> Tensor:
        if moves is None:
            log_probs = self.step(moves)
            self.ended = torch.zeros(log_probs.shape[:2], dtype=torch.bool, device=log_probs.device)
            self.only_end = torch.full_like(log_probs[:1, :1], -torch.inf)
            self.only_end[..., END] = 0
            return log_probs
        code, parent = moves
        assert self.ended is not None
        assert self.only_end is not None
        self.ended = self.ended.gather(1, parent) | (code == END)
        if bool(self.ended.all()):  # most docids are shorter than the longest
            return self.only_end.expand(*code.shape, -1)
        return torch.where(self.ended[:, :, None], self.only_end, self.step(moves))


class MarkedStart:
    """The first code is given."""

    def __init__(self, step: Step, marker: int) -> None:
        self.step = step
        self.marker = marker

    def __call__(self, moves: tuple[Tensor, Tensor] | None) -> Tensor:
        log_probs = self.step(moves)
        if moves is None:
            log_probs = torch.full_like(log_probs, -torch.inf)
            log_probs[..., self.marker] = 0
        return log_probs
