"""What reinforcement learning takes besides: policies that are kept, rollouts, and targets of the update. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from cosmos_rl.launcher.pipeline_files import PipelineFiles, Unknown
from cosmos_rl.launcher.rl_plan import keeps_old, rl_plan
from cosmos_rl.policy.config import Config, GrpoPolicyConfig

KEPT_TARGETS = 256 * 2**20
"""Bytes of latents, noised latents and velocities of the frozen policies that the update keeps at once."""


@dataclass(frozen=True)
class RlMemory:
    """Bytes per rank."""

    copies: Mapping[str, int]
    """Copies of policies that stay for the whole run."""
    saved: int
    """Of a checkpoint: the old policy, a reference that is an adapter, and the guard's samples."""
    collected: int
    """In host memory: latents and media of a rank's samples, and their rows for the update."""
    conditions: int
    """On the device: those of the step's distinct prompts."""
    targets: int
    """On the device, while it learns."""


def rl_memory(config: Config, pipeline: PipelineFiles, trained: int, shards: int) -> RlMemory:
    """The sizes for `trained` weights over `shards` ranks.

    Raises:
        Unknown: the sizes of latents cannot be known.
    """
    job, plan = config.train.train_policy, rl_plan(config)
    assert isinstance(job, GrpoPolicyConfig)
    lora, share = config.policy.lora, 4 * trained // shards
    copies = {
        "old policy": share * (lora is None and keeps_old(config)),
        "reference": share * (job.kl_beta > 0 and (lora is None or not lora.starts_as_base)),
    }
    height, width = config.policy.diffusers.inference_size
    latent = 4 * latent_numbers(config, pipeline)
    guard, held_out = job.reward_hacking_guard, 0
    if guard.enable and not guard.local_dir:
        held_out = guard.samples * latent
    saved = (lora is not None or keeps_old(config)) + (lora is not None and copies["reference"] > 0)
    micro = 4 * latent * job.mini_batch  # clean, noised, old, reference
    rows = min(plan.pairs, max(KEPT_TARGETS // micro, 1) * job.mini_batch)
    return RlMemory(
        copies={name: size for name, size in copies.items() if size},
        saved=4 * trained * saved + held_out,
        collected=plan.samples * (3 * height * width + latent) + plan.pairs * latent + held_out,
        conditions=_conditions(config, pipeline) * (plan.samples // plan.group),
        targets=4 * latent * rows,
    )


def latent_numbers(config: Config, pipeline: PipelineFiles) -> int:
    """Numbers of one sample's latents.

    Raises:
        Unknown: the VAE or the transformer does not tell.
    """
    settings = pipeline.configs.get("vae", {})
    if settings.get("_class_name") != "AutoencoderKL":
        raise Unknown(f"a VAE of the class {settings.get('_class_name')} is not known here")
    stride = 2 ** (len(settings["block_out_channels"]) - 1)
    height, width = config.policy.diffusers.inference_size
    return int(settings["latent_channels"]) * (height // stride) * (width // stride)


def _conditions(config: Config, pipeline: PipelineFiles) -> int:
    """Bytes of one prompt's text features, with their guidance twin."""
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[config.train.param_dtype]
    settings = pipeline.configs["transformer"]
    tokens = 77 + config.policy.diffusers.max_prompt_length
    twins = 2 if config.policy.diffusers.sample.guidance_scale > 1 else 1
    return twins * size * tokens * int(settings.get("joint_attention_dim") or 0)


def chunk_rows(config: Config) -> int:
    """Rows of one forward pass of a rollout."""
    twins = 2 if config.policy.diffusers.sample.guidance_scale > 1 else 1
    return twins * rl_plan(config).chunk
