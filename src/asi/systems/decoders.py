"""What is special about the decoders of generative systems: their sizes, what they read, how they begin, and NCI's
prefix-aware output.

Letters: Q queries, K beams, D width, d decoder width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asi.model import Decoder, Encoded, Generation, embedded_codes, reordered

STARTING_TEMPERATURE = 0.05  # of the cosines that a decoder may begin with


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


class TextDecoder(Decoder):
    """Reads the text's vector at every position: it has minutes to learn in, and no pretrained decoder's reading."""

    text_everywhere = True


class PrefixAwareDecoder(TextDecoder):
    """NCI's idea: what a state means for the output depends on the codes so far, not only on their number."""

    def __init__(self, width: int, config: Shape) -> None:
        super().__init__(width, config)
        d = config.decoder_width
        last = nn.Linear(d, d)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.adaptor = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU(), last)

    def states(self, query: Encoded, docid: Tensor) -> Tensor:
        tables = self.embedding_tables()
        embedded = torch.stack([embedded_codes(docid[:, i], tables[i]) for i in range(docid.size(1))], dim=1)
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
            self.before = kept + embedded_codes(code, self.embeddings[position - 1])
        return self.decoder.adapted(states, self.before)


@torch.no_grad()
def begin_with_vectors(decoder: Decoder, pooled: NDArray[np.float32]) -> Tensor:
    """Let a decoder begin as the encoder: the first state is the text's vector along the main directions of the
    documents' vectors `pooled` (n, D), and the layers add nothing to it yet.

    Returns the states (n, d) of the documents.
    """
    vectors = decoder.norm_x(torch.from_numpy(np.array(pooled)).to(decoder.outputs.device))
    d = decoder.outputs.size(-1)
    directions = torch.linalg.eigh(vectors.T @ vectors).eigenvectors.flip(1)[:, :d]  # (D, d or fewer)
    for part in (decoder.start.weight, decoder.start.bias):
        part.zero_()
    decoder.start.weight[: directions.size(1)] = directions.T
    for layer in decoder.blocks:
        for added in (layer.self_out, layer.cross_out, layer.down):
            added.weight.zero_()
            added.bias.zero_()
    states: Tensor = decoder.start(vectors)
    return states


@torch.no_grad()
def begin_as_dense(decoder: Decoder, pooled: NDArray[np.float32], codes: NDArray[np.int64]) -> None:
    """Let a decoder of atomic docids begin as dense retrieval: its logits are the cosines of query and documents, and
    the output rows `codes` (n,) are what the documents' own vectors `pooled` (n, D) become."""
    decoder.positions.zero_()
    states = begin_with_vectors(decoder, pooled)
    rows = decoder.norm(states) / (states.size(1) * STARTING_TEMPERATURE)  # what is normed has the length sqrt(d)
    decoder.outputs[0, torch.from_numpy(codes).to(rows.device)] = rows
