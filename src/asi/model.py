"""The network: one encoder for queries and documents, heads that give docids, a decoder that generates them.

Letters: B batch, T tokens, D encoder width, d decoder width, m docid length, V codes per position, K beams.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from asi.config import ModelConfig
from asi.encoder import Encoder
from asi.quantiser import Quantiser

STARTING_SPREAD = 0.02  # of the numbers in tables that start at random


class Encoded(NamedTuple):
    """What the encoder makes of a batch of texts."""

    x: Tensor  # (B, D) one vector per text: pooled, then adapted
    states: Tensor  # (B, T, D)
    mask: Tensor  # (B, T)
    pooled: Tensor  # (B, D)


class Adapter(nn.Module):
    """A residual layer on one vector per text: the cheapest way to train on top of a frozen encoder."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        nn.init.zeros_(self.down.weight)  # starts as the identity: the pretrained vectors are good already
        nn.init.zeros_(self.down.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        pooled = F.normalize(pooled, dim=-1) * math.sqrt(pooled.size(-1))
        return pooled + self.down(F.gelu(self.up(pooled)))


class IndexHeads(nn.Module):
    """x to the logits of m distributions over V codes (the paper's semantic indexing module)."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.m, self.V = config.m, config.V
        self.adapter = Adapter(width, config.head_adapter) if config.head_adapter else None
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, config.m * config.V)
        nn.init.normal_(self.linear.weight, std=1 / math.sqrt(width))  # logits of deviation 1 before the scale
        nn.init.zeros_(self.linear.bias)
        if config.docids == "random":
            nn.init.zeros_(self.linear.weight)  # they are never trained: all codes are alike to them
        # At scale 1 all distributions are nearly uniform and the contrastive loss sees nothing.
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.logit_scale)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # a docid must not depend on who asks, and at what precision
            logits = self.linear(self.inner(x)) * self.log_scale.exp()
            return logits.view(len(x), self.m, self.V)  # (B, m, V)

    def inner(self, x: Tensor) -> Tensor:
        """What the logits are linear in."""
        x = x.to(self.linear.weight.dtype)
        return self.norm(self.adapter(x) if self.adapter is not None else x)

    @property
    def untouched(self) -> bool:
        """Neither trained nor started from a quantiser."""
        return not self.linear.bias.any()

    @torch.no_grad()
    def start_from(self, quantiser: Quantiser, temperature: float) -> None:
        """Give documents the codes of their nearest centres, and queries the scores that their vectors would have."""
        rotation, centres = quantiser
        weights = centres @ rotation.view(len(rotation), self.m, -1).permute(1, 2, 0)  # (m, V, D)
        self.linear.weight.copy_(weights.flatten(0, 1))
        self.linear.bias.copy_(-centres.square().sum(-1).flatten() / 2)
        self.log_scale.fill_(-math.log(temperature * len(rotation)))  # the inner vectors have the length sqrt(D)


class TokenMatcher(nn.Module):
    """Token states to short unit vectors, for ranking by single tokens, and to what a query's tokens count."""

    rarity: Tensor  # (vocabulary,)

    def __init__(self, width: int, vocabulary: int, config: ModelConfig) -> None:
        super().__init__()
        self.kept = config.tokens_of_document  # of a document
        self.width = min(config.token_width, width)
        self.projection = nn.Linear(width, self.width, bias=False)
        self.importance = nn.Parameter(torch.zeros(width))  # at first a token counts by its rarity alone
        self.register_buffer("rarity", torch.ones(vocabulary))

    def forward(self, states: Tensor, rarity: Tensor) -> Tensor:
        """Unit vectors (B, T, d) of token states (B, T, D); 0 where the rarity (B, T) is, because no token is there."""
        vectors = F.normalize(self.projection(states), dim=-1)
        return vectors * (rarity > 0).to(vectors.device, vectors.dtype)[:, :, None]

    def shares(self, states: Tensor, rarity: Tensor) -> Tensor:
        """What each of a query's tokens counts (B, T), 1 in all: by its rarity, and by what its state says."""
        length = math.sqrt(states.size(-1)) / 4  # at which this layer learns about as fast as the projection
        importance = (F.normalize(states, dim=-1) * length * self.importance).sum(-1)
        return (rarity.to(states.device, states.dtype).log() + importance).softmax(1)

    @property
    def known_rarity(self) -> NDArray[np.float32]:
        return self.rarity.cpu().numpy()

    def set_rarity(self, rarity: NDArray[np.float32]) -> None:
        self.rarity.copy_(torch.from_numpy(rarity))

    def set_directions(self, directions: Tensor) -> None:
        """Start from the first of these orthogonal directions (D, D)."""
        own = directions[: self.width]  # a tiny corpus has fewer
        with torch.no_grad():
            self.projection.weight[: len(own)] = own


class DecoderLayer(nn.Module):
    """Self-attention over the docid so far, cross-attention to the query, a feed-forward part; norms before each."""

    def __init__(self, width: int, memory_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.self_norm, self.cross_norm, self.inner_norm = (nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width)
        self.self_out = nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.memory = nn.Linear(memory_width, 2 * width)
        self.cross_out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def split(self, states: Tensor) -> Tensor:
        """(B, n, d) to (B, heads, n, d / heads)."""
        return states.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def memory_keys_values(self, states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The query's side of the cross-attention: computed once, used for every position and every beam.

        With the mask (B, T) only what is no padding is computed, the rest is 0.
        """
        if mask is None:
            projected = self.memory(states)
        else:
            rows = mask.flatten().nonzero().squeeze(1)
            own = self.memory(states.flatten(0, 1)[rows])
            # masked_scatter would read better, but its gradient takes a sixth of a decoder's step.
            projected = own.new_zeros(mask.numel(), own.size(-1)).index_copy_(0, rows, own).unflatten(0, mask.shape)
        keys, values = projected.chunk(2, dim=-1)
        return self.split(keys), self.split(values)

    def self_projections(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, values = self.qkv(self.self_norm(states)).chunk(3, dim=-1)
        return query, keys, values

    def self_step(self, states: Tensor, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The first part for the newest state of K sequences each (B, K, d), over their kept keys and values (B, K,
        positions so far, d); with these, the new ones among them."""
        query, *new = (part[:, :, None] for part in self.self_projections(states))  # (B, K, 1, d)
        keys, values = new if kept is None else (torch.cat(pair, dim=2) for pair in zip(kept, new, strict=True))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(2, 3) for part in (query, keys, values))
        mixed = F.scaled_dot_product_attention(q, k, v)  # (B, K, heads, 1, d / heads)
        return states + self.self_out(mixed.flatten(2)), (keys, values)

    def cross_and_inner(self, states: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """The second and third part, for states (B, n, d) that all look at the same memory."""
        query = self.split(self.query(self.cross_norm(states)))
        mixed = F.scaled_dot_product_attention(query, *memory, attn_mask=mask[:, None, None, :])
        states = states + self.cross_out(mixed.transpose(1, 2).flatten(2))
        return states + self.down(F.gelu(self.up(self.inner_norm(states))))

    def forward(self, states: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        query, keys, values = (self.split(part) for part in self.self_projections(states))
        mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        states = states + self.self_out(mixed.transpose(1, 2).flatten(2))
        return self.cross_and_inner(states, memory, mask)


class DecoderShape(Protocol):
    """The part of the settings that a decoder needs."""

    @property
    def m(self) -> int: ...
    @property
    def V(self) -> int: ...
    @property
    def shared_tokens(self) -> bool: ...
    @property
    def decoder_layers(self) -> int: ...
    @property
    def decoder_width(self) -> int: ...
    @property
    def decoder_heads(self) -> int: ...
    @property
    def head_prior(self) -> bool: ...


Tables = Sequence[Tensor]  # (V, d) for each position


class Decoder(nn.Module):
    """Query to docid, position by position, over the id tokens alone."""

    text_everywhere = False  # x is read at every position, not at the first alone

    def __init__(self, width: int, config: DecoderShape) -> None:
        super().__init__()
        d = config.decoder_width
        self.m, self.V = config.m, config.V
        tables = 1 if config.shared_tokens else config.m  # Share: one table for all positions; Unique: one for each
        self.norm_x = nn.LayerNorm(width)
        self.start = nn.Linear(width, d)
        self.embeddings = nn.Parameter(STARTING_SPREAD * torch.randn(tables, config.V, d))
        self.positions = nn.Parameter(STARTING_SPREAD * torch.randn(config.m, d))
        self.layers = nn.ModuleList(DecoderLayer(d, width, config.decoder_heads) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(d)
        self.outputs = nn.Parameter(STARTING_SPREAD * torch.randn(tables, config.V, d))
        self.prior_scale = nn.Parameter(torch.ones(())) if config.head_prior else None

    @property
    def blocks(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def embedding_tables(self) -> Tables:
        return tables_of(self.embeddings, self.m)

    def output_tables(self) -> Tables:
        return tables_of(self.outputs, self.m)

    def log_probs(self, states: Tensor, tables: Tables, position: int, prior: Tensor | None) -> Tensor:
        """States (B, n, d) at `position` to log-probabilities (B, n, V), by the output tables; `prior` (B, m, V) are
        the heads' logits."""
        own = prior[:, position, None] if prior is not None else None
        return self.logits(states, tables[position], own).log_softmax(-1)

    def logits(self, states: Tensor, table: Tensor, prior: Tensor | None) -> Tensor:
        """States (..., d) to logits (..., V) by the output table of their position, to which the prior (..., V) is
        added if there is one."""
        logits = F.linear(self.norm(states), table)
        if self.prior_scale is not None and prior is not None:
            logits = logits + self.prior_scale * prior
        return logits

    def states(self, query: Encoded, docid: Tensor) -> Tensor:
        """States (B, m, d) at every position given the true docid before it: codes (B, m), or one-hots (B, m, V).

        Fewer than m positions if the docids are cut off.
        """
        first, tables = self.start(self.norm_x(query.x)), self.embedding_tables()
        embedded = [embedded_codes(docid[:, i], tables[i]) for i in range(docid.size(1) - 1)]
        if self.text_everywhere:
            embedded = [first + code for code in embedded]
        states = torch.stack([first, *embedded], dim=1) + self.positions[: docid.size(1)]
        for layer in self.blocks:
            states = layer(states, layer.memory_keys_values(query.states, query.mask), query.mask)
        return states

    def forward(self, query: Encoded, docid: Tensor, prior: Tensor | None = None) -> Tensor:
        """Log-probabilities (B, m, V) of every position given the true docid before it."""
        states, tables = self.states(query, docid), self.output_tables()
        steps = [self.log_probs(states[:, i : i + 1], tables, i, prior) for i in range(self.m)]
        return torch.cat(steps, dim=1)


def tables_of(tables: Tensor, m: int) -> Tables:
    """The table of each of m positions, from one for each or one for all (1 or m, V, d).

    They are taken apart at once: the gradient of each single `tables[i]` would be as large as all of them together.
    """
    own = tables.unbind(0)
    return own if len(own) > 1 else own * m


def embedded_codes(codes: Tensor, table: Tensor) -> Tensor:
    """Codes (...,), or one-hots (..., V) that may carry a gradient, to vectors (..., d)."""
    return codes @ table if codes.is_floating_point() else F.embedding(codes, table)


def table_of_words(vectors: Tensor, width: int) -> Tensor:
    """How a table of word pieces may start: the encoder's vectors of these (n, D) along their main directions, with the
    spread of a table that starts at random: (n, width), or as many columns as D has."""
    own = vectors.detach().float()
    own = own - own.mean(0)
    projected = own @ torch.linalg.eigh(own.T @ own).eigenvectors.flip(1)[:, :width]
    return STARTING_SPREAD * projected / projected.square().mean().sqrt().clamp(min=1e-9)


class Generation:
    """A generation under way for Q queries: a step function for beam search, with keys and values kept."""

    def __init__(self, decoder: Decoder, query: Encoded, prior: Tensor | None = None) -> None:
        self.decoder = decoder
        self.query = query
        self.prior = prior  # (Q, m, V)
        self.position = 0
        self.first = decoder.start(decoder.norm_x(query.x))[:, None]  # (Q, 1, d)
        self.embeddings, self.outputs = decoder.embedding_tables(), decoder.output_tables()
        self.memories = [layer.memory_keys_values(query.states) for layer in decoder.blocks]
        self.kept: list[tuple[Tensor, Tensor] | None] = [None] * len(self.memories)  # (Q, K, positions so far, d) each

    def __call__(self, moves: tuple[Tensor, Tensor] | None) -> Tensor:
        """Log-probabilities (Q, K, V) of the next position; moves are the codes taken and their parents (Q, K)."""
        states = self.advance(moves)
        return self.decoder.log_probs(states, self.outputs, self.position - 1, self.prior)

    def advance(self, moves: tuple[Tensor, Tensor] | None) -> Tensor:
        """States (Q, K, d) of the next position."""
        decoder, i = self.decoder, self.position
        if moves is None:
            states = self.first
        else:
            code, parent = moves
            states = embedded_codes(code, self.embeddings[i - 1])
            if decoder.text_everywhere:
                states = states + self.first
            for number, kept in enumerate(self.kept):
                assert kept is not None, "the first position has no moves"
                self.kept[number] = (reordered(kept[0], parent), reordered(kept[1], parent))
        states = states + decoder.positions[i]
        for number, layer in enumerate(decoder.blocks):
            states, self.kept[number] = layer.self_step(states, self.kept[number])
            states = layer.cross_and_inner(states, self.memories[number], self.query.mask)
        self.position += 1
        return states


def reordered(kept: Tensor, parent: Tensor) -> Tensor:
    """Rows (Q, K, positions, d) of the beams that were continued."""
    return kept.gather(1, parent[:, :, None, None].expand(-1, -1, *kept.shape[2:]))


class Asi(nn.Module):
    """The whole network. `config` says everything about its shape but the encoder's, which the encoder knows."""

    def __init__(self, encoder: Encoder, config: ModelConfig) -> None:
        super().__init__()
        width = encoder.shape.width
        self.config = config
        self.encoder = encoder
        self.adapter = Adapter(width, config.adapter) if config.adapter else None
        self.heads = IndexHeads(width, config)
        self.decoder = Decoder(width, config)
        self.matcher = TokenMatcher(width, encoder.shape.vocabulary, config) if config.token_width else None

    @property
    def device(self) -> torch.device:
        return self.heads.linear.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.heads.linear.weight.dtype

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """Token states (B, T, D) to one vector per text (B, D)."""
        if self.config.pooling == "cls":
            return states[:, 0]
        weights = mask[:, :, None].type_as(states)
        return (states * weights).sum(1) / weights.sum(1)

    def adapt(self, pooled: Tensor) -> Tensor:
        return self.adapter(pooled) if self.adapter is not None else pooled

    def encode(self, ids: Tensor, mask: Tensor) -> Encoded:
        return self.finish(self.encoder(ids, mask), mask)

    def finish(self, states: Tensor, mask: Tensor, pooled: Tensor | None = None) -> Encoded:
        """From token states on; `pooled` if they are pooled already."""
        pooled = self.pool(states, mask) if pooled is None else pooled
        return Encoded(self.adapt(pooled), states, mask, pooled)

    def generation(self, query: Encoded, prior: Tensor) -> Generation:
        return Generation(self.decoder, query, prior)
