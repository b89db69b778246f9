"""What one step of a job takes: read by `check`, by the estimates and by the trainers. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_rl.diffusion.moving_window import MovingWindow
from cosmos_rl.diffusion.solver_names import CHURNED
from cosmos_rl.policy.config.chunks import rollout_chunk
from cosmos_rl.policy.config.optimizers import find_kind
from cosmos_rl.policy.config.policy import SampleConfig
from cosmos_rl.policy.config.ranks import data_ranks
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import GrpoPolicyConfig

STEP_TRAINERS = ("flow_grpo", "ddrl")
"""Trainers that learn from recorded sampling steps; the others learn from finished samples."""
PAIR_TRAINERS = ("online_dpo",)
"""Trainers that learn from the best and the worst sample of each prompt."""
GUARD_SIGMAS = (0.125, 0.375, 0.625, 0.875)
"""Noise levels at which the guard against reward hacking measures; each is the middle of a quarter of all levels."""
KEPT_BYTES = 256 * 2**20
"""Latents, noised latents and velocities of frozen policies that an update keeps at once. Exchanging policies costs
time where they are copies, so their velocities are computed for many micro-batches in a row."""
DECODED_PIXELS = 2**20
"""Of one call of the decoder; a VAE's maps of that many take about 5 GB in SD3, whatever the number of samples."""
GALLERY = 4
"""Best and worst samples of a gallery, each."""


@dataclass(frozen=True)
class StepPlan:
    """One step. Numbers are per rank where nothing else is said."""

    total: int
    """Samples over all ranks."""
    items: int
    """What they are made of, over all ranks: pairs, or prompts."""
    samples: int
    optimizer_steps: int
    backwards: int
    """Micro-batches of all optimiser steps: a backward pass each, and a forward pass of every policy that is run."""


@dataclass(frozen=True)
class OnlinePlan(StepPlan):
    """One step of reinforcement learning in which no sample is left out but by train.train_policy.learnt_share."""

    group: int
    """Samples of a prompt."""
    chunk: int
    """Samples that are made at once."""
    rollout_forwards: int
    """Forward passes of all chunks."""
    sigmas: int
    """Trained noise levels of a sample."""
    learnt: int
    """What a rank learns from: its samples, or pairs of a best and a worst one."""
    pairs: int
    """(sample or pair, noise level) pairs of one pass over these."""
    keeps_old: bool
    """Whether the old policy ever differs from the trained one while it is used."""
    old_forwards: int
    """Of those after the hard copies of the decay type; see `old_while_copied`."""
    old_while_copied: int
    """While each step ends with a hard copy: the first optimiser step of a step does not run the old policy."""
    reference_forwards: int
    dropout: bool | None
    """Whether dropout acts, so that the old policy is run even where it is a copy; None: not known, counted as not."""

    @property
    def forwards(self) -> int:
        """Forward passes of the update."""
        return self.backwards + self.old_forwards + self.reference_forwards


def plan_sft(config: Config) -> StepPlan:
    """A step of supervised fine-tuning: one optimiser step on pairs."""
    train, ranks = config.train, data_ranks(config.policy.parallelism)
    total = train.global_batch_size or train.train_batch_per_replica * ranks
    samples = total // ranks
    return StepPlan(total, total, samples, 1, math.ceil(samples / train.train_policy.mini_batch))


