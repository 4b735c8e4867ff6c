"""The layers of a T5 encoder: norms before each part, no biases, and positions only as a bias on attention.

Letters: B batch, T tokens, D width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class T5Layer(nn.Module):
    """Self-attention and a feed-forward part; `attention` (B, heads, T, T) is added to the logits."""

    def __init__(self, width: int, heads: int, head_width: int, inner: int, eps: float, *, gated: bool) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.attention_norm = nn.RMSNorm(width, eps=eps)
        self.qkv = nn.Linear(width, 3 * heads * head_width, bias=False)
        self.out = nn.Linear(heads * head_width, width, bias=False)
        self.output_norm = nn.RMSNorm(width, eps=eps)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, states: Tensor, attention: Tensor) -> Tensor:
        B, T, _ = states.shape
        parts = self.qkv(self.attention_norm(states)).view(B, T, 3, self.heads, self.head_width)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attention, scale=1.0)
        states = states + self.out(mixed.transpose(1, 2).reshape(B, T, -1))
        normed = self.output_norm(states)
        if self.gate is None:
            return states + self.down(F.relu(self.up(normed)))
        return states + self.down(F.gelu(self.gate(normed), approximate="tanh") * self.up(normed))


class RelativeBias(nn.Module):
    """A learned number for each head and distance; far distances share buckets."""

    def __init__(self, buckets: int, farthest: int, heads: int) -> None:
        super().__init__()
        self.buckets, self.farthest = buckets, farthest
        self.table = nn.Embedding(buckets, heads)

    def forward(self, mask: Tensor) -> Tensor:
        """The bias on attention (B, heads, T, T); -inf at padding."""
        places = torch.arange(mask.size(1), device=mask.device)
        bias = self.table(bucket_of(places[None, :] - places[:, None], self.buckets, self.farthest)).permute(2, 0, 1)
        return bias[None].masked_fill(~mask[:, None, None, :], -torch.inf)


def bucket_of(distance: Tensor, buckets: int, farthest: int) -> Tensor:
    """Half of the buckets for each direction; in each, one per distance up to a half, then ever wider ones.

    >>> bucket_of(torch.tensor([0, -1, -7, -8, -500, 1, 500]), 32, 128).tolist()
    [0, 1, 7, 8, 15, 17, 31]
    """
    half = buckets // 2
    exact = half // 2
    far = distance.abs().clamp(min=1).float()
    scaled = exact + (torch.log(far / exact) / math.log(farthest / exact) * (half - exact)).long()
    near = torch.where(distance.abs() < exact, distance.abs(), scaled.clamp(max=half - 1))
    return near + half * (distance > 0)
