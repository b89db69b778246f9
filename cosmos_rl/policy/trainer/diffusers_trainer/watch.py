"""The watch over a reinforcement-learning run: does the reward rise because the policy cheats?

Three measures, each against its value at the start: the flow-matching loss of held-out samples (a policy that left the
data predicts them badly), the spread of the samples of one prompt (a collapsed policy makes one picture), and rewards
that are not trained on. The rules are in `watch_rules`.

Every look measures the same points with the same noise, so that a policy that did not change gives the same numbers and
no rule alarms at chance. For the spread this needs samples of its own, a few of a few prompts: those that a step trains
on are of other prompts each time, which differ in their spread by themselves; most prompts of a large set never come
twice in a run, and only those of the first step are made before the first update. Half as many samples as are held out,
in as many steps as a rollout's, cost about as much as the held-out loss: at ordinary sizes less than a hundredth of the
steps between two looks. `train/network_evaluations` counts them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_matching import element_mean
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.diffusion.schedule import mix
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import WatchConfig
from cosmos_rl.policy.model.diffusers.velocity_model import VelocityModel
from cosmos_rl.policy.trainer.diffusers_trainer.dealing import over_ranks
from cosmos_rl.policy.trainer.diffusers_trainer.watch_rules import LEVELS, Look, Untrained, compared
from cosmos_rl.rollout.sampler import Conditions, Rollouts, RolloutSampler, Slot, diversity, grouped
from cosmos_rl.utils.logging import logger

GROUP = 4
"""Samples of one prompt whose spread is measured, or more where there are few prompts."""


@dataclass(frozen=True)
class HeldOut:
    """Samples whose loss is measured; the same on all ranks."""

    latents: Tensor
    """``[W, C, ...]`` float32 on the CPU."""
    prompts: tuple[str, ...]
    source: str = ""
    """What they were made of, as text that is the same wherever they are encoded; empty: the latents themselves."""

    @property
    def digest(self) -> str:
        """Another one for other samples."""
        source = self.source or hashlib.sha256(self.latents.numpy().tobytes()).hexdigest()
        return digest_of(source, *self.prompts)


def digest_of(*parts: object) -> str:
    """A short digest of texts and of what has a fixed ``repr``."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def spread_slots(prompts: Sequence[PromptRecord], samples: int) -> list[Slot]:
    """The samples whose spread is measured: half of ``samples``, ``GROUP`` of each prompt."""
    total = max(samples // 2, GROUP)
    few = prompts[: max(min(len(prompts), total // GROUP), 1)]
    return grouped(enumerate(few), total // len(few))


class Watch:
    """Measures, and compares with the start."""

    def __init__(
        self,
        config: WatchConfig,
        model: VelocityModel,
        context: Context,
        conditions: Conditions,
        *,
        sampler: RolloutSampler,
        evaluator: RolloutSampler,
        prompts: Sequence[PromptRecord],
        seed: int,
        chunk: int,
        rollout_chunk: int,
        latent_shape: Sequence[int],
    ) -> None:
        """``sampler`` makes samples as a step does, ``evaluator`` as validation does."""
        self._config = config
        self._model = model
        self._context = context
        self._conditions = conditions
        self._sampler, self._evaluator = sampler, evaluator
        self._slots = spread_slots(prompts, config.samples)
        self._own_prompts = tuple(prompts[i % len(prompts)].prompt for i in range(config.samples))
        self._seed = seed
        self._chunk, self._rollout_chunk = chunk, rollout_chunk
        self.held_out = HeldOut(torch.zeros(config.samples, *latent_shape), ())
        self._start: dict[str, Any] = {}
        self.untrained = Untrained(config)

    def begin(self, step: int, held_out: HeldOut | None) -> None:
        """Measure the start, before any training. After a resume what is known stays, and what is new is measured.

        Args:
            step: steps done.
            held_out: samples to measure the loss on; None: the model's own as it was at the start.
        """
        self.held_out = held_out or self._own_samples()
        # the ranks must agree, and the main one's digests are those that are saved
        samples, slots = self._context.as_on_main(f"{self.held_out.digest} {self._slots_digest()}").split()
        new = []
        if self._start.get("held_out") != samples:
            loss, norm = self.held_out_loss()
            self._start |= {"held_out": samples, "loss": loss, "norm": norm.tolist()}
            new.append("the held-out samples")
        if self._start.get("slots") != slots:
            self._start |= {"slots": slots, "spread": self.spread()}
            new.append("the samples whose spread is measured")
        if new and step > 0:
            logger.warning(
                f"{' and '.join(new)} are not those of the run that is resumed: the watch compares them with what they "
                f"are at step {step} (train.train_policy.watch)"
            )

    def _own_samples(self) -> HeldOut:
        """Those that came with the checkpoint, or else samples of the model as it is now; the same on all ranks."""
        saved = HeldOut(self.held_out.latents, self._own_prompts, "the model's own")
        if self._start.get("held_out") == saved.digest:
            return saved
        slots = [Slot(i, i, prompt, {}) for i, prompt in enumerate(self._own_prompts)]
        latents = self._sampled(self._evaluator, slots, "watch/sample").latents
        return HeldOut(latents, self._own_prompts, saved.source)

    def _sampled(self, sampler: RolloutSampler, slots: Sequence[Slot], purpose: str) -> Rollouts:
        """Of all ranks; the same on all of them."""

        def made(ids: Sequence[int], _: int) -> tuple[Tensor, Tensor]:
            found = sampler.sample([slots[i] for i in ids], purpose, 0)
            return found.latents, found.media

        with self._model.evaluating():
            return Rollouts(tuple(slots), *over_ranks(len(slots), self._rollout_chunk, self._context, made))

    def _slots_digest(self) -> str:
        prompts = [f"{slot.sample_id} {slot.group} {slot.prompt}" for slot in self._slots]
        return digest_of(self._seed, self._sampler.spec, *prompts)

    @torch.no_grad()
    def held_out_loss(self) -> tuple[float, Tensor]:
        """Mean flow-matching loss of the held-out samples under the trained policy, and the velocities' root mean
        square ``[W, len(LEVELS)]``; same levels, same noise always."""
        latents, prompts = self.held_out.latents, self.held_out.prompts

        def made(ids: Sequence[int], _: int) -> tuple[Tensor]:
            clean = latents[list(ids)].to(self._model.device)
            cond, found = self._conditions([prompts[i] for i in ids]), []
            for number, level in enumerate(LEVELS):
                noise = randomness.normal(clean.shape[1:], self._seed, "watch/noise", number, ids).to(clean)
                sigma = torch.full((len(ids),), level, device=clean.device)
                velocity = self._model.velocity(mix(clean, noise, sigma), sigma, cond).float()
                squares = [(velocity - (noise - clean)) ** 2, velocity**2]
                found.append(torch.stack([element_mean(square, cond.element_mask) for square in squares], dim=1))
            return (torch.stack(found, dim=1),)

        with self._model.evaluating():
            (found,) = over_ranks(len(prompts), self._chunk, self._context, made)
        return float(found[..., 0].double().mean()), found[..., 1].double().sqrt()

    def spread(self) -> float:
        """How much the samples of one prompt differ; same prompts, same noise always."""
        media = self._sampled(self._sampler, self._slots, "watch/spread").media
        return diversity(media, [slot.group for slot in self._slots])

    def due(self, done: int) -> bool:
        """Whether to look after ``done`` steps."""
        return self._config.enable and done % self._config.freq == 0

    def look(self) -> tuple[dict[str, float], list[str]]:
        """(metrics, what is wrong: one sentence each). All ranks must call it; all get the same answer."""
        start = Look(self._start["loss"], torch.tensor(self._start["norm"], dtype=torch.float64), self._start["spread"])
        metrics, wrong = compared(self._config, start, Look(*self.held_out_loss(), self.spread()))
        more, also = self.untrained.look()
        return metrics | more, wrong + also

    def progress(self) -> dict[str, Any]:
        """What a resumed run continues from."""
        return {"start": self._start, "untrained": self.untrained.progress()}

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        """Take over the measures of a checkpoint; those of an older version are measured again."""
        if "start" in progress:
            self._start = dict(progress["start"])
            self.untrained.restore_progress(progress["untrained"])
