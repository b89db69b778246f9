"""Online DPO: the best and the worst sample of each prompt, by reward, as a pair (Diffusion-DPO, arXiv 2311.12908). See
docs/algorithms/dpo.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from cosmos_rl.algorithms.dpo import FollowingBeta, dpo_loss
from cosmos_rl.algorithms.forward_process import norm_penalty
from cosmos_rl.algorithms.nft import norm_ratio, velocity_kl
from cosmos_rl.diffusion.schedule import mix
from cosmos_rl.distributed import randomness
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.policies import Policies, PolicyName
from cosmos_rl.policy.trainer.rl.algorithm import MicroBatch, Rows, Terms
from cosmos_rl.policy.trainer.rl.nft import DiffusionNft


@dataclass(frozen=True)
class OnlineDpo(DiffusionNft):
    """DPO on the forward process of DiffusionNFT. A row is a pair at a noise level, and ``B`` of them are ``2 B`` rows
    of a forward pass, the best samples first."""

    beta_now: FollowingBeta = field(default_factory=lambda: FollowingBeta(100.0))

    name: ClassVar[str] = "Online DPO"
    purpose: ClassVar[str] = "online_dpo"
    neutral: ClassVar[float] = 0.0
    maxima: ClassVar[tuple[str, ...]] = ("policy_loss", "kl_loss")
    in_pairs: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """The keys of ``[policy.diffusers]`` and ``[train.train_policy]`` that it reads."""
        job = online_table(config)
        return replace(super().from_config(config), beta_now=FollowingBeta(job.dpo_beta, **job.dpo_auto_beta.settings))

    @property
    def rollout_policy(self) -> PolicyName:
        """The trained one."""
        return "default"

    def frozen(self, *, old_is_current: bool, kl_beta: float) -> tuple[PolicyName, ...]:
        """The reference."""
        return ("reference",)

    def values(self, advantage_N: Tensor) -> Tensor:
        """The advantages themselves: which sample is the best is decided already."""
        return advantage_N

    def micro_batch(self, rows: Rows, which: slice, device: torch.device) -> MicroBatch:
        """Both members of some pairs, noised to the row's sigma with the same noise."""
        clean = torch.stack([rows.data[name][which] for name in ("clean", "clean_rejected")]).to(device)
        noise = randomness.normal(clean.shape[2:], *rows.noise_key, rows.noise_ids[which]).to(device)
        level = rows.level.rows(which).to(device)
        level = Level(level.t.repeat(2), level.sigma.repeat(2))
        state = mix(clean.flatten(0, 1), torch.cat([noise, noise]), level.sigma)
        weight, value = (rows_R[which].to(device) for rows_R in (rows.weight, rows.value))
        prompts = [*rows.prompts[which], *rows.prompts[which]]
        return MicroBatch(state, level, weight, value, prompts, {"clean": clean, "noise": noise})

    def loss(
        self, velocity: Tensor, micro: MicroBatch, element_mask: Tensor | None, kl_beta: float
    ) -> tuple[Tensor, Terms]:
        """DPO, plus ``kl_beta`` times the distance of both members' velocities to the reference's."""
        members, reference = (2, len(micro.weight)), micro.frozen["reference"]
        loss, terms = dpo_loss(
            velocity.unflatten(0, members),
            reference.unflatten(0, members),
            micro.data["clean"],
            micro.data["noise"],
            beta=self.beta_now.value,
            element_mask=None if element_mask is None else element_mask[: members[1]],
            weight_P=micro.weight,
        )
        if self.beta_now.target is not None:
            terms["dpo_beta"] = torch.full_like(terms["margin"], self.beta_now.value)
        ratio_B = norm_ratio(velocity.detach(), reference, element_mask).unflatten(0, members)
        terms["velocity_norm_ratio"] = ratio_B.mean(0)
        for name, factor, measure in (("kl_loss", kl_beta, velocity_kl), ("norm_loss", self.norm_weight, norm_penalty)):
            if factor > 0.0:
                value_P = measure(velocity, reference, element_mask).unflatten(0, members).mean(0)
                loss = loss + factor * (value_P * micro.weight.to(value_P)).sum()
                terms[name] = value_P.detach()
        return loss, terms

    def after_step(self, policies: Policies, optimizer_steps: int, means: Mapping[str, float]) -> None:
        """The old policy is the trained one; ``beta`` follows the margins of the step."""
        super().after_step(policies, optimizer_steps, means)
        self.beta_now.follow(means.get("train/margin_size_mean", 0.0))

    def state_dict(self) -> dict[str, Any]:
        """The size of the margins so far."""
        return self.beta_now.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the margins of a checkpoint."""
        self.beta_now.load_state_dict(state)
