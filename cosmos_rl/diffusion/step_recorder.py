"""A recorder that keeps what a policy gradient needs of a sampling run."""

import functools
from collections.abc import Sequence, Set

import torch
from torch import Tensor

from cosmos_rl.diffusion.kernels import Kernel, StepFn, Transition


class StepRecorder:
    """Keeps what some steps of one sampling run were made of, and may take the others without noise.

    Coefficients are kept too, so that training cannot take another step than sampling did.
    """

    def __init__(self, indices: Sequence[int], *, keep_velocity: bool, elsewhere: Kernel | None = None) -> None:
        """
        Args:
            indices: steps that are recorded.
            keep_velocity: also keep the sampling policy's velocities.
            elsewhere: the kernel of the other steps; None: the same one.
        """
        self.indices = tuple(indices)
        self._keep_velocity = keep_velocity
        self._elsewhere = elsewhere
        self._kernel: Kernel | None = None
        self._kept: dict[str, list[Tensor]] = {}

    def restrict(self, kernel: Kernel) -> Kernel:
        """The kernel at the recorded steps, and the other one elsewhere; before ``wrap``."""
        self._kernel = kernel
        if self._elsewhere is None:
            return kernel
        return functools.partial(_compose, kernel, self._elsewhere, frozenset(self.indices))

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
                self._keep(index, sigmas, latents, velocity, noise)
            return step_fn(velocity, latents, index, sigmas, history=history, noise=noise)

        return step

    def _keep(
        self, index: int, sigmas: Sequence[float], latents: Tensor, velocity: Tensor, noise: Tensor | None
    ) -> None:
        assert self._kernel is not None, "restrict comes first"
        if noise is None:
            raise ValueError(f"sampling step {index} is to be trained and has no noise")
        transition, count = self._kernel(index, sigmas), len(latents)
        numbers = {"g": transition.g, "s": transition.s, "next": sigmas[index + 1]}
        kept = {name: torch.full((count,), value, dtype=torch.float64) for name, value in numbers.items()}
        tensors = {"state": latents, "noise": noise}
        if self._keep_velocity:
            tensors["velocity"] = velocity
        kept |= {name: value.to("cpu", torch.float32, copy=True) for name, value in tensors.items()}
        kept["step"] = torch.full((count,), index)
        for name, value in kept.items():
            self._kept.setdefault(name, []).append(value)

    def recorded(self) -> dict[str, Tensor]:
        """Hands over ``state``, ``noise`` and perhaps ``velocity`` ``[N, K, C, ...]``; ``step`` int64 ``[N, K]``; and
        float64 ``[N, K]`` of the steps ``z' = ... + g v + s noise``: ``g``, ``s``, and ``next``, the sigma after it."""
        return {name: torch.stack(self._kept.pop(name), dim=1) for name in list(self._kept)}  # never all of it twice


def _compose(chosen: Kernel, other: Kernel, indices: Set[int], index: int, sigmas: Sequence[float]) -> Transition:
    kernel = chosen if index in indices else other
    return kernel(index, sigmas)
