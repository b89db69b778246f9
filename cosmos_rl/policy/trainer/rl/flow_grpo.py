"""Flow-GRPO (Liu et al. 2025, arXiv 2505.05470) and DDRL (arXiv 2512.04332): sample with noise between the steps, keep
some of the steps, and make those more likely that led to good samples. See ``algorithms/flow_grpo.py`` for the loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import AdvantageTransform, transform_advantages
from cosmos_rl.algorithms.decay import old_policy_decay
from cosmos_rl.algorithms.flow_grpo import StepRows, TrustRegion, flow_grpo_loss, step_divergence, step_scales
from cosmos_rl.algorithms.forward_process import norm_penalty
from cosmos_rl.algorithms.nft import norm_ratio
from cosmos_rl.diffusion.kernels import Kernel, dpm2, euler
from cosmos_rl.diffusion.step_recorder import StepRecorder
from cosmos_rl.diffusion.step_selection import StepSelection
from cosmos_rl.distributed import randomness
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.config.plan import (
    keeps_velocity,
    last_trained_step,
    moving_window,
    noisy_steps,
    samples_with_old,
    trained_steps,
)
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.policies import Policies, PolicyName
from cosmos_rl.policy.trainer.rl.algorithm import Draws, MicroBatch, Rows, Share, Terms

ELSEWHERE: Mapping[str, Kernel | None] = {"noise": None, "euler": euler, "dpm2": dpm2}
"""Kernels of the steps that are not trained; None: the kernel of those that are."""
CLIP = 1e-4
"""Of the ratio where the configuration has none: that of Flow-GRPO's authors."""


