"""The sizes of the systems' decoders, and the decoder of NCI, whose output depends on the codes so far.

Letters: Q queries, K beams, d decoder width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asi.model import Decoder, Encoded, Generation, reordered


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, named as in the settings of ASI."""

    m: int
    V: int
    shared_tokens: bool
    decoder_layers: int = 2
    decoder_width: int = 256
    decoder_heads: int = 4
    head_prior: bool = False


class PrefixAwareDecoder(Decoder):
    """NCI's idea: what a state means for the output depends on the codes so far, not only on their number."""

    def __init__(self, width: int, config: Shape) -> None:
        super().__init__(width, config)
        d = config.decoder_width
        self.adaptor = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))
        nn.init.zeros_(self.adaptor[2].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.adaptor[2].bias)  # type: ignore[arg-type]

    def states(self, query: Encoded, docid: Tensor) -> Tensor:
        embedded = torch.stack([self.embedded(docid[:, i], i) for i in range(self.m)], dim=1)
        before = embedded.cumsum(1) - embedded  # tables differ by position: a sum of codes is a prefix
        return self.adapted(super().states(query, docid), before)

    def adapted(self, states: Tensor, before: Tensor) -> Tensor:
        return states * (1 + self.adaptor(before))


class PrefixAwareGeneration(Generation):
    decoder: PrefixAwareDecoder

    def __init__(self, decoder: PrefixAwareDecoder, query: Encoded) -> None:
        super().__init__(decoder, query)
        self.before = torch.zeros((), device=query.x.device)  # (Q, K, d) sum of the codes so far

    def advance(self, moves: tuple[Tensor, Tensor] | None) -> Tensor:
        position = self.position
        states = super().advance(moves)
        if moves is None:
            self.before = torch.zeros_like(states)
        else:
            code, parent = moves
            kept = reordered(self.before[:, :, None], parent)[:, :, 0]
            self.before = kept + self.decoder.embedded(code, position - 1)
        return self.decoder.adapted(states, self.before)
