"""What training, sampling and every loss ask of a flow model, whoever fulfils it.

Shapes: B rows of a batch, N samples, T frames; a state is ``[B, ...]`` in the model's own layout (packed or not), of
which only the first axis means anything to a caller.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn


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


class Cond(Protocol):
    """Conditions of ``size`` rows: opaque, made by ``FlowModel.encode``."""

    @property
    def size(self) -> int: ...

    def rows(self, index: Tensor) -> Self:
        """The conditions of the rows ``index`` (int64 ``[K]``), repeats allowed."""
        ...

    def to(self, device: torch.device | str) -> Self: ...


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


CondT = TypeVar("CondT", bound=Cond)
"""The conditions of one model: another model cannot read them."""


class FlowModel(Protocol[CondT]):
    """A trainable velocity field with conditions, a sampling loop, an encoder and a decoder of media."""

    @property
    def denoisers(self) -> Mapping[str, nn.Module]:
        """The parts that are trained, by their names in the pipeline; two for a mixture of experts."""
        ...

    @property
    def path(self) -> Literal["flow", "edm"]:
        """``x = (1 - s) x0 + s e``, or ``x = x0 + s e``."""
        ...

    @property
    def guidance_off(self) -> float | None:
        """The value that switches guidance off; None where the pipeline has no such argument."""
        ...

    @property
    def state_dtype(self) -> torch.dtype: ...

    def encode(
        self, prompts: Sequence[str], negatives: Sequence[str] | None = None, guidance: float | None = None
    ) -> CondT:
        """Conditions of the prompts, made as the pipeline makes them at that guidance (None: switched off)."""
        ...

    def levels(self, steps: int, size: Size) -> list[Level]:
        """The pipeline's own ``steps + 1`` levels, the last one clean."""
        ...

    def training_level(self, sigma: Tensor) -> Level:
        """The level at any sigma, float32 ``[]`` or ``[B]``."""
        ...

    def velocity(self, state: Tensor, level: Level, cond: CondT, guidance: float | None, size: Size) -> Tensor:
        """``dx/dsigma`` like ``state``, differentiable, the bits of the rollout. Rows may have several levels."""
        ...

    def rollout(
        self,
        cond: CondT,
        generators: Sequence[torch.Generator],
        steps: int,
        guidance: float | None,
        transition: Transition | None,
        size: Size,
        *,
        decode: bool = True,
        keep_velocities: bool = False,
    ) -> Rollout:
        """The pipeline's own loop with our transition inside (None: its own). Start noise comes from N generators."""
        ...

    def encode_media(self, media: Tensor, size: Size) -> Tensor:
        """Media ``[N, (T,) 3, H, W]`` in [-1, 1] -> clean states."""
        ...

    def decode(self, state: Tensor, size: Size) -> Tensor:
        """Clean states -> media ``[N, (T,) 3, H, W]`` in [0, 1]."""
        ...