def plan_online(config: Config, transformer: Mapping[str, Any] | None = None) -> OnlinePlan:
    """A step of reinforcement learning.

    `transformer`: its `config.json`; None: not known.
    """
    job, diffusers = config.train.train_policy, config.policy.diffusers
    assert isinstance(job, GrpoPolicyConfig)
    group, ranks = config.rollout.n_generation, data_ranks(config.policy.parallelism)
    total = config.train.global_batch_size or config.train.train_batch_per_replica
    samples = total // ranks
    chunk, sigmas = rollout_chunk(config), trained_steps(config)
    learnt, in_pairs = math.ceil(max(round(job.learnt_share * total), 1) / ranks), job.trainer_type in PAIR_TRAINERS
    if in_pairs:
        learnt = max(math.ceil(total // group / ranks), 1)
    size = job.batch_size_per_optimize or learnt
    each_step = math.ceil(min(size, learnt) * sigmas / job.mini_batch)
    steps = math.ceil(learnt / size) * job.mu_iterations
    dropout = _acts_dropout(config, transformer)
    passes = each_step * steps
    averages = find_kind(config.train.optm_name).averages  # the old policy then never is the trained one
    old_forwards, old_while_copied, reference_forwards = passes, passes, 0
    if not dropout and not averages:
        old_while_copied -= each_step
    always_copied = diffusers.weight_copy_decay_type == 0 and not averages
    if always_copied:
        old_forwards = old_while_copied
    if keeps_reference(job):
        others = len(set(number_teachers(job))) - 1
        reference_forwards = passes + steps * max(others, 0)  # the last one of each has fewer rows
    keeps_old = (not always_copied or steps > 1) and not in_pairs
    if in_pairs:
        old_forwards = old_while_copied = 0
    if job.trainer_type in STEP_TRAINERS:
        old_forwards = old_while_copied = 0  # its velocities are recorded
        keeps_old = samples_with_old(config)
    return OnlinePlan(
        total=total,
        items=total // group,
        samples=samples,
        optimizer_steps=steps,
        backwards=passes,
        group=group,
        chunk=chunk,
        rollout_forwards=math.ceil(samples / chunk) * diffusers.sample.num_steps,
        sigmas=sigmas,
        learnt=learnt,
        pairs=learnt * sigmas,
        keeps_old=keeps_old,
        old_forwards=old_forwards,
        old_while_copied=old_while_copied,
        reference_forwards=reference_forwards,
        dropout=dropout,
    )


def trained_steps(config: Config) -> int:
    """Noise levels, or sampling steps, at which each sample is trained."""
    job, diffusers = config.train.train_policy, config.policy.diffusers
    if not isinstance(job, GrpoPolicyConfig) or job.trainer_type not in STEP_TRAINERS:
        return diffusers.trained_levels
    if job.steps.choose == "list":
        return len(job.steps.indices)
    if job.steps.choose == "window":
        return job.steps.size
    return min(diffusers.trained_levels, noisy_steps(diffusers.sample))


def noisy_steps(sample: SampleConfig) -> int:
    """How many sampling steps, from the first one on, have noise: all but the last; of EDM's sampler, which adds noise
    before a step, all but the last two."""
    if sample.solver in CHURNED:
        return sample.num_steps - 2
    return sample.num_steps - 1


def last_trained_step(config: Config) -> int:
    """Trained steps lie before this one, which has no noise or lies outside `steps.within`."""
    job, sample = config.train.train_policy, config.policy.diffusers.sample
    assert isinstance(job, GrpoPolicyConfig)
    if job.steps.choose in ("first", "list"):
        return noisy_steps(sample)
    return min(math.floor(round(sample.num_steps * job.steps.within, 9)), noisy_steps(sample))


def moving_window(config: Config) -> MovingWindow | None:
    """Where the window of trained steps is; None: there is none, or it is drawn."""
    job = config.train.train_policy
    assert isinstance(job, GrpoPolicyConfig)
    steps = job.steps
    if steps.choose != "window" or steps.order == "random":
        return None
    return MovingWindow(
        last=last_trained_step(config) - steps.size,
        order=steps.order,
        stride=steps.stride,
        interval=steps.interval,
        least_interval=steps.least_interval,
        decay_rate=steps.decay_rate,
        decay_threshold=steps.decay_threshold,
        roll_back=steps.roll_back,
    )


def keeps_reference(job: GrpoPolicyConfig) -> bool:
    """Whether the loss asks for the reference's velocities."""
    return job.kl_beta > 0 or job.norm_penalty > 0 or job.trainer_type in PAIR_TRAINERS


def list_teachers(job: GrpoPolicyConfig) -> dict[str, str]:
    """Teachers of prompt sets that are not that of all prompts, each once: its first key and its place."""
    places: dict[str, str] = {}
    for number, one in enumerate(job.dataset.sets):
        if one.teacher and one.teacher != job.teacher and one.teacher not in places.values():
            places[f"train.train_policy.dataset.sets.{number}.teacher"] = one.teacher
    return places


def name_teachers(job: GrpoPolicyConfig) -> dict[str, str]:
    """All teachers, each once: its key and its place."""
    common = {"train.train_policy.teacher": job.teacher} if job.teacher else {}
    return common | list_teachers(job)


def number_teachers(job: GrpoPolicyConfig) -> tuple[int, ...]:
    """Which reference each prompt set has: 0 that of all prompts, from 1 on those of `list_teachers`; empty: there is
    no other, or none is asked for."""
    places = list(list_teachers(job).values())
    if not places or not keeps_reference(job):
        return ()
    return tuple(places.index(one.teacher) + 1 if one.teacher in places else 0 for one in job.dataset.sets)


def keeps_common_reference(job: GrpoPolicyConfig) -> bool:
    """Whether the loss asks for the reference's velocities of samples without a teacher of their own."""
    numbers = number_teachers(job)
    return keeps_reference(job) and (not numbers or 0 in numbers)


def moves_reference(job: GrpoPolicyConfig) -> bool:
    """Whether the reference becomes another one in the course of the run."""
    return keeps_reference(job) and (job.reference_reset_interval is not None or job.reference_reset_kl is not None)


def copies_reference(job: GrpoPolicyConfig) -> bool:
    """Whether the reference has other weights than the model at the start."""
    return moves_reference(job) or (keeps_common_reference(job) and bool(job.teacher))


def samples_with_old(config: Config) -> bool:
    """Of a trainer on sampling steps: whether another policy than the trained one makes the samples."""
    job = config.train.train_policy
    assert isinstance(job, GrpoPolicyConfig)
    return not job.on_policy and config.policy.diffusers.weight_copy_decay_type != 0


def keeps_velocity(config: Config) -> bool:
    """Of a trainer on sampling steps: whether the velocities that made the samples are recorded. They are needed where
    the trained policy may be another one than that which sampled: after an optimiser step, or with an old policy."""
    return samples_with_old(config) or plan_online(config).optimizer_steps > 1


def _acts_dropout(config: Config, transformer: Mapping[str, Any] | None) -> bool | None:
    """Of the adapters or of the network itself, which has what its `config.json` says."""
    if config.policy.lora is not None and config.policy.lora.lora_dropout > 0:
        return True
    if transformer is None:
        return None
    return any("drop" in key and isinstance(value, float) and value > 0 for key, value in transformer.items())
