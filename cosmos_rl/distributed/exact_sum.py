"""Sums of numbers that are rounded once, so that neither their order nor how they are grouped matters."""

import math
from collections.abc import Sequence

_TERMS = 6
"""So many float64 numbers, each of what those before it leave, hold any sum of float32 numbers exactly: the bits of
these lie between 2^-149 and 2^128, and 6 * 53 = 318."""


def expand_sum(values: Sequence[float]) -> list[float]:
    """Some float64 numbers, always as many, whose sum is exactly that of float32 ``values``; it and zeros where that is
    not finite."""
    terms = [round_sum(values)]
    while len(terms) < _TERMS:
        rest = 0.0
        if math.isfinite(terms[0]):
            rest = math.fsum([*values, *(-term for term in terms)])
        terms.append(rest)
    return terms


def round_sum(values: Sequence[float]) -> float:
    """The exact sum, rounded once."""
    if all(map(math.isfinite, values)):
        return math.fsum(values)
    return sum(values)  # NaN of infinities of both signs, which fsum refuses
