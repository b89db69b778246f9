"""What an algorithm of online reinforcement learning decides. The rest of a step is in `online`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from cosmos_rl.data.given import PromptKey
from cosmos_rl.diffusion.step_recorder import StepRecorder
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.policies import Policies, PolicyName

Terms = dict[str, Tensor]
"""What is reported of ``B`` rows, each ``[B]`` and without a gradient. ``policy_loss`` is always there, ``kl_loss``
where the loss has that term, ``velocity_norm_ratio`` where a reference was run anyway."""

VELOCITY_GRADIENT = "velocity_gradient"
"""The term that the backward pass adds where rows are steps of the sampler."""


@dataclass(frozen=True)
class Rows:
    """``R`` rows of one rank in one optimiser step, in the order in which they are run: a sample at a noise level."""

    prompts: Sequence[PromptKey]
    level: Level
    """``[R]``."""
    weight: Tensor
    """``[R]``; 0 for rows that only fill up."""
    value: Tensor
    """``[R]``: what the algorithm makes of the sample's advantage."""
    data: Mapping[str, Tensor]
    """``[R, ...]`` on any device: clean latents or recorded steps."""
    noise_ids: Sequence[int] = ()
    """Keys of the rows' noise, where the algorithm draws some."""
    noise_key: tuple[int, str, int] = (0, "", 0)
    """(seed, purpose, step) of that noise."""
    kl_weight: Tensor | None = None
    """``[R]``: factor of the distance to the reference; None: 1 each."""
    prompt_set: Tensor | None = None
    """int64 ``[R]``: which of several prompt sets each is of; None: there is one."""
    sampler_step: Tensor | None = None
    """int64 ``[R]``: which step of the sampler each is, from 0 on; None: they are no such steps."""


@dataclass(frozen=True)
class MicroBatch:
    """``B`` rows of one forward pass, on the device, with what the frozen policies predict for them."""

    state: Tensor
    """Where the velocity is taken, ``[B, C, ...]``; of pairs ``[2 B, C, ...]``, as level and prompts."""
    level: Level
    """``[B]``."""
    weight: Tensor
    """``[B]``."""
    value: Tensor
    """``[B]``."""
    prompts: Sequence[PromptKey]
    data: Mapping[str, Tensor]
    frozen: Mapping[PolicyName, Tensor] = field(default_factory=dict)
    """Velocities at ``state``, without a gradient."""
    kl_weight: Tensor | None = None
    """``[B]``; None: 1 each."""

    def gate(self, kl_B: Tensor) -> Tensor:
        """Distances to the reference ``[B]``, as far as they count."""
        if self.kl_weight is None:
            return kl_B
        return kl_B * self.kl_weight.to(kl_B)


@dataclass(frozen=True)
class Draws:
    """Keys of the random draws of a training step."""

    seed: int
    step: int
    rewinds: int = 0
    """How often the run was rewound: each time it draws other numbers."""

    def key(self, purpose: str) -> tuple[int, str, int]:
        """(seed, purpose, step), as ``randomness`` takes it."""
        if self.rewinds:
            purpose = f"{purpose}/{self.rewinds}"
        return self.seed, purpose, self.step


@dataclass(frozen=True)
class Share:
    """This rank's samples of one optimiser step; every rank has as many."""

    sample_ids: Sequence[int]
    prompts: Sequence[PromptKey]
    data: Mapping[str, Tensor]
    """``[samples that this rank holds, ...]``; not a copy, as recorded steps are large."""
    row: Tensor
    """int64 ``[S]``: where in ``data`` each sample is."""
    value: Tensor
    """``[S]``."""
    weight: Tensor
    """``[S]``; 0 for samples that only fill up."""
    positions: Sequence[int]
    """Where each is among the samples of the optimiser step over all ranks."""
    rejected: Tensor | None = None
    """int64 ``[S]``: where in ``data`` the rejected sample of each pair is, of an algorithm that learns from pairs."""
    kl_weight: Tensor | None = None
    """``[S]``: factor of the distance to the reference; None: 1 each."""
    prompt_set: Tensor | None = None
    """int64 ``[S]``: which of several prompt sets each is of; None: there is one."""


class Algorithm(Protocol):
    """One object per run; holds settings, and no tensors."""

    name: ClassVar[str]
    purpose: ClassVar[str]
    """What the keys of its random draws begin with."""
    neutral: ClassVar[float]
    """The value of a sample that gives no gradient at the first step."""
    maxima: ClassVar[tuple[str, ...]]
    """Terms of which the largest value is reported too."""
    in_pairs: ClassVar[bool]
    """Whether it learns from the best sample of each group next to the worst one."""

    @property
    def rollout_policy(self) -> PolicyName:
        """Which policy makes the samples."""
        ...

    @property
    def guidance(self) -> float:
        """Of the velocities that are trained; 1: none."""
        ...

    @property
    def trained_steps(self) -> Collection[int]:
        """Sampling steps that are trained in some step of the run; empty where none are."""
        ...

    def recorder(self, draws: Draws) -> StepRecorder | None:
        """What keeps the sampling steps that are trained, a new one for each rollout; None: none are."""
        ...

    def frozen(self, *, old_is_current: bool, kl_beta: float) -> tuple[PolicyName, ...]:
        """Policies whose velocity the loss needs; never one that is the trained one, or that has no weight."""
        ...

    def values(self, advantage_N: Tensor) -> Tensor:
        """Advantages as they are used, NaN where missing -> what the loss takes; float64 ``[N]``."""
        ...

    def rows(self, share: Share, *, levels: Level, draws: Draws, number: int) -> Rows:
        """What optimiser step ``number`` of a training step is to learn from.

        Args:
            levels: of the sampler, without the clean one.
            draws: keys of all random draws.
        """
        ...

    def micro_batch(self, rows: Rows, which: slice, device: torch.device) -> MicroBatch:
        """Some rows, ready for a forward pass."""
        ...

    def loss(
        self, velocity: Tensor, micro: MicroBatch, element_mask: Tensor | None, kl_beta: float
    ) -> tuple[Tensor, Terms]:
        """The sum of the rows' losses, each with its weight, and their terms."""
        ...

    def after_step(self, policies: Policies, optimizer_steps: int, means: Mapping[str, float]) -> None:
        """Move the old policy after a training step; so many optimiser steps were applied since the start.

        ``means``: of the step's terms over the rows of all ranks, by the keys of the metrics.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it remembers of the steps so far (JSON-ready)."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what a checkpoint did."""
        ...
