"""How much memory and disk a run will take, from its configuration and the shapes of its weights. No torch.

Sizes follow what the trainer keeps: trained weights, gradients, moments and averages in float32, a frozen base in
`train.param_dtype`, text encoders in `policy.diffusers.dtype`, the VAE in float32.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_rl.distributed.blocks import BLOCK, blocks_in_a_row
from cosmos_rl.launcher.pipeline_files import PipelineFiles, Shapes, Unknown, elements
from cosmos_rl.launcher.rl_estimate import RlMemory, chunk_rows, rl_memory
from cosmos_rl.launcher.rl_plan import rl_plan
from cosmos_rl.policy.config import Config, GrpoPolicyConfig, LoraConfig, images_at_once
from cosmos_rl.policy.config.model_rules import adapter_name_problems, target_problems

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Measured on SD3's transformer: bytes per token, layer and unit of width that autograd keeps of a block
_KEPT_BY_A_BLOCK = {"float32": 100.0, "bfloat16": 62.0, "float16": 62.0}
_KEPT_BY_A_CHECKPOINT = 1.3  # values per token, layer and unit of width
_AT_WORK = 50_000_000  # bytes that libraries and the allocator take on a CPU beside tensors, measured
_MADE_BY_A_BLOCK = 0.4  # of that, without autograd
_VAE_MAPS = 4  # full-size feature maps that are alive at once in an encoder or decoder
_IMAGE_NUMBERS = 6  # float32 numbers per pixel of an image that is decoded and clamped
_DECODED_AT_ONCE = 2**20  # pixels
_BUFFERS = re.compile(r"(^|\.)pos_embed\.pos_embed$")  # in the file, but computed, not trained
_BLOCK = re.compile(r"^(.+?\.\d+)\.")


@dataclass(frozen=True)
class Selection:
    """How many numbers of the transformer are trained, and how the others are held."""

    trained: int
    frozen: int
    spare_adapters: int
    """Numbers of adapters other than the trained one."""
    targets: Mapping[str, int]
    """LoRA target -> how many layers it finds."""
    problems: Sequence[str] = ()
    """What the launch would refuse about the adapters' targets."""
    eight_bit: int = 0
    """Of the trained numbers those whose moments an 8-bit optimiser holds in 8 bits."""


@dataclass(frozen=True)
class Memory:
    """Bytes per rank."""

    parts: Mapping[str, int]
    """What stays for the whole run -> bytes."""
    phases: Mapping[str, int]
    """Part of a step -> bytes on the device at its height; on a CPU, of everything."""
    host: int
    """Bytes in the host's memory beside a GPU: parts that rest there, and copies that are being written."""
    without: Sequence[str]
    """What could not be estimated and is left out."""

    @property
    def peak(self) -> int:
        """The largest of the phases."""
        return max(self.phases.values())


@dataclass(frozen=True)
class Disk:
    """Bytes that a run writes."""

    checkpoint: int
    export: int
    shared_export: int
    """What the first export of a run copies beside the weights; later exports link to it."""


def parameters(shapes: Shapes) -> int:
    """How many numbers are weights rather than stored buffers."""
    return elements({name: shape for name, shape in shapes.items() if not _BUFFERS.search(name)})


def select(config: Config, pipeline: PipelineFiles) -> Selection:
    """What of the transformer is trained, by the rules of the trainer."""
    shapes = pipeline.transformer
    if config.policy.lora is not None:
        return _adapters(config.policy.lora, shapes)
    chosen = {name: shape for name, shape in shapes.items() if config.policy.is_trained(name)}
    trained = parameters(chosen)
    eight_bit = sum(math.prod(shape) for shape in chosen.values() if blocks_in_a_row(shape))
    return Selection(trained, elements(shapes) - trained, 0, {}, eight_bit=eight_bit)


