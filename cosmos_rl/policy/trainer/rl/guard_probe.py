"""What the guard against reward hacking measures, against its value at the start: the flow-matching loss of held-out
samples (a policy that left the data predicts them badly), and the diversity of the samples of one prompt (a collapsed
policy makes one image).

Every measurement takes the same points with the same noise, so that a policy that did not change gives the same numbers
and no rule alarms at chance. For the diversity this needs samples of its own, a few of a few prompts: those that a step
trains on are of other prompts each time, which differ in their diversity by themselves; most prompts of a large set
never come twice in a run, and only those of the first step are made before the first update. Half as many samples as
are held out, in as many steps as a rollout's, cost about as much as the held-out loss: at ordinary sizes less than a
hundredth of the steps between two measurements. `train/nfe` counts them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_matching import element_mean
from cosmos_rl.data.given import PromptKey
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.diffusion.schedule import mix
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import RewardHackingGuardConfig
from cosmos_rl.policy.config.plan import GUARD_SIGMAS
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.trainer.data_parallel import gather_over_ranks
from cosmos_rl.policy.trainer.rl.guard_rules import Measurement
from cosmos_rl.rollout.sampler import (
    NOTHING_GIVEN,
    Conditions,
    Giving,
    RolloutSampler,
    Sample,
    group_samples,
    measure_diversity,
    place_media,
)
from cosmos_rl.utils.logging import warn_of_all

GROUP = 4
"""Samples of one prompt whose diversity is measured, or more where there are few prompts."""


@dataclass(frozen=True)
class HeldOut:
    """Samples whose loss is measured; the same on all ranks."""

    latents: Tensor
    """``[W, C, ...]`` float32 on the CPU."""
    prompts: tuple[PromptKey, ...]
    source: str = ""
    """What they were made of, as text that is the same wherever they are encoded; empty: the latents themselves."""

    @property
    def digest(self) -> str:
        """Another one for other samples."""
        source = self.source or hashlib.sha256(self.latents.numpy().tobytes()).hexdigest()
        return digest_texts(source, *self.prompts)


def digest_texts(*parts: object) -> str:
    """A short digest of texts and of what has a fixed ``repr``."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def pick_diversity_samples(prompts: Sequence[PromptRecord], count: int, give: Giving = NOTHING_GIVEN) -> list[Sample]:
    """The samples whose diversity is measured: half of ``count``, ``GROUP`` of each prompt."""
    total = max(count // 2, GROUP)
    few = prompts[: max(min(len(prompts), total // GROUP), 1)]
    return group_samples(enumerate(few), total // len(few), give)


class GuardProbe:
    """Measures the policy; all ranks must call it, and all get the same numbers."""

    def __init__(
        self,
        config: RewardHackingGuardConfig,
        model: FlowModel,
        context: Context,
        *,
        sampler: RolloutSampler,
        evaluator: RolloutSampler,
        prompts: Sequence[PromptRecord],
        seed: int,
        micro_batch: int,
        rollout_chunk: int,
    ) -> None:
        """``sampler`` makes samples as a step does, ``evaluator`` as validation does."""
        self._model = model
        self._context = context
        self._sampler, self._evaluator = sampler, evaluator
        give = Giving(model.conditional_frames)
        self._samples = pick_diversity_samples(prompts, config.samples, give)
        records = [prompts[i % len(prompts)] for i in range(config.samples)]
        self._own_samples = [Sample(i, i, record.prompt, {}, given=give(i, record)) for i, record in enumerate(records)]
        self._own_prompts = tuple(sample.key for sample in self._own_samples)
        self._seed = seed
        self._micro_batch, self._rollout_chunk = micro_batch, rollout_chunk
        shape = model.latent_shape(sampler.spec.height, sampler.spec.width)
        self.held_out = HeldOut(torch.zeros(config.samples, *shape), ())
        self._start: dict[str, Any] = {}

    def begin(self, step: int, held_out: HeldOut | None, conditions: Conditions) -> None:
        """Measure the start, before any training. After a resume what is known stays, and what is new is measured.

        Args:
            step: steps done.
            held_out: samples to measure the loss on; None: the model's own as it was at the start.
        """
        self.held_out = held_out or self._make_held_out(conditions)
        # the ranks must agree, and the main one's digests are those that are saved
        held_out_digest, samples_digest = self._context.broadcast_from_main(
            f"{self.held_out.digest} {self._samples_digest()}"
        ).split()
        new = []
        if self._start.get("held_out") != held_out_digest:
            loss, norm = self.held_out_loss(conditions)
            self._start |= {"held_out": held_out_digest, "loss": loss, "norm": norm.tolist()}
            new.append("the held-out samples")
        if self._start.get("samples") != samples_digest:
            self._start |= {"samples": samples_digest, "spread": self.measure_diversity(conditions)}
            new.append("the samples whose diversity is measured")
        if new and step > 0:
            warn_of_all(
                f"{' and '.join(new)} are not those of the run that is resumed: the guard compares them with what they "
                f"are at step {step} (train.train_policy.reward_hacking_guard)"
            )

    @property
    def start(self) -> Measurement:
        """What ``begin`` found, in this process or before a resume."""
        norm = torch.tensor(self._start["norm"], dtype=torch.float64)
        return Measurement(self._start["loss"], norm, self._start["spread"])

    def measure(self, conditions: Conditions) -> Measurement:
        """The policy as it is now."""
        return Measurement(*self.held_out_loss(conditions), self.measure_diversity(conditions))

    def _make_held_out(self, conditions: Conditions) -> HeldOut:
        """Those that came with the checkpoint, or else samples of the model as it is now; the same on all ranks."""
        saved = HeldOut(self.held_out.latents, self._own_prompts, "the model's own")
        if self._start.get("held_out") == saved.digest:
            return saved
        samples = self._own_samples

        def make(indices: Sequence[int], _: int) -> tuple[Tensor]:
            return (self._evaluator.sample([samples[i] for i in indices], conditions, "watch/sample", 0).latents,)

        with self._model.eval_mode():
            (latents,) = gather_over_ranks(len(samples), self._rollout_chunk, self._context, make)
        return HeldOut(latents, self._own_prompts, saved.source)

    def _samples_digest(self) -> str:
        prompts = [f"{sample.sample_id} {sample.group} {sample.key}" for sample in self._samples]
        return digest_texts(self._seed, self._sampler.spec, *prompts)

    @torch.no_grad()
    def held_out_loss(self, conditions: Conditions) -> tuple[float, Tensor]:
        """Mean flow-matching loss of the held-out samples under the trained policy, and the velocities' root mean
        square ``[W, len(GUARD_SIGMAS)]``; same sigmas, same noise always."""
        latents, prompts = self.held_out.latents, self.held_out.prompts

        def make(indices: Sequence[int], _: int) -> tuple[Tensor]:
            clean = latents[list(indices)].to(self._model.device)
            cond, found = conditions([prompts[i] for i in indices]), []
            for number, value in enumerate(GUARD_SIGMAS):
                noise = randomness.normal(clean.shape[1:], self._seed, "watch/noise", number, indices).to(clean)
                level = self._model.training_level(torch.full((len(indices),), value)).to(clean.device)
                velocity = self._model.velocity(mix(clean, noise, level.sigma), level, cond).float()
                squares = [(velocity - (noise - clean)) ** 2, velocity**2]
                found.append(torch.stack([element_mean(square, cond.element_mask) for square in squares], dim=1))
            return (torch.stack(found, dim=1),)

        with self._model.eval_mode():
            (found,) = gather_over_ranks(len(prompts), self._micro_batch, self._context, make)
        return float(found[..., 0].double().mean()), found[..., 1].double().sqrt()

    def measure_diversity(self, conditions: Conditions) -> float:
        """How much the samples of one prompt differ; same prompts, same noise always.

        All samples of a prompt are made on one rank, so that only numbers travel: videos of all ranks would not fit.
        """
        groups: dict[int, list[Sample]] = {}
        for sample in self._samples:
            groups.setdefault(sample.group, []).append(sample)
        numbered = list(groups.values())
        at_once = max(self._rollout_chunk // len(numbered[0]), 1)

        def make(indices: Sequence[int], _: int) -> tuple[Tensor]:
            media = self._make_media([sample for i in indices for sample in numbered[i]], conditions)
            found = measure_diversity(media, [i for i in indices for _ in numbered[i]])
            return (torch.tensor(found, dtype=torch.float64),)

        with self._model.eval_mode():
            (found,) = gather_over_ranks(len(numbered), at_once, self._context, make)
        return float(found.mean())

    def _make_media(self, samples: Sequence[Sample], conditions: Conditions) -> Tensor:
        media = None
        for first in range(0, len(samples), self._rollout_chunk):
            chunk = samples[first : first + self._rollout_chunk]
            made = self._sampler.sample(chunk, conditions, "watch/spread", 0)
            _, media = place_media(made, media, first, len(samples))
        assert media is not None
        return media

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues from."""
        return self._start

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the measures of a checkpoint; those of an older version are measured again."""
        self._start = dict(state)
