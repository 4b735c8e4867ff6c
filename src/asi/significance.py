"""Is the difference between two systems more than chance? A paired randomisation test, corrected for many systems."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10_000
ROUNDS_AT_ONCE = 1_000


def randomisation_test(first: NDArray[np.float64], second: NDArray[np.float64], seed: int = 0) -> float:
    """The chance of so large a difference of means, either way, if it were a toss for each query which system is which.

    Two systems that never differ have p = 1.
    """
    differences = first - second
    observed = abs(differences.mean())
    draw = np.random.default_rng(seed)
    as_large = 0
    for _ in range(0, ROUNDS, ROUNDS_AT_ONCE):
        signs = draw.integers(0, 2, size=(ROUNDS_AT_ONCE, len(differences)), dtype=np.int8) * 2 - 1
        as_large += int((np.abs(signs @ differences) / len(differences) >= observed - 1e-12).sum())
    return (1 + as_large) / (1 + ROUNDS)


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction of p-values for their number.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(values, key=lambda name: values[name])):
        largest = max(largest, min(1.0, values[name] * (len(values) - rank)))
        corrected[name] = round(largest, 10)
    return corrected
