"""How long a run is: samples, steps, saves. Counts files, decodes nothing. No torch."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.data.pair_files import count_pairs
from cosmos_rl.data.preference_files import count_preferences
from cosmos_rl.data.prompt_sets import PromptSource, list_sources, prompt_file
from cosmos_rl.data.prompt_sizes import list_sizes
from cosmos_rl.data.prompts import read_prompts
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, DatasetConfig
from cosmos_rl.policy.config.jobs import job_kind


@dataclass(frozen=True)
class RunLength:
    """How long a run is. None: unknown."""

    batch: int
    """Samples per step over all ranks."""
    samples: int | None
    """Samples in the data folder, or prompts."""
    held_out: int
    """Of these for validation."""
    steps_per_epoch: int | None
    """Also None where samples have several sizes: it depends on how many have each; and with several prompt sets, whose
    run is one epoch."""
    steps: int | None
    saves: int | None
    why: str
    """Why the number of samples is unknown."""


def run_length(config: Config, *, own_data: bool) -> RunLength:
    """The length of the run that `config` describes. `own_data`: the data set is a script's."""
    samples, why = _samples(config, own_data=own_data)
    held_out, per_epoch, limits = 0, None, []
    if samples is not None:
        held_out = _held_out(config, samples)
        if not config.train.train_policy.dataset.sets and not _in_buckets(config):
            per_epoch = _steps_per_epoch(config, samples - held_out)
            limits.append(per_epoch * config.train.epoch)
    if config.train.max_num_steps is not None:
        limits.append(config.train.max_num_steps)
    steps = min(limits, default=None)
    batch = job_kind(config).plan(config).total
    return RunLength(batch, samples, held_out, per_epoch, steps, _saves(config, steps, per_epoch), why)


def _in_buckets(config: Config) -> bool:
    """Whether a step takes samples of one of several sizes, of which only a look into all files says how many there
    are. Prompts are in buckets where rows name sizes."""
    if config.policy.diffusers.buckets is None:
        return False
    if job_kind(config).data != "prompts":
        return True
    dataset = config.train.train_policy.dataset
    try:
        file = prompt_file(dataset, "train.train_policy.dataset", split="train")
        return file is None or any(list_sizes(read_prompts(file), config.policy.diffusers.training_sizes))
    except UserError:
        return True  # `inspect_environment` says what is wrong


def _steps_per_epoch(config: Config, samples: int) -> int:
    kind = job_kind(config)
    items = kind.plan(config).items
    repeats = kind.online and samples < items  # few prompts are taken several times
    if config.train.train_policy.dataloader_drop_last and not repeats:
        return samples // items
    return math.ceil(samples / items)


def _samples(config: Config, *, own_data: bool) -> tuple[int | None, str]:
    dataset = config.train.train_policy.dataset
    if own_data:
        return None, "the script brings its own data"
    kind, video = job_kind(config).data, config.policy.diffusers.is_video
    if kind == "prompts":
        return _count_all_prompts(dataset)
    if kind == "preferences":
        return _count_preferences(dataset, video=video)
    return _count_pairs(dataset, video=video)


def _count_pairs(dataset: DatasetConfig, *, video: bool) -> tuple[int | None, str]:
    """How many captions with an image or a video the folder holds."""
    if not dataset.listed:
        return None, "train.train_policy.dataset.local_dir is not set"
    total = 0
    for folder in dataset.listed:
        place = Path(folder.local_dir).expanduser()
        if not os.path.exists(place):  # Path.exists raises below a folder that may not be entered
            return None, f"{place} is not there"
        try:
            total += folder.repeats * count_pairs(place, video=video)
        except UserError as error:  # of tars
            return None, str(error)
    return total, ""


def _count_preferences(dataset: DatasetConfig, *, video: bool) -> tuple[int | None, str]:
    if not dataset.local_dir:
        return None, "train.train_policy.dataset.local_dir is not set"
    place = Path(dataset.local_dir).expanduser()
    if not place.exists():
        return None, f"{place} is not there"
    try:
        return count_preferences(place, dataset.rejected_dir, video=video), ""
    except UserError as error:
        return None, str(error)


def _count_all_prompts(dataset: DatasetConfig) -> tuple[int | None, str]:
    total = 0
    for source, key in list_sources(dataset, "train.train_policy.dataset"):
        count, why = _count_prompts(source, key)
        if count is None:
            return None, why
        total += count
    return total, ""


def _count_prompts(dataset: PromptSource, key: str) -> tuple[int | None, str]:
    """How many prompts the file holds; a named set is not fetched for that."""
    try:
        file = prompt_file(dataset, key, split="train")
        if file is None:
            return None, f"the prompts {dataset.name} have not been fetched yet"
        return len(read_prompts(file)), ""
    except UserError as error:
        return None, str(error)


def _held_out(config: Config, samples: int) -> int:
    share, validation = config.train.train_policy.dataset.test_size, config.validation
    if share is None or not validation.enable or validation.dataset.local_dir:
        return 0
    if job_kind(config).data == "prompts":
        return 0
    if isinstance(share, float):
        share = round(share * samples)
    return min(share, samples)


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
    if steps is None:
        return None
    return math.ceil(steps / every)