def _moments(config: Config, chosen: Selection) -> int:
    """Bytes of both moments: codes of a byte and a scale for each block, else float32."""
    eight_bit = chosen.eight_bit if config.train.optm_name.endswith("8bit") else 0
    return round(8 * (chosen.trained - eight_bit) + 2 * (1 + 4 / BLOCK) * eight_bit)


def memory(config: Config, pipeline: PipelineFiles, chosen: Selection, *, on_cpu: bool, saves: int | None) -> Memory:
    """The estimate for one rank. `saves`: how often the run saves, where that is known."""
    train, policy = config.train, config.policy
    compute, shards = BYTES[train.param_dtype], max(policy.parallelism.dp_shard_size, 1)
    base = compute if policy.lora is not None else 4
    trained, encoders, vae = 4 * chosen.trained // shards, *_frozen_parts(config, pipeline)
    frozen, spare = base * chosen.frozen // shards, 4 * chosen.spare_adapters // shards
    moments = _moments(config, chosen) // shards
    average = trained if train.ema_enable else 0
    work = _transient(config, pipeline)
    rl = work.rl
    parts = {
        "trained weights": trained,
        "frozen transformer weights": frozen,
        "old policy" if rl else "adapters that are not trained": spare,
        "gradients": trained,
        "optimiser moments": moments,
        "moving average (EMA)": average,
        "text encoders and other frozen parts": encoders,
        "VAE": vae,
        **(rl.copies if rl else {}),
    }
    job = train.train_policy
    offloaded = (policy.diffusers.offload or job.cached_latents or job.cached_text) and not on_cpu
    resident = 0 if offloaded else encoders + vae
    state = trained + frozen + spare + moments + average + resident + (_AT_WORK if on_cpu else 0)
    state += sum(rl.copies.values()) if rl else 0
    learning = rl.targets + rl.conditions if rl else 0
    gathered = _gathered(pipeline.transformer, compute, train.fsdp_reshard_after_forward) if shards > 1 else 0
    copies = 0 if shards > 1 or policy.lora is not None or compute == 4 else compute * chosen.trained
    stepping = {"for-loop": 0, "fused": 0, "foreach": trained}[train.optimizer_impl]
    phases = {
        "encoding": state + work.encoding + (max(encoders, vae) if offloaded else 0),
        "forward and backward": state + trained + copies + gathered + work.activations + learning,
        "optimiser step": state + trained + stepping,
        "export": state + average,
    }
    if rl:
        decoding = work.decoding + (vae if offloaded else 0)
        phases["rollout"] = state + rl.conditions + max(copies + gathered + work.sampling, decoding)
    resumable = trained + moments + average + (rl.saved // shards if rl else 0)
    saved, export = _written_copies(config, pipeline, chosen, resumable)
    host = saved + export
    if on_cpu:
        collected = rl.collected if rl else 0
        phases |= {name: phases[name] + collected for name in ("forward and backward", "rollout") if name in phases}
        again = train.ckpt.enable_checkpoint and (saves is None or saves > 1)
        phases = {k: v + (host if again else 0) for k, v in phases.items()}
        phases["export"] = state + average + export + (saved if again else 0)
        phases["saving"] = state + host
    else:
        host += encoders + vae - resident + (rl.collected if rl else 0)
    return Memory({k: v for k, v in parts.items() if v}, phases, host, work.without)


def disk(config: Config, pipeline: PipelineFiles, chosen: Selection) -> Disk:
    """What one checkpoint and one export take on the disk, all ranks together."""
    per_weight = 8 if config.train.ema_enable else 4
    exported = _exported(config, pipeline, chosen)
    shared = 0
    if config.policy.lora is None:
        others = [pipeline.folder / name for name in pipeline.parts if name != "transformer"]
        shared = sum(f.stat().st_size for folder in others for f in folder.iterdir() if f.is_file())
    rl = _transient(config, pipeline).rl
    state = per_weight * chosen.trained + _moments(config, chosen) + (rl.saved if rl else 0)
    return Disk(round(state), exported, shared)


# ---- what is trained ---------------------------------------------------------------------------------------------


def _adapters(lora: LoraConfig, shapes: Shapes) -> Selection:
    weights = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")}
    layers = {name: shape for name, shape in weights.items() if len(shape) in (2, 4)}
    everything = lora.target_modules == "all-linear"
    targets = [name for name, shape in layers.items() if len(shape) == 2] if everything else list(lora.target_modules)
    found = {t: [name for name in layers if name == t or name.endswith(f".{t}")] for t in targets}
    size = eight_bit = 0
    for name in {name for names in found.values() for name in names}:
        outside, inside, *kernel = layers[name]
        down, up = (_rank_of(name, lora), inside, *kernel), (outside, _rank_of(name, lora))
        size += math.prod(down) + math.prod(up)
        eight_bit += sum(math.prod(shape) for shape in (down, up) if blocks_in_a_row(shape))
    counts = {"all-linear": len(targets)} if everything else {t: len(names) for t, names in found.items()}
    problems = adapter_name_problems(lora.lora_names, (name.rpartition(".")[0] for name in shapes))
    problems += [] if everything else target_problems(targets, layers)
    spare = (len(lora.lora_names) - 1) * size
    return Selection(size, elements(shapes), spare, counts, problems, eight_bit)


def _rank_of(name: str, lora: LoraConfig) -> int:
    """The rank of the adapter of a layer, by PEFT's rule: the first pattern that matches the end of the name."""
    matching = (rank for key, rank in lora.r_pattern.items() if re.match(rf"(.*\.)?({key})$", name))
    return next(matching, lora.r)


# ---- what comes and goes -----------------------------------------------------------------------------------------


def _frozen_parts(config: Config, pipeline: PipelineFiles) -> tuple[int, int]:
    """Bytes of the encoders (and whatever else is not the transformer) and of the VAE, whole on every rank."""
    others = [name for name in pipeline.parts if name not in ("transformer", "vae")]
    encoders = BYTES[config.policy.diffusers.dtype] * sum(pipeline.count(name) for name in others)
    return encoders, 4 * pipeline.count("vae") if "vae" in pipeline.parts else 0


def _gathered(shapes: Shapes, compute: int, reshard: str) -> int:
    """Whole weights of two blocks (one is fetched ahead), and one block's gradients before they are dealt out."""
    if reshard == "never":
        return elements(shapes) * compute
    blocks: dict[str, int] = {}
    for name, shape in shapes.items():
        match = _BLOCK.match(name)
        key = match[1] if match else ""
        blocks[key] = blocks.get(key, 0) + math.prod(shape)
    return max(blocks.values()) * (2 * compute + 4)


def _written_copies(config: Config, pipeline: PipelineFiles, chosen: Selection, resumable: int) -> tuple[int, int]:
    """Bytes of the copies that a background save keeps for good, and of the export that is being written."""
    ckpt = config.train.ckpt
    saved = resumable if ckpt.enable_checkpoint and ckpt.save_mode == "async" else 0
    return saved, _exported(config, pipeline, chosen)


def _exported(config: Config, pipeline: PipelineFiles, chosen: Selection) -> int:
    numbers = chosen.trained if config.policy.lora is not None else pipeline.count("transformer")
    return BYTES[config.train.param_dtype] * numbers


@dataclass(frozen=True)
class _Work:
    """Bytes that come and go; 0 for what is unknown."""

    activations: int
    """Of a micro-batch, forward and backward."""
    encoding: int
    """Of the VAE, for the images of a micro-batch."""
    sampling: int
    """Of a rollout's forward pass."""
    decoding: int
    """Of the VAE, for the samples of a rollout's chunk."""
    rl: RlMemory | None
    without: Sequence[str]


def _transient(config: Config, pipeline: PipelineFiles) -> _Work:
    job, without = config.train.train_policy, []
    rl = isinstance(job, GrpoPolicyConfig)
    activations = encoding = sampling = decoding = 0
    sizes = None
    try:
        activations = _activations(config, pipeline)
        sampling = round(_MADE_BY_A_BLOCK * _block(config, pipeline, chunk_rows(config))) if rl else 0
    except Unknown as why:
        without.append(f"activations of the transformer ({why})")
    try:
        encoding = 0 if rl else _encoding(config, pipeline)
        decoding = _decoding(config, pipeline) if rl else 0
    except Unknown as why:
        without.append(f"work of the VAE ({why})")
    try:
        trained, shards = select(config, pipeline).trained, max(config.policy.parallelism.dp_shard_size, 1)
        sizes = rl_memory(config, pipeline, trained, shards) if rl else None
    except Unknown as why:
        without.append(f"copies of the policy and latents ({why})")
    return _Work(activations, encoding, sampling, decoding, sizes, without)


def tokens(config: Config, pipeline: PipelineFiles) -> int:
    """Tokens of one sample in the transformer, text included.

    Raises:
        Unknown: the transformer is of a class that is not known here.
    """
    kind, settings = _kind(pipeline, "transformer"), pipeline.configs["transformer"]
    if kind != "SD3Transformer2DModel":
        raise Unknown(f"{kind} is not known here")
    stride = vae_stride(pipeline) * int(settings["patch_size"])
    height, width = config.policy.diffusers.inference_size
    return (height // stride) * (width // stride) + 77 + config.policy.diffusers.max_prompt_length


def _activations(config: Config, pipeline: PipelineFiles) -> int:
    rows, dtype = config.train.train_policy.mini_batch, config.train.param_dtype
    block, layers = _block(config, pipeline, rows), int(pipeline.configs["transformer"]["num_layers"])
    if not config.policy.model_gradient_checkpointing:
        return round(layers * block)
    return round(layers * block / _KEPT_BY_A_BLOCK[dtype] * _KEPT_BY_A_CHECKPOINT * BYTES[dtype] + block)


def _block(config: Config, pipeline: PipelineFiles, rows: int) -> float:
    """Bytes that one block of the transformer makes of so many samples."""
    settings: Mapping[str, Any] = pipeline.configs["transformer"]
    count = tokens(config, pipeline) * rows
    try:
        int(settings["num_layers"])
        width = int(settings["num_attention_heads"]) * int(settings["attention_head_dim"])
    except (KeyError, TypeError, ValueError):
        raise Unknown("its config.json does not tell its size") from None
    return _KEPT_BY_A_BLOCK[config.train.param_dtype] * count * width


def _encoding(config: Config, pipeline: PipelineFiles) -> int:
    height, width = config.policy.diffusers.inference_size
    return _VAE_MAPS * 4 * height * width * _vae_channels(pipeline)[0] * images_at_once(config)


def _decoding(config: Config, pipeline: PipelineFiles) -> int:
    height, width = config.policy.diffusers.inference_size
    samples = rl_plan(config).chunk
    at_once = min(samples, max(_DECODED_AT_ONCE // (height * width), 1))
    maps = _VAE_MAPS * _vae_channels(pipeline)[:2][-1] * at_once
    return 4 * height * width * (maps + _IMAGE_NUMBERS * samples)


def _vae_channels(pipeline: PipelineFiles) -> list[int]:
    """Channels of the VAE's blocks, the ones at full size first."""
    if "vae" not in pipeline.parts or _kind(pipeline, "vae") != "AutoencoderKL":
        raise Unknown(f"{_kind(pipeline, 'vae')} is not known here")
    return [int(channels) for channels in pipeline.configs["vae"]["block_out_channels"]]


def vae_stride(pipeline: PipelineFiles) -> int:
    """Pixels of a latent's edge."""
    return 2 ** (len(_vae_channels(pipeline)) - 1)


def _kind(pipeline: PipelineFiles, part: str) -> str:
    return str(pipeline.configs.get(part, {}).get("_class_name", f"a pipeline without a {part}"))
