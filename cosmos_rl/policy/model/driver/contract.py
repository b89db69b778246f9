"""Values that training, sampling and every loss exchange with a model: noise levels, sizes, media, rollouts.

Shapes: B rows of a batch, N samples, T frames; a state is ``[B, ...]`` in the model's own layout (packed or not), of
which only the first axis means anything to a caller.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Level(NamedTuple):
    """A noise level. Never the sigma alone: some schedulers round ``t``, and it must be the one of the rollout."""

    t: Tensor
    """As the pipeline's scheduler gives it; ``[]`` or ``[B]``."""
    sigma: Tensor
    """float32; ``[]`` or ``[B]``."""

    def rows(self, index: Tensor | slice | int) -> "Level":
        """Some of ``[B]`` levels; one ``[]`` for a number."""
        return Level(self.t[index], self.sigma[index])

    def expand(self, count: int) -> "Level":
        """One level as ``[count]`` equal ones."""
        return Level(self.t.expand(count), self.sigma.expand(count))

    def to(self, device: torch.device | str) -> "Level":
        """The same on another device."""
        return Level(self.t.to(device), self.sigma.to(device))


def stack_levels(levels: Sequence[Level]) -> Level:
    """Levels ``[]`` as one ``[B]``."""
    return Level(torch.stack([level.t for level in levels]), torch.stack([level.sigma for level in levels]))


class Size(NamedTuple):
    """Of the media, in pixels."""

    height: int
    width: int
    frames: int = 1


class Medium(NamedTuple):
    """What a sample is conditioned on besides its text: an image, or the first frames of a video."""

    frames: Tensor
    """uint8 ``[k, H, W, 3]`` on the CPU, of the size that is sampled."""
    clean: int
    """How many latent frames they make: those that are given and not generated."""


class Rollout(NamedTuple):
    """One sampling of N conditions."""

    media: Tensor | None
    """``[N, 3, H, W]`` or ``[N, T, 3, H, W]`` in [0, 1]; None when it was not decoded."""
    states: list[Tensor]
    """``steps + 1`` states ``[N, ...]``, noise first, in the state's own dtype."""
    levels: list[Level]
    """``steps + 1`` levels; the last one is clean."""
    velocities: list[Tensor] | None
    """``steps`` velocities, where they were asked for."""


class Transition(Protocol):
    """Our step of the sampling loop (ODE or SDE). Whatever it wants to keep, it keeps itself."""

    def __call__(self, index: int, velocity: Tensor, level: Level, next_sigma: Tensor, state: Tensor) -> Tensor:
        """The next state, like ``state`` ``[N, ...]``, which must not be changed in place."""
        ...
