"""What a user reads when memory runs out: where, what needs how much, and what to change. No torch."""

from collections.abc import Iterator
from contextlib import suppress

from cosmos_rl.launcher.acceptance.accept import read_model
from cosmos_rl.launcher.acceptance.length import run_length
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.check.advice import can_offload, smaller_base
from cosmos_rl.launcher.check.sizes import memory_lines
from cosmos_rl.launcher.pipeline_files import Unknown
from cosmos_rl.policy.config import Config, rollout_chunk


def explain(config: Config, phase: str, *, on_cpu: bool) -> str:
    """The message for a run of ``config`` whose memory ran out in ``phase``, a name that ``memory_phase`` gave."""
    memory, device, length = None, "a GPU", run_length(config, own_data=True)
    with suppress(Unknown):
        memory = estimate.memory(config, read_model(config), on_cpu=on_cpu, saves=length.saves)
    if on_cpu:
        device = "the CPU"
    remedies = [*_suggest_for_phase(config, phase), *_suggest_for_samples(config)]
    if not on_cpu:
        remedies += _suggest_for_encoders(config)
        remedies += _suggest_for_host(config)
    remedies += _suggest_for_model(config)
    if not on_cpu:
        shards, lora = config.policy.parallelism.dp_shard_size, config.policy.lora
        condition = ""
        if lora is not None and lora.quantize_base != "none":
            condition = ', with policy.lora.quantize_base = "none"'  # a quantised base is not sharded
        remedies.append(f"more GPUs: policy.parallelism.dp_shard_size, now {shards}{condition}")
    return "\n".join(
        [
            f"out of memory on {device} while {phase}",
            "estimate for each rank:",
            *(f"  {line}" for line in memory_lines(memory, on_cpu=on_cpu)),
            "what needs less memory, in the order in which to try:",
            *(f"  {line}" for line in remedies),
        ]
    )


def _suggest_for_phase(config: Config, phase: str) -> Iterator[str]:
    """What helps in one phase alone."""
    rollout, chunk = config.rollout, rollout_chunk(config)
    at_once = config.validation.batch_size or config.train.train_policy.mini_batch
    if phase == "validating" and at_once > 1:
        yield f"validation.batch_size = 1, now {at_once}"
    if phase == "sampling" and chunk > 1:
        less = min(rollout.n_generation, max(chunk // 2, 1))
        yield f"rollout.n_generation_mini_batch = {less}; now {chunk} samples are made at once"
    if phase == "saving" and config.train.ckpt.save_mode == "async":
        yield 'train.ckpt.save_mode = "sync": no copy of the state is kept'


def _suggest_for_samples(config: Config) -> Iterator[str]:
    mini_batch = config.train.train_policy.mini_batch
    if mini_batch > 1:
        yield f"train.train_policy.mini_batch = 1, now {mini_batch}; the samples of a step stay as they are"


def _suggest_for_encoders(config: Config) -> Iterator[str]:
    job = config.train.train_policy
    if not (job.cached_latents or job.cached_text):
        yield "train.train_policy.enable_dataset_cache = true: the encoders leave the GPU"
    if not config.policy.diffusers.offload:
        yield "policy.diffusers.offload = true: the encoders leave the GPU while they are not used"


def _suggest_for_host(config: Config) -> Iterator[str]:
    if config.policy.model_gradient_checkpointing and not config.train.activation_offload:
        yield "train.activation_offload = true: what gradient checkpointing keeps waits in host memory"
    if can_offload(config):
        yield "train.base_offload = true: the frozen base waits in host memory, block by block"


def _suggest_for_model(config: Config) -> Iterator[str]:
    policy, train = config.policy, config.train
    if not policy.model_gradient_checkpointing:
        yield "policy.model_gradient_checkpointing = true"
    if policy.diffusers.dtype == "float32":
        yield 'policy.diffusers.dtype = "bfloat16" for the text encoders'
    if train.param_dtype == "float32":
        yield 'train.param_dtype = "bfloat16" for what is computed'
    if policy.lora is None:
        yield "[policy.lora] in place of all weights"
    elif (form := smaller_base(config)) is not None:
        bits = {"int8": 8, "nf4": 4}[form]
        yield f'policy.lora.quantize_base = "{form}": the frozen base in {bits} bits'
    key = "inference_size"
    if policy.diffusers.buckets is not None:
        key = "buckets, of which the largest is"
    yield f"a smaller policy.diffusers.{key}, now {list(policy.diffusers.largest_size)}"
    less = "Adam8bit" if train.optm_name == "Adam" else "AdamW8bit"
    if not train.optm_name.endswith("8bit") and train.optm_name != "Adafactor":
        yield f'train.optm_name = "{less}"'
    if train.ema_enable:
        yield "train.ema_enable = false"