@dataclass(frozen=True)
class FlowGrpo:
    """The settings of the loss, and the answers to what a step asks (``Algorithm``).

    The velocities of the policy that sampled are recorded where it may be another one than the trained policy: in the
    first of several optimiser steps, and where there is only one, the trained velocity itself is taken in their place.
    Then the ratio is 1 exactly, although a forward pass of another batch size has other last bits.
    """

    selection: StepSelection
    region: TrustRegion
    guidance: float
    """Of sampling and of training: the ratio is that of the policy that sampled."""
    transform: AdvantageTransform
    advantage_bounds: tuple[float, float]
    elsewhere: Kernel | None
    """Of the steps that are not trained; None: the same kernel."""
    decay_type: int
    lagged: bool
    """The old policy makes the samples, and is another one than the trained policy."""
    keep_velocity: bool
    norm_weight: float = 0.0

    name: ClassVar[str] = "FlowGRPO"
    purpose: ClassVar[str] = "flow_grpo"
    neutral: ClassVar[float] = 0.0
    maxima: ClassVar[tuple[str, ...]] = ("policy_loss", "ratio_deviation", "log_ratio", "step_kl", "step_kl_nats")
    in_pairs: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """The keys of ``[policy.diffusers]`` and ``[train.train_policy]`` that it reads."""
        job, diffusers, steps = online_table(config), config.policy.diffusers, online_table(config).steps
        sample, lagged = diffusers.sample, samples_with_old(config)
        low = CLIP if job.epsilon_low is None else job.epsilon_low
        high = low if job.epsilon_high is None else job.epsilon_high
        mask = (job.kl_mask_threshold, job.kl_mask_direction)
        return cls(
            selection=StepSelection(
                noisy_steps(sample),
                steps.choose,
                trained_steps(config),
                steps.indices,
                end=last_trained_step(config),
                moving=moving_window(config),
            ),
            region=TrustRegion(low, high, *mask, scale=job.logprob_weight),
            guidance=sample.guidance_scale,
            transform=job.advantage_transform,
            advantage_bounds=(job.advantage_low, job.advantage_high),
            elsewhere=ELSEWHERE[steps.elsewhere],
            decay_type=diffusers.weight_copy_decay_type,
            lagged=lagged,
            keep_velocity=keeps_velocity(config),
            norm_weight=job.norm_penalty,
        )

    @property
    def rollout_policy(self) -> PolicyName:
        """The old policy where it is another one."""
        if self.lagged:
            return "old"
        return "default"

    @property
    def trained_steps(self) -> frozenset[int]:
        """All that its selection may choose."""
        return self.selection.candidates

    def recorder(self, draws: Draws) -> StepRecorder:
        """One choice of steps for all samples of a training step."""
        seed, purpose, step = draws.key(f"{self.purpose}/steps")
        chosen = self.selection.choose(step, randomness.generator(seed, purpose, step))
        return StepRecorder(chosen, keep_velocity=self.keep_velocity, elsewhere=self.elsewhere)

    def frozen(self, *, old_is_current: bool, kl_beta: float) -> tuple[PolicyName, ...]:
        """The reference where its distance has a weight; the old policy's velocities are recorded."""
        if kl_beta > 0.0 or self.norm_weight > 0.0:
            return ("reference",)
        return ()

    def values(self, advantage_N: Tensor) -> Tensor:
        """Transformed advantages within the bounds."""
        return transform_advantages(advantage_N, self.transform).clamp(*self.advantage_bounds)

    def rows(self, share: Share, *, levels: Level, draws: Draws, number: int) -> Rows:
        """All recorded steps: one of every sample, then the next one."""
        count, size = len(share.row), share.data["step"].shape[1]
        row_R, column_R = torch.arange(count).repeat(size), torch.arange(size).repeat_interleave(count)
        held_R = share.row[row_R]
        step_R = share.data["step"][held_R, column_R]
        names = ["state", "noise", "g", "s", "next"]
        if self.lagged or number > 0:
            names.append("velocity")
        data = {name: share.data[name][held_R, column_R] for name in names}
        return Rows(
            prompts=[share.prompts[row] for row in row_R.tolist()],
            level=levels.rows(step_R),
            weight=share.weight[row_R],
            value=share.value[row_R],
            data=data,
            kl_weight=None if share.kl_weight is None else share.kl_weight[row_R],
            prompt_set=None if share.prompt_set is None else share.prompt_set[row_R],
            sampler_step=step_R,
        )

    def micro_batch(self, rows: Rows, which: slice, device: torch.device) -> MicroBatch:
        """Recorded states, as the sampler saw them."""
        data = {name: value[which].to(device, torch.float32) for name, value in rows.data.items()}
        level = rows.level.rows(which).to(device)
        weight, value = (rows_R[which].to(device) for rows_R in (rows.weight, rows.value))
        kl_weight = None if rows.kl_weight is None else rows.kl_weight[which].to(device)
        return MicroBatch(data.pop("state"), level, weight, value, rows.prompts[which], data, kl_weight=kl_weight)

    def loss(
        self, velocity: Tensor, micro: MicroBatch, element_mask: Tensor | None, kl_beta: float
    ) -> tuple[Tensor, Terms]:
        """Policy loss, plus ``kl_beta`` times the divergence of the steps from the reference's where it was run."""
        steps = StepRows(micro.data["g"], micro.data["s"], micro.level.sigma, micro.data["next"])
        loss, terms = flow_grpo_loss(
            velocity,
            micro.data.get("velocity", velocity.detach()),
            micro.data["noise"],
            steps,
            micro.value,
            region=self.region,
            element_mask=element_mask,
            weight_B=micro.weight,
        )
        reference = micro.frozen.get("reference")
        if reference is None:
            return loss, terms
        terms["velocity_norm_ratio"] = norm_ratio(velocity.detach(), reference, element_mask)
        if kl_beta > 0.0:
            kl_B = step_divergence(velocity, reference, steps, element_mask)
            distance_B = kl_B * step_scales(self.region.scale, steps).kl_B.to(kl_B)
            kl_B = micro.gate(distance_B)
            loss = loss + kl_beta * (kl_B * micro.weight.to(kl_B)).sum()
            terms["kl_loss"] = kl_B.detach()
            if micro.kl_weight is not None:
                terms["reference_kl"] = distance_B.detach()
        if self.norm_weight > 0.0:
            norm_B = norm_penalty(velocity, reference, element_mask)
            loss = loss + self.norm_weight * (norm_B * micro.weight.to(norm_B)).sum()
            terms["norm_loss"] = norm_B.detach()
        return loss, terms

    def after_step(self, policies: Policies, optimizer_steps: int, means: Mapping[str, float]) -> None:
        """The old policy follows by the decay of its type; without one it is the trained policy."""
        decay = 0.0
        if self.lagged:
            decay = old_policy_decay(self.decay_type, optimizer_steps)
        policies.update_old(decay)

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is remembered."""


@dataclass(frozen=True)
class Ddrl(FlowGrpo):
    """Flow-GRPO that a flow-matching loss on data keeps near the data, in place of a reference: the forward KL
    divergence of DDRL, ``train.train_policy.data_term``, with ``advantage_transform`` for its exponential optimum."""

    name: ClassVar[str] = "DDRL"
    purpose: ClassVar[str] = "ddrl"
