"""How many samples reinforcement learning makes in one call, where the configuration leaves it open, and how many
images are encoded at once for a cache.

A function of the configuration alone: check, estimate and trainer agree, and a resumed run makes the same calls, whose
size decides the last bits of a sample.
"""

import math

from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.config.ranks import data_ranks
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import GrpoPolicyConfig

PIXELS_AT_ONCE = 2**23
"""Pixels of a call: enough to keep a device busy, and 1.5 GB for SD3.5 medium in bfloat16, little compared with weights
and update. More of them at once would hardly be faster."""
_OVERLAPPING = 2
"""Calls at least where a service scores one while the next is made."""
_ENCODED_PIXELS = 2**20
CACHED_AT_ONCE = 8
"""Texts, or images at most, that are encoded at once for a cache: the same number whatever is missing."""


def images_at_once(config: Config, size: Sides | None = None) -> int:
    """Images that are encoded in one pass; for a cache always as many, filled up where fewer are missing.

    `size`: theirs, height and width; None: the largest that is trained on.
    """
    job = config.train.train_policy
    if not job.cached_latents:
        return job.mini_batch
    height, width = size or config.policy.diffusers.largest_size
    return min(max(_ENCODED_PIXELS // (height * width), 1), CACHED_AT_ONCE)


def rollout_chunk(config: Config) -> int:
    """Samples of a rank that one call makes in training."""
    if config.train.rank_invariant:
        return 1
    rollout, job = config.rollout, config.train.train_policy
    group = rollout.n_generation
    total = config.train.global_batch_size or config.train.train_batch_per_replica
    own = total // data_ranks(config.policy.parallelism)
    if rollout.n_generation_mini_batch is not None:
        return min(rollout.n_generation_mini_batch, own)
    if rollout.batch_size is not None:
        return min(group * rollout.batch_size, own)
    calls = 1
    if isinstance(job, GrpoPolicyConfig) and job.use_remote_reward and not job.bypass_reward:
        calls = _OVERLAPPING
    return min(_even(own, group, _most(config), calls), own)


def validation_chunk(config: Config, prompts: int) -> int:
    """Samples that one call makes in validation, of `prompts` prompts over all ranks."""
    if config.train.rank_invariant:
        return 1
    group = config.validation.n_generation
    asked = config.validation.batch_size or config.rollout.batch_size
    if asked is not None:
        return asked * group
    own = math.ceil(prompts * group / data_ranks(config.policy.parallelism))
    return _even(own, group, _most(config), 1)


def _most(config: Config) -> int:
    """Samples that fit into a call."""
    diffusers = config.policy.diffusers
    height, width = diffusers.largest_size
    frames = 1
    if diffusers.is_video:
        frames = max(diffusers.train_frames, diffusers.inference_frames)
    return max(PIXELS_AT_ONCE // (height * width * frames * rows_per_sample(config)), 1)


def rows_per_sample(config: Config) -> int:
    """Rows of a sample in one forward pass: with guidance its negative prompt is another one."""
    if config.policy.diffusers.sample.guidance_scale > 1:
        return 2
    return 1


def _even(samples: int, group: int, most: int, calls: int) -> int:
    """Whole groups, at least one, in as few calls of about the same size as `most` allows."""
    groups = max(math.ceil(samples / group), 1)
    calls = max(calls, math.ceil(groups / max(most // group, 1)))
    return group * math.ceil(groups / min(calls, groups))
