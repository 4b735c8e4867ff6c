"""A product quantiser with a learned rotation (Ge et al. 2013, OPQ): where heads can start from trained vectors.

Rotated vectors are cut into m parts, and each part is rounded to the nearest of V centres. As heads, with the logits
scale (c z - c c / 2) of each centre c, the most probable docid of a document is its nearest centres, and the one-pass
score of a query ranks documents by the distance of their centres to it. Letters: n vectors, D width, d of a part.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 25
SAMPLE = 20_000  # vectors that are enough to place the centres


class Quantiser(NamedTuple):
    rotation: Tensor  # (D, m d), orthonormal rows
    centres: Tensor  # (m, V, d)

    def codes(self, vectors: Tensor) -> Tensor:
        """(n, m): the nearest centre of each part."""
        return nearest(parts_of(vectors @ self.rotation, len(self.centres)), self.centres)

    def rounded(self, codes: Tensor) -> Tensor:
        """The vectors (n, D) that codes stand for."""
        return gathered(self.centres, codes).flatten(1) @ self.rotation.T


def fit_quantiser(vectors: Tensor, m: int, V: int, seed: int) -> Quantiser:
    """Alternate between centres for the rotation and the rotation for the centres, each step the best for the other."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(vectors), generator=generator)[:SAMPLE]
    vectors = vectors[drawn.to(vectors.device)]
    width = vectors.size(1)
    start = torch.randn(width, math.ceil(width / m) * m, generator=generator).to(vectors)
    rotation = nearest_orthonormal(start)
    parts = parts_of(vectors @ rotation, m)
    first = torch.randint(len(vectors), (m, V), generator=generator).to(vectors.device)
    centres = torch.stack([part[rows] for part, rows in zip(parts.unbind(1), first, strict=True)])
    for _ in range(ROUNDS):
        codes = nearest(parts, centres)
        centres = means(parts, codes, centres, generator)
        rotation = nearest_orthonormal(vectors.T @ gathered(centres, codes).flatten(1))
        parts = parts_of(vectors @ rotation, m)
    return Quantiser(rotation, centres)


def parts_of(rotated: Tensor, m: int) -> Tensor:
    return rotated.view(len(rotated), m, -1)  # (n, m, d)


def nearest(parts: Tensor, centres: Tensor) -> Tensor:
    bias = -centres.square().sum(-1) / 2  # (m, V)
    scored = zip(bias, parts.unbind(1), centres, strict=True)
    return torch.stack([torch.addmm(own_bias, part, own.T).argmax(1) for own_bias, part, own in scored], dim=1)


def gathered(centres: Tensor, codes: Tensor) -> Tensor:
    return torch.stack([own[rows] for own, rows in zip(centres, codes.unbind(1), strict=True)], dim=1)  # (n, m, d)


def means(parts: Tensor, codes: Tensor, centres: Tensor, generator: torch.Generator) -> Tensor:
    """The centres of what was rounded to them; one that nothing was rounded to moves to a vector drawn at random."""
    moved = []
    for part, own in zip(parts.unbind(1), codes.unbind(1), strict=True):
        counts = torch.bincount(own, minlength=centres.size(1))
        ordered = part[own.argsort(stable=True)]
        sums = torch.segment_reduce(ordered, "sum", lengths=counts)  # no atomic sums: repeatable
        drawn = torch.randint(len(part), (centres.size(1),), generator=generator).to(part.device)
        moved.append(torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], part[drawn]))
    return torch.stack(moved)


def nearest_orthonormal(matrix: Tensor) -> Tensor:
    """The matrix with orthonormal rows that is nearest to this one (D, at least D)."""
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right
