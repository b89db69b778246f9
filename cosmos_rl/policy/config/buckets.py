"""Which of several sizes an image or a video goes to, and lists of sizes of about one area. No torch."""

import math
from collections.abc import Sequence
from fractions import Fraction

Sides = tuple[int, int]
"""(height, width) in pixels."""


def kept_share(picture: Sides, size: Sides) -> Fraction:
    """Share of a picture's area that is left when it is scaled to cover ``size`` and the rest is cropped; exact."""
    one, other = picture[0] * size[1], picture[1] * size[0]
    return Fraction(min(one, other), max(one, other))


def choose_size(picture: Sides, sizes: Sequence[Sides]) -> Sides:
    """The size of the nearest aspect ratio: the one that keeps most of the picture.

    Of several with the same share the largest that the picture covers without being scaled up, else the smallest; then
    the taller one. The order of ``sizes`` does not matter, and fractions are exact, so that it is always the same one.
    """

    def rank(size: Sides) -> tuple[Fraction, bool, int, int]:
        area, covers = size[0] * size[1], picture[0] >= size[0] and picture[1] >= size[1]
        return kept_share(picture, size), covers, area if covers else -area, size[0]

    return max(sizes, key=rank)


def generate_sizes(area: int, step: int, max_ratio: float) -> tuple[Sides, ...]:
    """Sizes of at most ``area`` pixels, sides in multiples of ``step``, the longer at most ``max_ratio`` times the
    shorter: the largest square, and for each shorter side the largest longer one. The first that is cut to the ratio is
    the last, as the next ones have less area and are hardly wider: of a whole-number ratio it has that very ratio.
    Sorted; empty: none fits."""
    square = math.isqrt(area) // step * step
    if square == 0:
        return ()
    found, widest = {(square, square)}, (square, square)
    for short in range(square, 0, -step):
        fitting = area // short // step * step
        long = min(fitting, math.floor(max_ratio * short + 1e-6) // step * step)
        if long * widest[0] > widest[1] * short:
            found |= {(short, long), (long, short)}
            widest = (short, long)
        if long < fitting:
            break
    return tuple(sorted(found))
