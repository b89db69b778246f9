"""What reinforcement learning and preference optimisation take in addition: kept policies, rollouts, and targets of the
update. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cosmos_rl.launcher.geometry import find_geometry, frames_of, text_tokens, text_width
from cosmos_rl.launcher.pipeline_files import PipelineFiles
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.chunks import rows_per_sample
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.plan import (
    DECODED_PIXELS,
    GALLERY,
    KEPT_BYTES,
    copies_reference,
    keeps_common_reference,
    number_teachers,
    plan_online,
    plan_sft,
)
from cosmos_rl.policy.config.recorded import recorded_steps


@dataclass(frozen=True)
class RlMemory:
    """Bytes per rank."""

    copies: Mapping[str, int]
    """Copies of policies that stay for the whole run."""
    saved: int
    """Of a checkpoint: the old policy, a reference that is an adapter, and the guard's samples."""
    latents: int
    """In host memory: those of a rank's samples and of the guard's, and the recorded steps."""
    media: int
    """In host memory, until they are scored and shown: those of a rank's samples, copies of some, and requests."""
    learnt: int
    """In host memory, while it learns: the rows of the update, and the media of a gallery."""
    conditions: int
    """On the device: those of the step's distinct prompts."""
    targets: int
    """On the device, while it learns."""
    recorded: int = 0
    """In host memory, at the height of a step; a part of latents and media or learnt."""

    @property
    def host(self) -> int:
        """At the height of a step."""
        return self.latents + max(self.media, self.learnt)


NO_RL = RlMemory({}, 0, 0, 0, 0, 0, 0)
"""Of any other job."""


def rl_memory(config: Config, pipeline: PipelineFiles, trained: int, shards: int) -> RlMemory:
    """The sizes for `trained` weights over `shards` ranks.

    Raises:
        Unknown: the sizes of latents cannot be known.
    """
    job, plan = online_table(config), plan_online(config)
    teachers = len(set(number_teachers(job)) - {0})
    lora, share, moving = config.policy.lora, 4 * trained // shards, copies_reference(job)
    copies = {
        "old policy": share * (lora is None and plan.keeps_old),
        "reference": share * (keeps_common_reference(job) and (lora is None or moving or not lora.starts_as_base)),
        "teachers of prompt sets": share * teachers,
    }
    media = (*config.policy.diffusers.largest_size, frames_of(config))
    clip, latent = 3 * math.prod(media), 4 * math.prod(find_geometry(pipeline).latent_shape(*media))
    guard, held_out = job.reward_hacking_guard, 0
    if guard.enable and not guard.local_dir:
        held_out = guard.samples * latent
    shown = clip * min(2 * GALLERY, plan.samples)
    saved = (lora is not None or plan.keeps_old) + ((lora is not None or moving) and copies["reference"] > 0)
    saved += teachers
    members = job_kind(config).rows
    micro = 4 * latent * job.mini_batch  # clean, noised, old, reference
    rows = min(plan.pairs, max(KEPT_BYTES // micro, 1) * job.mini_batch)
    recorded, kept, height = recorded_steps(config, latent // 4), 0, 0
    if recorded is not None:
        kept, height = recorded.kept, recorded.height
    joined = kept * (plan.chunk < plan.samples)  # of the chunks, into one
    return RlMemory(
        copies={name: size for name, size in copies.items() if size},
        saved=4 * trained * saved + held_out,
        latents=plan.samples * latent + kept + held_out,
        media=clip * plan.samples + max(clip * _copied(config) + _in_flight(config, clip, latent), shown) + joined,
        learnt=(height - kept or plan.pairs * latent) + shown,
        recorded=height,
        conditions=_conditions(config, pipeline) * (plan.samples // plan.group),
        targets=4 * latent * rows * members,
    )


def dpo_memory(config: Config, pipeline: PipelineFiles, trained: int, shards: int) -> RlMemory:
    """A copy as the reference, unless it is the base of an adapter, and what a rank holds of its preferences: both
    members, their noise, and the reference's velocities.

    Raises:
        Unknown: the sizes of latents cannot be known.
    """
    lora, copies, saved = config.policy.lora, {}, 0
    if lora is None or not lora.starts_as_base:
        copies = {"reference": 4 * trained // shards}
    if lora is not None and copies:
        saved = 4 * trained
    media = (*config.policy.diffusers.largest_size, frames_of(config))
    latent = 4 * math.prod(find_geometry(pipeline).latent_shape(*media))
    return replace(NO_RL, copies=copies, saved=saved, targets=5 * latent * plan_sft(config).samples)


def decoded_at_once(config: Config) -> int:
    """Samples of one call of the decoder."""
    pixels = math.prod(config.policy.diffusers.largest_size) * frames_of(config)
    return min(plan_online(config).chunk, max(DECODED_PIXELS // pixels, 1))


def _copied(config: Config) -> int:
    """Samples whose media are there twice: those of the decoder's call, and of the rollout's, on their way."""
    plan, decoded = plan_online(config), decoded_at_once(config)
    return decoded * (decoded < plan.chunk) + plan.chunk * (plan.chunk < plan.samples)


def _in_flight(config: Config, clip: int, latent: int) -> int:
    """Bytes of the requests to the reward service that wait for scores."""
    job = online_table(config)
    if not job.use_remote_reward or job.bypass_reward:
        return 0
    remote, sent = job.remote_reward, clip
    if remote.payload == "latents":
        sent = latent // 2
    return sent * min(remote.batch_size * remote.max_in_flight, plan_online(config).samples)


def _conditions(config: Config, pipeline: PipelineFiles) -> int:
    """Bytes of one prompt's text features, with those of its negative prompt."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[config.train.param_dtype]
    return rows_per_sample(config) * size * text_tokens(config, pipeline) * text_width(pipeline)


def chunk_rows(config: Config) -> int:
    """Rows of one forward pass of a rollout."""
    return rows_per_sample(config) * plan_online(config).chunk
