"""Short clips of a coloured circle or square that moves: what the tiny video autoencoder was trained on.

`examples/moving_shapes` learns from them too. The captions name colour, form and direction, so a reward can be
computed from the pixels alone.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COLOURS = {"red": (230, 50, 50), "green": (50, 200, 70), "blue": (60, 90, 240), "yellow": (235, 215, 50)}
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Change of (row, column) per unit of way."""
FORMS = ("circle", "square")
FRAMES, SIZE = 9, 32
WAY = (10.0, 16.0)
"""Pixels between the first and the last frame, from ... to."""


class Shape(NamedTuple):
    """What a clip shows."""

    colour: str
    form: str
    direction: str

    @property
    def caption(self) -> str:
        """``a red circle moving left``."""
        return f"a {self.colour} {self.form} moving {self.direction}"


ALL_SHAPES = [Shape(colour, form, direction) for colour in COLOURS for form in FORMS for direction in DIRECTIONS]


def draw_clip(shape: Shape, random: np.random.Generator) -> NDArray[np.uint8]:
    """A clip uint8 ``[FRAMES, SIZE, SIZE, 3]`` with a random place, size, speed and grey of the background."""
    radius, grey = random.uniform(4, 5.5), random.uniform(10, 40)
    middle = (SIZE - 1) / 2 + random.uniform(-3, 3, 2)
    ways = np.linspace(-0.5, 0.5, FRAMES)[:, None] * np.array(DIRECTIONS[shape.direction]) * random.uniform(*WAY)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    clip = np.empty((FRAMES, SIZE, SIZE, 3))
    for frame, (row, column) in zip(clip, middle + ways, strict=True):
        outside = np.maximum(abs(rows - row), abs(columns - column)) - 0.9 * radius
        if shape.form == "circle":
            outside = np.hypot(rows - row, columns - column) - radius
        cover = np.clip(0.5 - outside, 0, 1)[..., None]  # smooth over one pixel
        frame[:] = cover * np.array(COLOURS[shape.colour]) + (1 - cover) * grey
    return clip.round().astype(np.uint8)
