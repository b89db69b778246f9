"""The arithmetic of a reinforcement-learning job: what one step samples, scores and learns from. No torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_rl.algorithms.decay import old_policy_decay
from cosmos_rl.launcher.machine import counted
from cosmos_rl.policy.config import Config, GrpoPolicyConfig, data_ranks, rollout_chunk
from cosmos_rl.policy.config.reward import LocalRewardConfig, RemoteRewardConfig

GUARD_SIGMAS = 4
"""Noise levels at which a held-out sample is measured."""


@dataclass(frozen=True)
class RlPlan:
    """One DiffusionNFT step. Numbers are per rank where nothing else is said."""

    prompts: int
    """Over all ranks."""
    group: int
    """Samples of a prompt."""
    samples: int
    chunk: int
    """Samples that are made at once."""
    rollout_forwards: int
    """Forward passes of all chunks."""
    levels: int
    """Trained noise levels of a sample."""
    pairs: int
    """(sample, noise level) pairs of one pass over the samples."""
    backwards: int
    """Micro-batches of all passes: one backward pass each, and one forward pass of every policy that is run."""
    optimiser_steps: int
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


def rl_plan(config: Config, transformer: Mapping[str, Any] | None = None) -> RlPlan:
    """The step that `config` describes, when every sample is trained on.

    `transformer`: its `config.json`; None: not known.
    """
    job, diffusers = _job(config), config.policy.diffusers
    group, ranks = config.rollout.n_generation, data_ranks(config.policy.parallelism)
    total = config.train.global_batch_size or config.train.train_batch_per_replica
    samples = total // ranks
    chunk = rollout_chunk(config)
    levels = diffusers.trained_levels
    each_batch = (job.batch_size_per_optimize or samples) * levels // job.mini_batch
    batches = -(-samples // (job.batch_size_per_optimize or samples)) * job.mu_iterations
    dropout = _acts_dropout(config, transformer)
    old_while_copied = each_batch * (batches if dropout else batches - 1)
    always_copied = diffusers.weight_copy_decay_type == 0
    return RlPlan(
        prompts=total // group,
        group=group,
        samples=samples,
        chunk=chunk,
        rollout_forwards=math.ceil(samples / chunk) * diffusers.sample.num_steps,
        levels=levels,
        pairs=samples * levels,
        backwards=each_batch * batches,
        optimiser_steps=batches,
        old_forwards=old_while_copied if always_copied else each_batch * batches,
        old_while_copied=old_while_copied,
        reference_forwards=each_batch * batches if job.kl_beta > 0 else 0,
        dropout=dropout,
    )


def _acts_dropout(config: Config, transformer: Mapping[str, Any] | None) -> bool | None:
    """Of the adapters or of the network itself, which has what its `config.json` says."""
    if config.policy.lora is not None and config.policy.lora.lora_dropout > 0:
        return True
    if transformer is None:
        return None
    return any("drop" in key and isinstance(value, float) and value > 0 for key, value in transformer.items())


def keeps_old(config: Config) -> bool:
    """Whether the old policy ever differs from the trained one while it is used."""
    return config.policy.diffusers.weight_copy_decay_type != 0 or rl_plan(config).optimiser_steps > 1


def rl_lines(config: Config, transformer: Mapping[str, Any] | None) -> Iterator[str]:
    """The step in words; `transformer` as in `rl_plan`."""
    job, plan, diffusers = _job(config), rl_plan(config, transformer), config.policy.diffusers
    sample, ranks = diffusers.sample, data_ranks(config.policy.parallelism)
    yield f"{plan.prompts * plan.group} samples per step = {plan.prompts} x {plan.group} (prompts x samples per prompt)"
    on = counted(ranks, "data parallel rank")
    yield f"{plan.samples} samples and {plan.prompts / ranks:g} prompts per rank, on {on}"
    guided = ", each with its guidance twin" if sample.guidance_scale > 1 else ", without guidance"
    chunks = counted(math.ceil(plan.samples / plan.chunk), "chunk")
    yield (
        f"rollout: {chunks} of {plan.chunk} samples x {sample.num_steps} sampling "
        f'steps ("{sample.solver}") = {plan.rollout_forwards} forward passes{guided}'
    )
    yield (
        f"{plan.levels} of {sample.num_steps} noise levels are trained, int({sample.num_steps} x "
        f"{diffusers.timesteps_fraction:g}): {plan.pairs} pairs of sample and level"
    )
    passes = "" if job.mu_iterations == 1 else f", {job.mu_iterations} times"
    yield f"{plan.samples // job.mini_batch} micro-batches of {job.mini_batch} at each level{passes}"
    if job.trainer_type == "diffusion_nft":
        yield from _policies(config, plan)
    else:
        yield f"{plan.backwards} backward passes per rank and step"
    yield f"{counted(plan.optimiser_steps, 'optimiser step')} per step"
    if job.data_term.beta > 0:
        yield f"and {job.data_term.batch_size} real samples of {job.data_term.local_dir} per optimiser step"
    yield from _validation(config)


def _policies(config: Config, plan: RlPlan) -> Iterator[str]:
    models = ["policy"] + ["old policy"] * (plan.old_forwards > 0) + ["reference"] * (plan.reference_forwards > 0)
    yield (
        f"{plan.backwards} backward passes and {plan.forwards} forward passes ({', '.join(models)}) per rank and step"
    )
    kind, copied = config.policy.diffusers.weight_copy_decay_type, 0
    while kind != 0 and old_policy_decay(kind, copied + 1) == 0.0:
        copied += 1
    if plan.dropout is None and (kind == 0 or copied):
        yield "unknown: whether the network has dropout, with which the old policy is run even where it is a copy"
    if copied and plan.old_while_copied < plan.old_forwards:
        fewer = plan.forwards - plan.old_forwards + plan.old_while_copied
        yield f"{fewer} forward passes during the first {copied} optimiser steps, as the old policy is a copy then"


def _validation(config: Config) -> Iterator[str]:
    validation, sample = config.validation, config.policy.diffusers.sample
    if validation.enable:
        yield (
            f"validation: {counted(validation.n_generation, 'sample')} for each of its prompts, "
            f"{sample.eval_num_steps or sample.num_steps} steps of the ODE, every {counted(validation.freq, 'step')}"
        )


def reward_lines(config: Config, *, own_script: bool) -> list[str]:
    """What scores the samples, how much it counts and where it runs; empty: nothing does."""
    job = _job(config)
    if job.bypass_reward:
        return ["none: all rewards are 0 (train.train_policy.bypass_reward)"]
    lines = list(_of_service(job.remote_reward)) if job.use_remote_reward else []
    lines += _of_functions(job.local_reward)
    if own_script:
        lines.append("functions that the script gives as reward_fns take the place of local ones")
    held_out = config.validation
    if lines and held_out.enable and (held_out.remote_reward or held_out.local_reward):
        own = list(_of_service(held_out.remote_reward)) if held_out.remote_reward else []
        own += _of_functions(held_out.local_reward) if held_out.local_reward else []
        lines += [f"validation: {line}" for line in own]
    return lines


def _of_service(table: RemoteRewardConfig) -> Iterator[str]:
    for entry in table.reward_fns:
        asked = "" if entry.weight else ", not asked for"
        yield f"{entry.name}: weight {entry.weight:g}, clipped to {entry.lower:g} ... {entry.upper:g}, service{asked}"


def _of_functions(table: LocalRewardConfig) -> Iterator[str]:
    for entry in table.reward_fns:
        idle = "" if entry.weight else ", measured only"
        clip = f"clipped to {entry.clip_min:g} ... {entry.clip_max:g}"
        yield f"{entry.shown_name}: weight {entry.weight:g}, {clip}, here ({entry.function}){idle}"


def guard_lines(config: Config) -> list[str]:
    """What the guard against reward hacking measures, what it costs and what it does."""
    job, sample = _job(config), config.policy.diffusers.sample
    guard = job.reward_hacking_guard
    if not guard.enable:
        return ["off: nothing detects reward hacking"]
    steps = sample.eval_num_steps or sample.num_steps
    diverse = max(guard.samples // 2, 4)
    source = f"pairs of {guard.local_dir}" if guard.local_dir else f"own samples, made at the start in {steps} steps"
    action = guard.action
    if action == "rewind":
        action = f"rewind, at most {guard.max_rewinds} times, to the newest checkpoint before it"
    return [
        f"every {counted(guard.freq, 'step')} {guard.samples} held-out samples ({source}) at {GUARD_SIGMAS} "
        f"noise levels, and the diversity of {counted(diverse, 'sample')} made in {counted(sample.num_steps, 'step')}",
        f"alarm when their loss is more than {guard.max_loss_ratio:g} times, or the diversity less than "
        f"{guard.min_diversity_ratio:g} times that of the start: {action}",
    ]


def _job(config: Config) -> GrpoPolicyConfig:
    assert isinstance(config.train.train_policy, GrpoPolicyConfig)
    return config.train.train_policy
