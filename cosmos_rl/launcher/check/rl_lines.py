"""What one step of reinforcement learning samples, scores and learns from, in words. No torch."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from cosmos_rl.algorithms.decay import old_policy_decay
from cosmos_rl.launcher.machine import format_count
from cosmos_rl.policy.config import Config, data_ranks
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.plan import (
    GUARD_SIGMAS,
    PAIR_TRAINERS,
    STEP_TRAINERS,
    OnlinePlan,
    moving_window,
    number_teachers,
    plan_online,
)
from cosmos_rl.policy.config.policy import SampleConfig
from cosmos_rl.policy.config.ranks import describe_peers
from cosmos_rl.policy.config.reward import LocalRewardConfig, RemoteRewardConfig
from cosmos_rl.policy.config.reward_names import list_rewards
from cosmos_rl.policy.config.validation_sets import ValidationSet, list_validation_sets


def rl_lines(config: Config, transformer: Mapping[str, Any] | None) -> Iterator[str]:
    """The step in words; `transformer` as in `plan_online`."""
    job, plan, diffusers = online_table(config), plan_online(config, transformer), config.policy.diffusers
    sample, ranks = diffusers.sample, data_ranks(config.policy.parallelism)
    yield f"{plan.total} samples per step = {plan.items} x {plan.group} (prompts x samples per prompt)"
    on = format_count(ranks, "data parallel rank")
    yield f"{plan.samples} samples and {plan.items / ranks:g} prompts per rank, on {on}"
    yield from describe_peers(config.policy.parallelism)
    if diffusers.buckets is not None:
        yield f"each step has one of {len(diffusers.training_sizes)} sizes: its prompts', or one that is drawn"
    guided = ", without guidance"
    if sample.guidance_scale > 1:
        guided = ", each with its negative prompt"
    chunks = format_count(math.ceil(plan.samples / plan.chunk), "chunk")
    yield (
        f"rollout: {chunks} of {plan.chunk} samples x {sample.num_steps} sampling "
        f'steps ("{sample.solver}") = {plan.rollout_forwards} forward passes{guided}'
    )
    if job.learnt_share < 1:
        largest = "those of the step with the largest advantages of either sign"
        yield f"learnt from: {plan.learnt} samples per rank, {largest}"
    yield _trained(config, plan)
    if job.trainer_type in STEP_TRAINERS:
        yield from _window(config)
        yield from _bounded_noise(sample)
    passes = ""
    if job.mu_iterations > 1:
        passes = f", {job.mu_iterations} times"
    if job.trainer_type in PAIR_TRAINERS:
        yield f"the best and the worst sample of each prompt make {plan.learnt} pairs per rank"
    yield f"{math.ceil(plan.learnt / job.mini_batch)} micro-batches of {job.mini_batch} at each level{passes}"
    if job_kind(config).supported:
        yield from _policies(config, plan)
    else:
        yield f"{plan.backwards} backward passes per rank and step"
    yield f"{format_count(plan.optimizer_steps, 'optimiser step')} per step"
    if job.data_term.beta > 0:
        yield f"and {job.data_term.batch_size} real samples of {job.data_term.local_dir} per optimiser step"
    yield from _validation(config)


def _trained(config: Config, plan: OnlinePlan) -> str:
    job, diffusers = online_table(config), config.policy.diffusers
    steps = diffusers.sample.num_steps
    if job.trainer_type in STEP_TRAINERS:
        preset = "" if job.preset is None else f' by the preset "{job.preset}"'
        return (
            f'{plan.sigmas} of {steps} sampling steps are trained ("{job.steps.choose}"{preset}): {plan.pairs} pairs '
            "of sample and step"
        )
    what = "sample"
    if job.trainer_type in PAIR_TRAINERS:
        what = "preference"
    return (
        f"{plan.sigmas} of {steps} noise levels are trained, int({steps} x {diffusers.timesteps_fraction:g}): "
        f"{plan.pairs} pairs of {what} and level"
    )


def _window(config: Config) -> Iterator[str]:
    """Where it is in the course of the run, if it moves."""
    window, size = moving_window(config), online_table(config).steps.size
    if window is None:
        return
    first, last = (f"{start} ... {start + size - 1}" for start in (window.starts[0], window.starts[-1]))
    then = "begins again" if window.roll_back else "stays at the last one"
    yield (
        f'the window moves ("{window.order}") from steps {first} to steps {last}: '
        f"{format_count(len(window.starts), 'place')} in {format_count(sum(window.intervals), 'training step')}, then "
        f"it {then}"
    )


def _bounded_noise(sample: SampleConfig) -> Iterator[str]:
    """Where the noise between the steps depends on the levels that the loaded pipeline samples at. Without bounds all
    steps but the last ones have some at any levels, and the rules between keys refuse these."""
    given = [key for key in ("noise_above", "noise_below") if getattr(sample, key)]
    if given:
        yield (
            "unknown: whether all steps that may be trained have noise, as it is bounded by policy.diffusers.sample."
            f"{' and '.join(given)} at noise levels that only the loaded pipeline knows; cosmos-rl doctor --config "
            "says it, and a launch before its first step"
        )


def _describe_teachers(config: Config) -> Iterator[str]:
    """Which policy each prompt set is pulled to."""
    job = online_table(config)
    for one in job.dataset.sets:
        yield f"{one.shown_name}: {one.teacher or job.teacher or 'the model at the start'}"


def _policies(config: Config, plan: OnlinePlan) -> Iterator[str]:
    teachers = number_teachers(online_table(config))
    models = ["policy"] + ["old policy"] * (plan.old_forwards > 0)
    models += ["reference of each sample"] if teachers else ["reference"] * (plan.reference_forwards > 0)
    yield (
        f"{plan.backwards} backward passes and {plan.forwards} forward passes ({', '.join(models)}) per rank and step"
    )
    if teachers:
        yield f"references: {', '.join(_describe_teachers(config))}"
    kind, copied = config.policy.diffusers.weight_copy_decay_type, 0
    while kind != 0 and old_policy_decay(kind, copied + 1) == 0.0:
        copied += 1
    runs_old = online_table(config).trainer_type not in (*STEP_TRAINERS, *PAIR_TRAINERS)
    if runs_old and plan.dropout is None and (kind == 0 or copied):
        yield "unknown: whether the network has dropout, with which the old policy is run even where it is a copy"
    if copied and plan.old_while_copied < plan.old_forwards:
        fewer = plan.forwards - plan.old_forwards + plan.old_while_copied
        yield f"{fewer} forward passes during the first {copied} optimiser steps, as the old policy is a copy then"


def _validation(config: Config) -> Iterator[str]:
    for one in list_validation_sets(config):
        validation, sample = one.config.validation, one.config.policy.diffusers.sample
        steps, details = sample.eval_num_steps or sample.num_steps, ""
        if one.label:
            details = f", guidance {sample.guidance_scale:g}"
        if one.size is not None:
            details += ", {} x {} pixels".format(*one.size)
        yield (
            f"{_name(one)}: {format_count(validation.n_generation, 'sample')} for each of its prompts, "
            f"{steps} steps of the ODE{details}, every {format_count(validation.freq, 'step')}"
        )


def _name(one: ValidationSet) -> str:
    return f"validation {one.label}".strip()


def reward_lines(config: Config, *, own_script: bool) -> list[str]:
    """What scores the samples, how much it counts and where it runs; empty: nothing does."""
    job = online_table(config)
    if job.bypass_reward:
        return ["none: all rewards are 0 (train.train_policy.bypass_reward)"]
    remote = None
    if job.use_remote_reward:
        remote = job.remote_reward
    lines = list(_score_lines(remote, job.local_reward))
    lines += [f"set {one.shown_name}: {', '.join(one.rewards)}" for one in job.dataset.sets if one.rewards]
    lines += [] if own_script else _unused_lines(config)
    if own_script:
        lines.append("functions that the script gives as reward_fns take the place of local ones")
    if job.kl_gate.rewards:
        names = ", ".join(job.kl_gate.rewards)
        lines.append(f"distance to the reference: for {job.kl_gate.share:.3g} of the samples, ranked against {names}")
    if job.diversity_features is not None:
        lines.append(f"advantages: times the distance from the nearest sample of the prompt ({job.diversity_features})")
    for one in list_validation_sets(config) if lines else ():
        validation, name = one.config.validation, _name(one)
        lines += [f"{name}: {line}" for line in _score_lines(validation.remote_reward, validation.local_reward)]
        if one.rewards:
            lines.append(f"{name}: only {', '.join(one.rewards)}")
    return lines


def _unused_lines(config: Config) -> Iterator[str]:
    sets = online_table(config).dataset.sets
    if not sets or not all(one.rewards for one in sets):
        return
    used = {name for one in sets for name in one.rewards or ()}
    for name, weight in list_rewards(config).items():
        if weight and name not in used:
            yield f"note: {name} has a weight, but no prompt set names it in its rewards: it is not trained on"


def _score_lines(remote: RemoteRewardConfig | None, local: LocalRewardConfig | None) -> Iterator[str]:
    if remote is not None:
        yield from _service_lines(remote)
    if local is not None:
        yield from _function_lines(local)


def _service_lines(table: RemoteRewardConfig) -> Iterator[str]:
    for entry in table.reward_fns:
        line = f"{entry.name}: weight {entry.weight:g}, clipped to {entry.lower:g} ... {entry.upper:g}, service"
        if not entry.is_asked:
            line += ", not requested"
        elif not entry.weight:
            line += ", measured only"
        yield line


def _function_lines(table: LocalRewardConfig) -> Iterator[str]:
    for entry in table.reward_fns:
        clip = f"clipped to {entry.clip_min:g} ... {entry.clip_max:g}"
        line = f"{entry.shown_name}: weight {entry.weight:g}, {clip}, here ({entry.function})"
        if not entry.weight:
            line += ", measured only"
        yield line


def guard_lines(config: Config) -> list[str]:
    """What the guard against reward hacking measures, what it costs and what it does."""
    guard, sample = online_table(config).reward_hacking_guard, config.policy.diffusers.sample
    if not guard.enable:
        return ["off: nothing detects reward hacking"]
    diversity = format_count(max(guard.samples // 2, 4), "sample")
    source = f"own samples, made at the start in {sample.eval_num_steps or sample.num_steps} steps"
    if guard.local_dir:
        source = f"pairs of {guard.local_dir}"
    action = guard.action
    if action == "rewind":
        action = f"rewind, at most {guard.max_rewinds} times, to the newest checkpoint before it"
    return [
        f"every {format_count(guard.freq, 'step')} {guard.samples} held-out samples ({source}) at {len(GUARD_SIGMAS)} "
        f"noise levels, and the diversity of {diversity} made in {format_count(sample.num_steps, 'step')}",
        f"alarm when their loss is more than {guard.max_loss_ratio:g} times, or the diversity less than "
        f"{guard.min_diversity_ratio:g} times that of the start: {action}",
    ]
