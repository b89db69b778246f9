"""What of a run takes most of the memory at its peak, and which key lowers that. No torch."""

from collections.abc import Iterator

from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.machine import format_bytes
from cosmos_rl.policy.config import Config, rollout_chunk
from cosmos_rl.policy.config.ranks import weight_shards

_CARDS_GB = (24, 16)
_SHARDS_ABOVE_4_BITS = 3  # a rank's share of 16 bits is larger than 4.1 bits


def peak_lines(config: Config, memory: estimate.Memory, card: int | None) -> Iterator[str]:
    """Where the peak is above the memory of the GPU here, `card` bytes, or where that is unknown above that of a small
    one: the phase, its largest part, and what makes that smaller.
    """
    limit = _exceeded(memory.peak, card)
    if not limit:
        return
    phase = max(memory.phases, key=lambda name: memory.phases[name])
    part, size = max(memory.at_peak.items(), key=lambda pair: pair[1])
    yield f"the peak, while {phase}, is above {limit}; the largest part of it: {part}, {format_bytes(size)}"
    yield f"what lowers it: {_remedy(config, part, phase)}"


def _exceeded(peak: int, card: int | None) -> str:
    if card is not None:
        return f"the {format_bytes(card)} of this machine's GPU" * (peak > card)
    return next((f"a GPU of {size} GB" for size in _CARDS_GB if peak > size * 10**9), "")


def _remedy(config: Config, part: str, phase: str) -> str:
    """The next key to change."""
    if part == estimate.ENCODERS:
        return _for_encoders(config)
    if part == estimate.WORK:
        return _for_work(config, phase)
    policy, train = config.policy, config.train
    if part == estimate.VAE and not policy.diffusers.offload:
        return "policy.diffusers.offload = true"
    if part == estimate.FROZEN and train.param_dtype == "float32":
        return 'train.param_dtype = "bfloat16"'
    form = smaller_base(config)
    if part == estimate.FROZEN and (form is not None or can_offload(config)):
        return _for_base(config, form)
    if part not in (estimate.FROZEN, estimate.VAE) and policy.lora is None:
        return "[policy.lora] in place of all weights"
    if part == estimate.MOMENTS and train.optm_name in ("Adam", "AdamW"):
        return f'train.optm_name = "{train.optm_name}8bit"'
    if part == estimate.AVERAGE:
        return "train.ema_enable = false"
    if part == estimate.VAE:
        return _for_size(config)
    more = f"more GPUs, policy.parallelism.dp_shard_size, now {policy.parallelism.dp_shard_size}"
    if policy.lora is not None and policy.lora.quantize_base != "none":
        return f'{more}, with policy.lora.quantize_base = "none", as a quantised base is whole on every rank'
    return more


def smaller_base(config: Config) -> str | None:
    """The form of `policy.lora.quantize_base` that takes less of a rank's memory than the base does now: a quantised
    one is not sharded."""
    lora, shards = config.policy.lora, weight_shards(config.policy.parallelism)
    if lora is None or lora.quantize_base == "nf4":
        return None
    if lora.quantize_base == "none" and shards == 1:
        return "int8"
    if lora.quantize_base == "int8" or shards <= _SHARDS_ABOVE_4_BITS:
        return "nf4"
    return None


def _for_base(config: Config, form: str | None) -> str:
    """``form``: see `smaller_base`."""
    keys, lora = ["train.base_offload = true"] * can_offload(config), config.policy.lora
    if form is not None:
        keys.insert(0, f'policy.lora.quantize_base = "{form}"')
    elif lora is not None and lora.quantize_base != "none":
        return keys[0]  # on more GPUs each would hold as much
    return f"{', '.join(keys)}, or more GPUs"


def can_offload(config: Config) -> bool:
    """Whether the base is frozen, and could rest in host memory where it does not."""
    policy = config.policy
    return policy.lora is not None and policy.model_gradient_checkpointing and not config.train.base_offload


def _for_encoders(config: Config) -> str:
    diffusers = config.policy.diffusers
    if diffusers.dtype == "float32":
        return 'policy.diffusers.dtype = "bfloat16"'
    if not config.train.train_policy.cached_text:
        return "train.train_policy.cache.text = true"
    if not diffusers.offload_text_blocks:
        return "policy.diffusers.offload_text_blocks = true"
    return "none; one block of a text encoder does not fit (another model, or a cache that was filled on a larger GPU)"


def _for_work(config: Config, phase: str) -> str:
    if not config.policy.model_gradient_checkpointing:
        return "policy.model_gradient_checkpointing = true"
    if config.train.train_policy.mini_batch > 1:
        return f"train.train_policy.mini_batch = 1, now {config.train.train_policy.mini_batch}"
    if phase == "forward and backward" and not config.train.activation_offload:
        return "train.activation_offload = true"
    if config.train.train_policy.type == "grpo" and rollout_chunk(config) > 1:
        return f"a smaller rollout.n_generation_mini_batch; now {rollout_chunk(config)} samples are made at once"
    return _for_size(config)


def _for_size(config: Config) -> str:
    key = "inference_size" if config.policy.diffusers.buckets is None else "buckets, of which the largest is"
    return f"a smaller policy.diffusers.{key}, now {list(config.policy.diffusers.largest_size)}"
