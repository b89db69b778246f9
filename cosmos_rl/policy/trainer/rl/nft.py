"""DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117, algorithm 1): sample with the old policy, turn advantages into
r in [0, 1], and regress the trained velocity towards what good samples say and away from what bad ones say.
See docs/algorithms/nft.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import optimality
from cosmos_rl.algorithms.decay import old_policy_decay
from cosmos_rl.algorithms.forward_process import norm_penalty
from cosmos_rl.algorithms.nft import nft_loss, norm_ratio, velocity_kl
from cosmos_rl.diffusion.schedule import mix
from cosmos_rl.diffusion.step_selection import spread_levels
from cosmos_rl.distributed import randomness
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.policies import Policies, PolicyName
from cosmos_rl.policy.trainer.rl.algorithm import Draws, MicroBatch, Rows, Share, Terms


@dataclass(frozen=True)
class DiffusionNft:
    """The settings of the loss, and the answers to what a step asks (``Algorithm``)."""

    beta: float
    """Strength of the guidance that is learnt."""
    advantage_low: float
    advantage_high: float
    decay_type: int
    """How the old policy follows the trained one."""
    num_sigmas: int
    """Sigmas at which each sample is trained."""
    adaptive_weight: bool = True
    even_levels: bool = False
    """Spread the sigmas evenly over samples, in place of a draw for each."""
    norm_weight: float = 0.0
    """Of the penalty on velocities that are larger than the reference's."""

    name: ClassVar[str] = "DiffusionNFT"
    purpose: ClassVar[str] = "nft"
    neutral: ClassVar[float] = 0.5
    maxima: ClassVar[tuple[str, ...]] = ("policy_loss", "unweighted_policy_loss", "kl_loss")
    in_pairs: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """The keys of ``[policy.diffusers]`` and ``[train.train_policy]`` that it reads."""
        job, diffusers = online_table(config), config.policy.diffusers
        bounds = (job.advantage_low, job.advantage_high)
        decay, levels = diffusers.weight_copy_decay_type, diffusers.trained_levels
        further = {"even_levels": diffusers.even_levels, "norm_weight": job.norm_penalty}
        return cls(diffusers.nft_beta, *bounds, decay, levels, **further)

    @property
    def rollout_policy(self) -> PolicyName:
        """The old policy, whose samples the equations are about."""
        return "old"

    @property
    def guidance(self) -> float:
        """None: what is trained is the model without guidance."""
        return 1.0

    @property
    def trained_steps(self) -> tuple[int, ...]:
        """It needs only the finished samples."""
        return ()

    def recorder(self, draws: Draws) -> None:
        """Finished samples are enough."""

    def frozen(self, *, old_is_current: bool, kl_beta: float) -> tuple[PolicyName, ...]:
        """The old policy where it is another one, the reference where its distance has a weight."""
        names: list[PolicyName] = []
        if not old_is_current:
            names.append("old")
        if kl_beta > 0.0 or self.norm_weight > 0.0:
            names.append("reference")
        return tuple(names)

    def values(self, advantage_N: Tensor) -> Tensor:
        """r in [0, 1]."""
        return optimality(advantage_N, self.advantage_low, self.advantage_high)

    def rows(self, share: Share, *, levels: Level, draws: Draws, number: int) -> Rows:
        """``num_sigmas`` of the levels for each sample: one of every sample, then the next one."""
        total = len(levels.sigma)
        drawn = self._choose_levels(share, total, draws.key(f"{self.purpose}/{number}"))
        pairs = [(row, drawn[row][j]) for j in range(self.num_sigmas) for row in range(len(drawn))]
        order = torch.tensor([row for row, _ in pairs])
        data = {name: value[share.row[order]] for name, value in share.data.items()}
        if share.rejected is not None:
            data |= {f"{name}_rejected": value[share.rejected[order]] for name, value in share.data.items()}
        return Rows(
            prompts=[share.prompts[row] for row, _ in pairs],
            level=levels.rows(torch.tensor([index for _, index in pairs])),
            weight=share.weight[order],
            value=share.value[order],
            data=data,
            noise_ids=[share.sample_ids[row] * total + index for row, index in pairs],
            noise_key=draws.key(f"{self.purpose}/noise/{number}"),
            kl_weight=None if share.kl_weight is None else share.kl_weight[order],
            prompt_set=None if share.prompt_set is None else share.prompt_set[order],
        )

    def _choose_levels(self, share: Share, total: int, key: tuple[int, str, int]) -> list[list[int]]:
        """Indices of the ``num_sigmas`` levels of each sample."""
        seed, purpose, step = key
        if self.even_levels:
            generator = randomness.generator(seed, f"{purpose}/levels", step)
            shift = int(torch.randint(total, (), generator=generator))
            return spread_levels(share.positions, self.num_sigmas, total, shift)
        generators = (randomness.generator(seed, f"{purpose}/levels", step, one) for one in share.sample_ids)
        return [torch.randperm(total, generator=one)[: self.num_sigmas].tolist() for one in generators]

    def micro_batch(self, rows: Rows, which: slice, device: torch.device) -> MicroBatch:
        """Clean latents, noised to the rows' sigmas."""
        clean = rows.data["clean"][which].to(device)
        noise = randomness.normal(clean.shape[1:], *rows.noise_key, rows.noise_ids[which]).to(device)
        level = rows.level.rows(which).to(device)
        weight, value = (rows_R[which].to(device) for rows_R in (rows.weight, rows.value))
        kl_weight = None if rows.kl_weight is None else rows.kl_weight[which].to(device)
        state, prompts = mix(clean, noise, level.sigma), rows.prompts[which]
        return MicroBatch(state, level, weight, value, prompts, {"clean": clean}, kl_weight=kl_weight)

    def loss(
        self, velocity: Tensor, micro: MicroBatch, element_mask: Tensor | None, kl_beta: float
    ) -> tuple[Tensor, Terms]:
        """Policy loss, plus ``kl_beta`` times the distance to the reference where it was run."""
        old = micro.frozen.get("old", velocity.detach())
        loss, terms = self.policy_loss(velocity, old, micro, element_mask)
        reference = micro.frozen.get("reference")
        if reference is not None:
            distance_B = velocity_kl(velocity, reference, element_mask)
            kl_B = micro.gate(distance_B)
            loss = loss + kl_beta * (kl_B * micro.weight.to(kl_B)).sum()
            terms["kl_loss"] = kl_B.detach()
            if micro.kl_weight is not None:
                terms["reference_kl"] = distance_B.detach()
            terms["old_kl"] = velocity_kl(old, reference, element_mask)
            terms["velocity_norm_ratio"] = norm_ratio(velocity.detach(), reference, element_mask)
        if reference is not None and self.norm_weight > 0.0:
            norm_B = norm_penalty(velocity, reference, element_mask)
            loss = loss + self.norm_weight * (norm_B * micro.weight.to(norm_B)).sum()
            terms["norm_loss"] = norm_B.detach()
        return loss, terms

    def policy_loss(
        self, velocity: Tensor, old: Tensor, micro: MicroBatch, element_mask: Tensor | None
    ) -> tuple[Tensor, Terms]:
        """The sum of the rows' losses without the distance to the reference, and their terms."""
        return nft_loss(
            velocity,
            old,
            micro.data["clean"],
            micro.state,
            micro.level.sigma,
            micro.value,
            beta=self.beta,
            scale=self.advantage_high,
            element_mask=element_mask,
            adaptive_weight=self.adaptive_weight,
            weight_B=micro.weight,
        )

    def after_step(self, policies: Policies, optimizer_steps: int, means: Mapping[str, float]) -> None:
        """The old policy follows by the decay of its type."""
        policies.update_old(old_policy_decay(self.decay_type, optimizer_steps))

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is remembered."""
