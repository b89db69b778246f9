"""The watch over a reinforcement-learning run: does the reward rise because the policy cheats?

Three measures, each against its value at the start: the flow-matching loss of held-out samples (a policy that left the
data predicts them badly), the spread of the samples of one prompt (a collapsed policy makes one picture), and rewards
that are not trained on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_matching import flow_matching_loss
from cosmos_rl.diffusion.schedule import mix
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import WatchConfig
from cosmos_rl.policy.model.diffusers.velocity_model import VelocityModel
from cosmos_rl.policy.trainer.diffusers_trainer.dealing import dealt
from cosmos_rl.rollout.sampler import Conditions

LEVELS = (0.125, 0.375, 0.625, 0.875)
"""Noise levels at which the held-out loss is measured."""


@dataclass(frozen=True)
class HeldOut:
    """Samples whose loss is measured; the same on all ranks."""

    latents: Tensor
    """``[W, C, ...]`` float32 on the CPU."""
    prompts: tuple[str, ...]


class Watch:
    """Measures, compares with the start, and says what is wrong in one sentence."""

    def __init__(
        self,
        config: WatchConfig,
        model: VelocityModel,
        context: Context,
        conditions: Conditions,
        *,
        seed: int,
        chunk: int,
        latent_shape: Sequence[int],
    ) -> None:
        self._config = config
        self._model = model
        self._context = context
        self._conditions = conditions
        self._seed = seed
        self._chunk = chunk
        self.held_out = HeldOut(torch.zeros(config.samples, *latent_shape), ())
        self._base: dict[str, float] = {}
        self._spreads: list[float] = []
        self._untrained: dict[str, float] = {}
        self._untrained_good = 0  # the last step at which none of them had fallen too far

    def hold_out(self, held_out: HeldOut) -> None:
        """Samples to measure the loss on, before the first step or again after a resume."""
        self.held_out = held_out

    def begin(self) -> None:
        """Measure the start, once, before any training."""
        self._base = {"loss": self.loss()}

    @torch.no_grad()
    def loss(self) -> float:
        """Mean flow-matching loss of the held-out samples under the trained policy; same levels, same noise always."""
        total, weight = 0.0, 0.0
        latents, prompts = self.held_out.latents, self.held_out.prompts
        with self._model.evaluating():
            for ids, counts in dealt(len(prompts), self._chunk, self._context.dp_rank, self._context.dp_size):
                clean = latents[ids].to(self._model.device)
                cond = self._conditions([prompts[i] for i in ids])
                for number, level in enumerate(LEVELS):
                    noise = randomness.normal(clean.shape[1:], self._seed, "watch/noise", number, ids).to(clean)
                    sigma = torch.full((len(ids),), level, device=clean.device)
                    velocity = self._model.velocity(mix(clean, noise, sigma), sigma, cond)
                    loss_sum, count = flow_matching_loss(velocity, clean, noise, element_mask=cond.element_mask)
                    total, weight = total + counts * float(loss_sum), weight + counts * float(count)
        total, weight = self._context.sum_over_ranks([total, weight])
        return total / weight

    def note_spread(self, value: float) -> None:
        """The diversity of a step's samples; the mean of a window is compared with that of the first one."""
        self._spreads.append(value)

    def note_untrained(self, step: int, scores: Mapping[str, float]) -> int:
        """Validation rewards that are not trained on, as measured after ``step`` steps; the first ones are the start.

        Returns the last step at which none of them had fallen too far.
        """
        self._untrained = dict(scores)
        for name, value in scores.items():
            self._base.setdefault(f"untrained/{name}", value)
        if not any(map(self._has_fallen, scores)):
            self._untrained_good = step
        return self._untrained_good

    def _has_fallen(self, name: str) -> bool:
        base = self._base[f"untrained/{name}"]
        return math.isfinite(base) and base - self._untrained[name] > self._config.max_untrained_drop * abs(base)

    def due(self, done: int) -> bool:
        """Whether to look after ``done`` steps."""
        return self._config.enable and done % self._config.freq == 0

    def look(self) -> tuple[dict[str, float], list[str]]:
        """(metrics, what is wrong: one sentence each). All ranks must call it; all get the same answer."""
        config, metrics, wrong = self._config, {}, []
        ratio = self.loss() / max(self._base["loss"], 1e-12)
        metrics["watch/loss_ratio"] = ratio
        if not ratio <= config.max_loss_ratio:  # NaN is an alarm too
            wrong.append(
                f"the held-out flow-matching loss is {ratio:.3g} times that of the start (watch.max_loss_ratio = "
                f"{config.max_loss_ratio:g}): the policy is leaving what the model knows"
            )
        spread = sum(self._spreads) / max(len(self._spreads), 1)
        first = self._base.setdefault("spread", spread)
        self._spreads = []
        if first > 0:
            metrics["watch/diversity_ratio"] = share = spread / first
            if not share >= config.min_diversity_ratio:
                wrong.append(
                    f"the samples of one prompt differ only {share:.3g} times as much as at the start "
                    f"(watch.min_diversity_ratio = {config.min_diversity_ratio:g}): the policy collapses"
                )
        for name, value in self._untrained.items():
            metrics[f"watch/untrained_reward/{name}"] = value
            if self._has_fallen(name):
                first = self._base[f"untrained/{name}"]
                wrong.append(
                    f"the reward {name}, which is not trained on, fell from {first:.4g} to {value:.4g} "
                    f"(watch.max_untrained_drop = {config.max_untrained_drop:g}): the trained reward is being cheated"
                )
        return metrics, wrong

    def progress(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        return {
            "base": self._base,
            "spreads": self._spreads,
            "untrained": self._untrained,
            "untrained_good": self._untrained_good,
        }

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        """Take over the measures of a checkpoint."""
        self._base = dict(progress["base"])
        self._spreads = list(progress["spreads"])
        self._untrained = dict(progress["untrained"])
        self._untrained_good = int(progress["untrained_good"])
