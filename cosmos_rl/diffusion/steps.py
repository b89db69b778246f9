"""Which steps of a sampling run are trained, and a recorder that keeps what a policy gradient needs of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import Kernel, StepFn, Transition, euler

StepChoice = Literal["first", "random", "list", "window", "moving_window"]


@dataclass(frozen=True)
class StepSelection:
    """Which of the ``num_steps`` sampling steps are trained; never the last one, which has no noise."""

    num_steps: int
    choice: StepChoice = "first"
    """``first``, ``random``: so many of all. ``list``: ``indices``. ``window``: neighbours, from a random one on
    (Flow-GRPO-Fast). ``moving_window``: neighbours that move on with the training step (MixGRPO, arXiv 2507.21802)."""
    count: int = 0
    """Trained steps of ``first`` and ``random``, and size of a window."""
    indices: tuple[int, ...] = ()
    """-1 stands for a random one that is not listed."""
    end: int = 0
    """Windows and random steps lie before this step; 0: before the last one."""
    stride: int = 1
    """Steps by which a moving window moves."""
    interval: int = 25
    """Training steps between two such moves; after the last place it starts again at the first one."""

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: it names steps that there are not, or none.
        """
        listed = [index for index in self.indices if index >= 0]
        last = self.num_steps - 1
        if self.choice == "list" and (any(index >= last for index in listed) or len(set(listed)) != len(listed)):
            raise ValueError(f"trained steps: found {list(self.indices)}; allowed: different ones from 0 to {last - 1}")
        most = last if self.choice in ("first", "list") else self._end
        if not 1 <= self.size <= most:
            raise ValueError(f"trained steps: found {self.size} of {self.num_steps}; allowed: 1 to {most}")

    @property
    def size(self) -> int:
        """How many steps are trained."""
        if self.choice == "list":
            return len(self.indices)
        return self.count

    def choose(self, training_step: int, generator: torch.Generator) -> tuple[int, ...]:
        """Ascending indices for one training step."""
        last = self.num_steps - 1
        if self.choice == "first":
            return tuple(range(self.count))
        if self.choice == "random":
            return tuple(sorted(torch.randperm(self._end, generator=generator)[: self.count].tolist()))
        if self.choice == "list":
            listed = [index for index in self.indices if index >= 0]
            others = [index for index in range(last) if index not in listed]
            drawn = torch.randperm(len(others), generator=generator)[: len(self.indices) - len(listed)].tolist()
            return tuple(sorted([*listed, *(others[i] for i in drawn)]))
        starts = self._starts()
        if self.choice == "window":
            first = starts[int(torch.randint(len(starts), (), generator=generator))]
        else:
            first = starts[:: self.stride][training_step // self.interval % math.ceil(len(starts) / self.stride)]
        return tuple(range(first, first + self.count))

    @property
    def _end(self) -> int:
        """Windows and random steps lie before it."""
        return min(self.end or self.num_steps - 1, self.num_steps - 1)

    def _starts(self) -> range:
        """Where windows may begin."""
        return range(self._end - self.count + 1)


class StepRecorder:
    """Keeps states, noise and velocities of some steps of one sampling run, and makes the other ones noise-free."""

    def __init__(self, indices: Sequence[int], *, keep_velocity: bool, noise_elsewhere: bool) -> None:
        """
        Args:
            indices: steps that are recorded.
            keep_velocity: also keep the sampling policy's velocities.
            noise_elsewhere: take the other steps with the kernel's noise too; else by the ODE.
        """
        self.indices = tuple(indices)
        self._keep_velocity = keep_velocity
        self._noise_elsewhere = noise_elsewhere
        self._kept: dict[str, list[Tensor]] = {}

    def restrict(self, kernel: Kernel) -> Kernel:
        """The kernel with noise only where this recorder allows it."""
        if self._noise_elsewhere:
            return kernel

        def restricted(index: int, sigmas: Sequence[float]) -> Transition:
            if index in self.indices:
                return kernel(index, sigmas)
            return euler(index, sigmas)

        return restricted

    def wrap(self, step_fn: StepFn) -> StepFn:
        """``step_fn``, recorded."""

        def step(
            velocity: Tensor,
            latents: Tensor,
            index: int,
            sigmas: Sequence[float],
            *,
            history: Tensor | None,
            noise: Tensor | None,
        ) -> tuple[Tensor, Tensor | None]:
            if index in self.indices:
                self._keep(index, latents, velocity, noise)
            return step_fn(velocity, latents, index, sigmas, history=history, noise=noise)

        return step

    def _keep(self, index: int, latents: Tensor, velocity: Tensor, noise: Tensor | None) -> None:
        if noise is None:
            raise ValueError(f"sampling step {index} is to be trained and has no noise")
        kept = {"state": latents, "noise": noise}
        if self._keep_velocity:
            kept["velocity"] = velocity
        for name, value in kept.items():
            self._kept.setdefault(name, []).append(value.to("cpu", torch.float32, copy=True))

    def recorded(self) -> dict[str, Tensor]:
        """``state``, ``noise`` and perhaps ``velocity`` ``[N, K, C, ...]``, and ``step`` int64 ``[N, K]``."""
        stacked = {name: torch.stack(values, dim=1) for name, values in self._kept.items()}
        count = len(next(iter(stacked.values())))
        return {**stacked, "step": torch.tensor(self.indices).expand(count, -1).clone()}
