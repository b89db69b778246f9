"""The arithmetic of a run: samples, micro-batches, steps, saves. Counts files, decodes nothing. No torch."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl.data.prompt_sets import prompt_file
from cosmos_rl.data.prompts import read_prompts
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.machine import counted
from cosmos_rl.launcher.rl_plan import rl_lines
from cosmos_rl.policy.config import Config, DatasetConfig, GrpoPolicyConfig, data_ranks


@dataclass(frozen=True)
class Plan:
    """How long a run is. None: unknown."""

    batch: int
    """Samples per step over all ranks."""
    samples: int | None
    """Samples in the data folder, or prompts."""
    held_out: int
    """Of these for validation."""
    steps_per_epoch: int | None
    steps: int | None
    saves: int | None
    why: str
    """Why the number of samples is unknown."""


def planned(config: Config, *, own_data: bool) -> Plan:
    """The length of the run that `config` describes. `own_data`: the data set is a script's."""
    train, job = config.train, config.train.train_policy
    rl = isinstance(job, GrpoPolicyConfig)
    ranks = data_ranks(config.policy.parallelism)
    per_rank = train.train_batch_per_replica * (1 if rl else ranks)
    batch = train.global_batch_size or per_rank
    samples, why = _samples(config, own_data=own_data)
    held_out = _held_out(config, samples)
    per_epoch = None
    if samples is not None:
        each = batch // config.rollout.n_generation if rl else batch
        left = samples - held_out
        drops = job.dataloader_drop_last and not (rl and left < each)  # few prompts are taken several times
        per_epoch = left // each if drops else math.ceil(left / each)
    steps = None if per_epoch is None else per_epoch * train.epoch
    if train.max_num_steps is not None:
        steps = train.max_num_steps if steps is None else min(steps, train.max_num_steps)
    return Plan(batch, samples, held_out, per_epoch, steps, _saves(config, steps, per_epoch), why)


def batch_lines(config: Config, plan: Plan, transformer: Mapping[str, Any] | None) -> list[str]:
    """The arithmetic in words. `transformer`: its `config.json`; None: not known."""
    rl = isinstance(config.train.train_policy, GrpoPolicyConfig)
    return [*(rl_lines(config, transformer) if rl else _sft_lines(config, plan)), *_step_lines(config, plan)]


def _sft_lines(config: Config, plan: Plan) -> list[str]:
    ranks, size = data_ranks(config.policy.parallelism), config.train.train_policy.mini_batch
    own = plan.batch // ranks
    return [
        f"{plan.batch} samples per step = {ranks} x {own} (data parallel ranks x samples of a rank)",
        f"a rank takes its {own} in {own // size} micro-batch{'' if own == size else 'es'} of {size}",
    ]


def _step_lines(config: Config, plan: Plan) -> list[str]:
    train, most = config.train, config.train.max_num_steps
    if plan.samples is None:
        end = f"; at most {most} by train.max_num_steps" if most is not None else ""
        return [f"number of samples and steps: unknown ({plan.why}){end}"]
    held = f", {plan.held_out} of them held out for validation" if plan.held_out else ""
    rl = isinstance(train.train_policy, GrpoPolicyConfig)
    dataset = train.train_policy.dataset
    lines = [f"{plan.samples} {'prompts' if rl else 'captions'} in {dataset.local_dir or dataset.name}{held}"]
    per_epoch = plan.steps_per_epoch or 0
    whole = per_epoch * train.epoch
    lines.append(f"{counted(per_epoch, 'step')} per epoch x {counted(train.epoch, 'epoch')} = {counted(whole, 'step')}")
    if most is not None and most < whole:
        lines.append(f"train.max_num_steps ends the run after {counted(most, 'step')}")
    elif most is not None:
        lines.append(f"train.epoch ends the run after {counted(whole, 'step')}, before train.max_num_steps = {most}")
    return lines


def _samples(config: Config, *, own_data: bool) -> tuple[int | None, str]:
    dataset = config.train.train_policy.dataset
    if own_data:
        return None, "the script brings its own data"
    if isinstance(config.train.train_policy, GrpoPolicyConfig):
        return _prompts(dataset)
    if not dataset.local_dir:
        return None, "train.train_policy.dataset.local_dir is not set"
    place = Path(dataset.local_dir).expanduser()
    if not place.is_dir():
        return None, f"{place} is not there"
    return sum(name.endswith(".json") and not name.startswith(".") for name in os.listdir(place)), ""


def _prompts(dataset: DatasetConfig) -> tuple[int | None, str]:
    """How many prompts the file holds; a named set is not fetched for that."""
    try:
        file = prompt_file(dataset, "train.train_policy.dataset", split="train")
        if file is None:
            return None, f"the prompts {dataset.name} have not been fetched yet"
        return len(read_prompts(file)), ""
    except UserError as error:
        return None, str(error)


def _held_out(config: Config, samples: int | None) -> int:
    share = config.train.train_policy.dataset.test_size
    rl = isinstance(config.train.train_policy, GrpoPolicyConfig)
    if samples is None or share is None or not config.validation.enable or config.validation.dataset.local_dir or rl:
        return 0
    return min(share if isinstance(share, int) else round(share * samples), samples)


def _saves(config: Config, steps: int | None, per_epoch: int | None) -> int | None:
    """How often the run saves, its end included."""
    ckpt = config.train.ckpt
    if not ckpt.enable_checkpoint:
        return 0
    every = ckpt.save_freq
    if ckpt.save_freq_in_epoch:
        if not per_epoch:
            return None
        every = ckpt.save_freq_in_epoch * per_epoch
    return None if steps is None else math.ceil(steps / every)
