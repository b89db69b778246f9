"""A step and a run in words. No torch."""

from collections.abc import Mapping
from typing import Any

from cosmos_rl.launcher.acceptance.length import RunLength
from cosmos_rl.launcher.check.rl_lines import rl_lines
from cosmos_rl.launcher.check.set_lines import set_lines
from cosmos_rl.launcher.machine import format_count
from cosmos_rl.policy.config import Config, data_ranks
from cosmos_rl.policy.config.jobs import job_kind
from cosmos_rl.policy.config.ranks import describe_peers


def batch_lines(config: Config, length: RunLength, transformer: Mapping[str, Any] | None) -> list[str]:
    """The arithmetic in words. `transformer`: its `config.json`; None: not known."""
    if job_kind(config).online:
        return [*rl_lines(config, transformer), *_step_lines(config, length), *set_lines(config)]
    return [*_sft_lines(config), *_step_lines(config, length)]


def _sft_lines(config: Config) -> list[str]:
    kind, ranks = job_kind(config), data_ranks(config.policy.parallelism)
    plan, noun = kind.plan(config), "samples"
    parts = format_count(plan.backwards, "micro-batch", "micro-batches")
    members = []
    if kind.data == "preferences":
        noun = "preferences"
        members = [f"each of {kind.rows} samples, run by the reference too"]
    return [
        f"{plan.total} {noun} per step = {ranks} x {plan.samples} (data parallel ranks x {noun} of a rank)",
        *describe_peers(config.policy.parallelism),
        f"a rank takes its {plan.samples} in {parts} of {config.train.train_policy.mini_batch}",
        *members,
    ]


def _step_lines(config: Config, length: RunLength) -> list[str]:
    train, most = config.train, config.train.max_num_steps
    if length.samples is None:
        end = ""
        if most is not None:
            end = f"; at most {most} by train.max_num_steps"
        return [f"number of samples and steps: unknown ({length.why}){end}"]
    if train.train_policy.dataset.sets:
        sets = format_count(len(train.train_policy.dataset.sets), "set")
        return [f"{length.samples} prompts in {sets}", f"{most} steps (train.max_num_steps; the run is one epoch)"]
    held = ""
    if length.held_out:
        held = f", {length.held_out} of them held out for validation"
    dataset = train.train_policy.dataset
    place = dataset.local_dir or dataset.name
    if dataset.folders:
        place = f"{format_count(len(dataset.folders), 'folder')}, with their repeats"
    lines = [f"{length.samples} {job_kind(config).items} in {place}{held}"]
    per_epoch = length.steps_per_epoch
    if per_epoch is None:
        lines.append("steps: depend on the sizes (policy.diffusers.buckets)")
        if most is not None:
            lines.append(f"at most {format_count(most, 'step')} by train.max_num_steps")
        return lines
    whole = format_count(per_epoch * train.epoch, "step")
    epochs = format_count(train.epoch, "epoch")
    lines.append(f"{format_count(per_epoch, 'step')} per epoch x {epochs} = {whole}")
    if most is not None and most < per_epoch * train.epoch:
        lines.append(f"train.max_num_steps ends the run after {format_count(most, 'step')}")
    elif most is not None:
        lines.append(f"train.epoch ends the run after {whole}, before train.max_num_steps = {most}")
    return lines
