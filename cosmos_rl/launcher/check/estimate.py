"""How much memory and disk a run will take, from its configuration and the shapes of its weights. No torch.

Sizes follow what the trainer keeps: trained weights, gradients, moments and averages in float32, a frozen base in
`train.param_dtype`, text encoders in `policy.diffusers.dtype`, the VAE in float32.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cosmos_rl.launcher.acceptance.accept import ModelFiles
from cosmos_rl.launcher.acceptance.selection import Selection
from cosmos_rl.launcher.check.optimizer_state import gathered_for_a_step, optimizer_state, optimizer_state_of_rank
from cosmos_rl.launcher.check.packed import find_packed, find_resting, frozen_bytes, offloaded_bytes, unpacking
from cosmos_rl.launcher.check.rl_estimate import NO_RL, RlMemory, chunk_rows, decoded_at_once, dpo_memory, rl_memory
from cosmos_rl.launcher.geometry import find_blocks, find_geometry, frames_of, full_channels, text_tokens
from cosmos_rl.launcher.pipeline_files import PipelineFiles, Shapes, Unknown, elements
from cosmos_rl.policy.config import Config, data_ranks, images_at_once
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.optimizers import OPTIMIZERS, find_kind, short_name
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.policy.config.ranks import weight_shards

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes per token, layer and unit of width that autograd keeps of a block: measured on SD3 and FLUX.1; blocks of others
# keep up to twice that (tests/launcher/test_geometry.py)
_KEPT_BY_A_BLOCK = {"float32": 100.0, "bfloat16": 62.0, "float16": 62.0}
_KEPT_BY_A_CHECKPOINT = 1.3  # values per token, layer and unit of width
_AT_WORK = 50_000_000  # bytes that libraries and the allocator take on a CPU in addition to tensors, measured
_MADE_BY_A_BLOCK = 0.4  # of that, without autograd
_VAE_MAPS = 4  # full-size feature maps that are alive at once in an encoder or decoder
_IMAGES = 6  # float32 numbers per pixel of an image that is decoded and clamped
_BLOCK = re.compile(r"^(.+?\.\d+)\.")
TRAINED, FROZEN = "trained weights", "frozen transformer weights"
GRADIENTS, MOMENTS, AVERAGE = "gradients", "optimizer state", "moving average (EMA)"
ENCODERS, VAE = "text encoders and other frozen parts", "VAE"
WORK = "activations and other work"
_OF_A_STEP = ("forward and backward", "optimiser step")


@dataclass(frozen=True)
class Memory:
    """Bytes per rank."""

    parts: Mapping[str, int]
    """What stays for the whole run -> bytes."""
    phases: Mapping[str, int]
    """Part of a step -> bytes on the device at its height; on a CPU, of everything."""
    at_peak: Mapping[str, int]
    """What the largest phase holds -> bytes on the device."""
    host: int
    """Bytes in the host's memory next to a GPU: parts that rest there, and copies that are being written."""
    recorded: int
    """Of these, in the host's memory: recorded sampling steps."""
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
    """What the first export of a run copies in addition to the weights; later exports link to it."""


def memory(config: Config, files: ModelFiles, *, on_cpu: bool, saves: int | None) -> Memory:
    """The estimate for one rank. `saves`: how often the run saves, where that is known."""
    rank = _Rank(config, files.pipeline, files.selection, on_cpu)
    saved, export = rank.saved_copy, _exported(config, files)
    phases, host = rank.phases(), saved + export
    held = rank.held()
    if not on_cpu:
        host += rank.parts[ENCODERS] + rank.parts[VAE] - rank.resident + rank.rl.host + rank.work.offloaded
        host += rank.base[1]
    else:
        again = config.train.ckpt.enable_checkpoint and (saves is None or saves > 1)
        if again:  # the next steps begin while the copies are being written
            phases = {name: size + host for name, size in phases.items()}
            phases["export"] = rank.state + rank.average + export + saved
        else:
            phases["export"] += export
        phases["saving"] = rank.state + host
    parts = {name: size for name, size in rank.parts.items() if size}
    return Memory(parts, phases, held, host, rank.rl.recorded, rank.without)


def disk(config: Config, files: ModelFiles) -> Disk:
    """What one checkpoint and one export take on the disk, all ranks together."""
    pipeline, chosen = files.pipeline, files.selection
    averages = find_kind(config.train.optm_name).averages
    per_weight = 4 * (1 + config.train.ema_enable + averages)
    shared = 0
    if config.policy.lora is None:
        others = [pipeline.folder / name for name in pipeline.others]
        shared = sum(f.stat().st_size for folder in others for f in folder.iterdir() if f.is_file())
    rl = _estimate_work(config, pipeline, chosen).rl or NO_RL
    state = per_weight * chosen.trained + optimizer_state(config, chosen.shapes) + rl.saved
    return Disk(round(state), _exported(config, files), shared)


@dataclass(frozen=True)
class _Rank:
    """The bytes of one rank: what stays for the whole run, and what each phase of a step adds to it."""

    config: Config
    pipeline: PipelineFiles
    chosen: Selection
    on_cpu: bool

    @cached_property
    def work(self) -> "_Work":
        return _estimate_work(self.config, self.pipeline, self.chosen)

    @property
    def without(self) -> list[str]:
        """What is left out, or guessed."""
        train = self.config.train
        if short_name(train.optm_name) in OPTIMIZERS:
            return [*self.work.without]
        return [*self.work.without, f"what {train.optm_name} keeps beyond two float32 numbers for each weight"]

    @property
    def rl(self) -> RlMemory:
        return self.work.rl or NO_RL

    @property
    def samples(self) -> bool:
        """Whether the policy makes samples, of a size that is known."""
        return job_kind(self.config).online and self.work.rl is not None

    @property
    def shards(self) -> int:
        return weight_shards(self.config.policy.parallelism)

    @property
    def invariant(self) -> bool:
        return self.config.train.rank_invariant

    @property
    def partial_sums(self) -> int:
        """Most sums of gradients that wait for others of as many samples (``distributed/pairwise.py``)."""
        if not self.invariant:
            return 0
        samples, blocks = _count_addends(self.config)
        return samples.bit_length() + blocks.bit_length() - 2

    @property
    def trained(self) -> int:
        return 4 * self.chosen.trained // self.shards

    @property
    def average(self) -> int:
        return self.trained * self.config.train.ema_enable

    @cached_property
    def parts(self) -> dict[str, int]:
        """What stays -> bytes."""
        config, chosen = self.config, self.chosen
        encoders, vae = _frozen_parts(config, self.pipeline)
        return {
            TRAINED: self.trained,
            FROZEN: self.base[0] + self.base[1] * self.on_cpu,
            self._spare: 4 * chosen.spare_adapters // self.shards,
            GRADIENTS: self.trained,
            MOMENTS: optimizer_state_of_rank(config, chosen.shapes, self.shards),
            AVERAGE: self.average,
            ENCODERS: encoders,
            VAE: vae,
            **self.rl.copies,
        }

    @cached_property
    def base(self) -> tuple[int, int]:
        """Of the denoisers' weights that are not trained: on the device, and at rest in host memory."""
        lora, train = self.config.policy.lora, self.config.train
        if lora is None:
            return 4 * self.chosen.frozen // self.shards, 0
        given = lora.quantize_base, self.pipeline.denoisers(), self.chosen, BYTES[train.param_dtype], self.shards
        if train.base_offload:
            return offloaded_bytes(*given, pinned=not self.on_cpu)
        return frozen_bytes(*given), 0

    @property
    def _spare(self) -> str:
        """What the adapters are that are not trained."""
        if self.samples:
            return "old policy"
        return "adapters that are not trained"

    @property
    def offloads(self) -> bool:
        """Whether encoders and VAE leave the device when they are not in use."""
        job = self.config.train.train_policy
        caches = job.cached_latents or job.cached_text
        return (self.config.policy.diffusers.offload or caches) and not self.on_cpu

    @property
    def texts_apart(self) -> bool:
        """Whether the transformer leaves the device while texts are encoded."""
        return self.offloads and self.config.train.train_policy.cached_text and not self.by_block

    @property
    def by_block(self) -> bool:
        """Whether text encoders come to the device block by block."""
        return self.config.policy.diffusers.offload_text_blocks and not self.on_cpu

    @cached_property
    def texts(self) -> list[int]:
        """Of each text encoder, what is on the device at once while it encodes."""
        encoders = _text_encoders(self.pipeline)
        if self.by_block:
            numbers = [max(_count_blocks(shapes, others_as_one=False)) for shapes in encoders]
        else:
            numbers = [elements(shapes) for shapes in encoders]
        return [BYTES[self.config.policy.diffusers.dtype] * count for count in numbers]

    @property
    def resident(self) -> int:
        """Of encoders and VAE, on the device."""
        if self.offloads:
            return 0
        return self.parts[VAE] + (self.other_encoders if self.by_block else self.parts[ENCODERS])

    @property
    def other_encoders(self) -> int:
        """Frozen parts that are neither text encoders nor VAE."""
        texts = _text_encoders(self.pipeline)
        return self.parts[ENCODERS] - BYTES[self.config.policy.diffusers.dtype] * sum(map(elements, texts))

    @property
    def state(self) -> int:
        """On the device between two phases."""
        lasting = sum(size for name, size in self.parts.items() if name not in (GRADIENTS, ENCODERS, VAE))
        return lasting + self.resident + _AT_WORK * self.on_cpu

    @property
    def gathered(self) -> int:
        """Weights in the compute dtype that a forward pass makes."""
        compute, train, lora = BYTES[self.config.train.param_dtype], self.config.train, self.config.policy.lora
        shapes, form = self.pipeline.transformer, "none" if lora is None else lora.quantize_base
        unpacked = unpacking(form, shapes, compute)
        if self.shards > 1 or self.invariant:
            whole = {*find_packed(form, shapes), *(find_resting(shapes) if train.base_offload else ())}
            spread = {name: shape for name, shape in shapes.items() if name not in whole}
            return unpacked + _gathered(spread, compute, train.fsdp_reshard_after_forward)
        if lora is not None or compute == 4:
            return unpacked
        return compute * self.chosen.trained

    @property
    def saved_copy(self) -> int:
        """Of the copies that a background save keeps for good."""
        ckpt = self.config.train.ckpt
        if not ckpt.enable_checkpoint or ckpt.save_mode != "async":
            return 0
        moments = self.parts[MOMENTS]
        return self.trained + moments + self.average + self.rl.saved // self.shards

    def phases(self) -> dict[str, int]:
        """Part of a step -> bytes at its height."""
        phases = {
            "encoding": self._encoding(),
            "forward and backward": self._learning(),
            "optimiser step": self._stepping(),
            "export": self.state + self.average,
        }
        if self.samples:
            phases["rollout"] = self._sampling()
        return phases

    def held(self) -> dict[str, int]:
        """What is on the device at the height of the largest phase -> bytes; the rest of it is work."""
        phases = self.phases()
        phase = max(phases, key=lambda name: phases[name])
        found = {name: size for name, size in self.parts.items() if name not in (GRADIENTS, ENCODERS, VAE)}
        if phase in _OF_A_STEP:
            found[GRADIENTS] = self.parts[GRADIENTS]
        if not self.offloads:
            found |= {ENCODERS: self.resident - self.parts[VAE], VAE: self.parts[VAE]}
        if phase == "encoding" and (self.offloads or self.by_block):
            texts, media = self._encoding_texts(), self._encoding_media()
            if texts > media and self.texts_apart:
                found = {name: size for name, size in found.items() if name not in (TRAINED, FROZEN, self._spare)}
            if texts > media:
                found[ENCODERS] = phases[phase] - sum(size for name, size in found.items() if name != ENCODERS)
            else:
                found[VAE] = self.parts[VAE]
        return {**found, WORK: phases[phase] - sum(found.values())}

    def _encoding(self) -> int:
        """The higher of texts and media, which are not encoded at the same time."""
        return max(self._encoding_texts(), self._encoding_media())

    def _encoding_texts(self) -> int:
        if not self.offloads and not self.by_block:
            return self.state
        if self.texts_apart:
            denoisers = sum(self.parts[name] for name in (TRAINED, FROZEN, self._spare))
            return self.state - denoisers + sum(self.texts)
        return self.state + max(self.texts, default=0)

    def _encoding_media(self) -> int:
        return self.state + self.work.encoding + (self.parts[VAE] + self.other_encoders) * self.offloads

    def _learning(self) -> int:
        rows = self.rl.targets + self.rl.conditions + (self.rl.latents + self.rl.learnt) * self.on_cpu
        activations = self.work.activations + self.work.offloaded * self.on_cpu
        return self.state + self.trained * (1 + self.partial_sums) + self.gathered + activations + rows

    def _stepping(self) -> int:
        gradients = self.trained
        if self.config.train.optimizer_impl == "foreach":  # all updates at once
            gradients += self.trained
        return self.state + gradients + gathered_for_a_step(self.config, self.chosen.shapes, self.shards)

    def _sampling(self) -> int:
        decoding = self.work.decoding + self.parts[VAE] * self.offloads
        held = self.rl.conditions + (self.rl.latents + self.rl.media) * self.on_cpu
        return self.state + held + max(self.gathered + self.work.sampling, decoding)


# ---- what comes and goes -----------------------------------------------------------------------------------------


def _count_addends(config: Config) -> tuple[int, int]:
    """Of the sum over an optimiser step's gradients: a rank's most addends of a block, and blocks."""
    train, ranks = config.train, data_ranks(config.policy.parallelism)
    if not job_kind(config).online:
        return (train.global_batch_size or train.train_batch_per_replica) // ranks, 1
    job, plan = online_table(config), plan_online(config)
    samples, term = min(job.batch_size_per_optimize or plan.learnt, plan.learnt), job.data_term
    if term.beta == 0.0:
        return samples, plan.sigmas
    real = term.batch_size // ranks * (plan.sigmas if term.per_step else 1)
    return max(samples, real), 1 + plan.sigmas


def _frozen_parts(config: Config, pipeline: PipelineFiles) -> tuple[int, int]:
    """Bytes of the encoders (and whatever else is not the transformer) and of the VAE, whole on every rank."""
    others = [name for name in pipeline.others if name != "vae"]
    encoders = BYTES[config.policy.diffusers.dtype] * sum(pipeline.count(name) for name in others)
    return encoders, 4 * pipeline.count("vae") if "vae" in pipeline.parts else 0


def _text_encoders(pipeline: PipelineFiles) -> list[Shapes]:
    """The tensors of each text encoder."""
    return [pipeline.parts[name] for name in pipeline.others if name.startswith("text_encoder")]


def _count_blocks(shapes: Shapes, *, others_as_one: bool) -> list[int]:
    """How many numbers each block holds, and what is in none: as one, or each tensor by itself."""
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        match = _BLOCK.match(name)
        key = match[1] if match else name * (not others_as_one)
        found[key] = found.get(key, 0) + math.prod(shape)
    return list(found.values())


def _gathered(shapes: Shapes, compute: int, reshard: str) -> int:
    """Whole weights of two blocks (one is fetched ahead), and one block's gradients before they are sharded."""
    if reshard == "never":
        return elements(shapes) * compute
    return max(_count_blocks(shapes, others_as_one=True)) * (2 * compute + 4)


def _exported(config: Config, files: ModelFiles) -> int:
    numbers = files.selection.trained
    if config.policy.lora is None:
        numbers = elements(files.pipeline.denoisers())
    return BYTES[config.train.param_dtype] * numbers


@dataclass(frozen=True)
class _Work:
    """Bytes that come and go; 0 for what is unknown."""

    activations: int
    """Of a micro-batch, forward and backward."""
    offloaded: int
    """Of these, in host memory; not counted among them."""
    encoding: int
    """Of the VAE, for the images of a micro-batch."""
    sampling: int
    """Of a rollout's forward pass."""
    decoding: int
    """Of the VAE, for the samples of a rollout's chunk."""
    rl: RlMemory | None
    without: Sequence[str]


def _estimate_work(config: Config, pipeline: PipelineFiles, chosen: Selection) -> _Work:
    kind, without = job_kind(config), []
    online = kind.online
    activations = offloaded = encoding = sampling = decoding = 0
    rl = None
    try:
        activations, offloaded = _activations(config, pipeline), _offloaded(config, pipeline)
        if online:
            sampling = round(_MADE_BY_A_BLOCK * _block(config, pipeline, chunk_rows(config)))
    except Unknown as why:
        without.append(f"activations of the transformer ({why})")
    try:
        if online:
            decoding = _decoding(config, pipeline)
        else:
            encoding = _encoding(config, pipeline)
    except Unknown as why:
        without.append(f"work of the VAE ({why})")
    if online or kind.data == "preferences":
        kept_memory = rl_memory if online else dpo_memory
        try:
            rl = kept_memory(config, pipeline, chosen.trained, weight_shards(config.policy.parallelism))
        except Unknown as why:
            without.append(f"copies of the policy and latents ({why})")
    return _Work(activations, offloaded, encoding, sampling, decoding, rl, without)


def tokens(config: Config, pipeline: PipelineFiles) -> int:
    """Tokens of one sample that a rank has in the transformer, text included: of context-parallel peers each has a part
    of the media's; all of the text's are counted, which only some families split.

    Raises:
        Unknown: the pipeline's files do not say so, and it was not measured.
    """
    media = (*config.policy.diffusers.largest_size, frames_of(config))
    own = math.ceil(find_geometry(pipeline).tokens(*media) / config.policy.parallelism.cp_size)
    return own + text_tokens(config, pipeline)


def _activations(config: Config, pipeline: PipelineFiles) -> int:
    rows = job_kind(config).rows * config.train.train_policy.mini_batch
    block, layers = _block(config, pipeline, rows), find_blocks(pipeline).layers
    if not config.policy.model_gradient_checkpointing:
        return round(layers * block)
    if config.train.activation_offload:
        layers = 1  # that comes back
    return round(layers * _checkpoint(config, pipeline) + block)


def _checkpoint(config: Config, pipeline: PipelineFiles) -> float:
    """Bytes that checkpointing keeps of a layer for the backward pass."""
    rows, dtype = job_kind(config).rows * config.train.train_policy.mini_batch, config.train.param_dtype
    return _block(config, pipeline, rows) / _KEPT_BY_A_BLOCK[dtype] * _KEPT_BY_A_CHECKPOINT * BYTES[dtype]


def _offloaded(config: Config, pipeline: PipelineFiles) -> int:
    """Bytes of that in host memory."""
    if not config.train.activation_offload:
        return 0
    return round(find_blocks(pipeline).layers * _checkpoint(config, pipeline))


def _block(config: Config, pipeline: PipelineFiles, rows: int) -> float:
    """Bytes that one block of the transformer makes of so many samples."""
    count = tokens(config, pipeline) * rows
    return _KEPT_BY_A_BLOCK[config.train.param_dtype] * count * find_blocks(pipeline).width


def _maps(pipeline: PipelineFiles) -> list[int]:
    """Channels of the VAE at full size, and below it.

    Raises:
        Unknown: it works on videos, piece by piece in a way of its own, or its files do not list its blocks.
    """
    if find_geometry(pipeline).frame_stride > 1:
        raise Unknown(f"{pipeline.class_of('vae')} takes frames piece by piece")
    return full_channels(pipeline.configs["vae"])


def _encoding(config: Config, pipeline: PipelineFiles) -> int:
    height, width = config.policy.diffusers.largest_size
    return _VAE_MAPS * 4 * height * width * _maps(pipeline)[0] * images_at_once(config)


def _decoding(config: Config, pipeline: PipelineFiles) -> int:
    height, width = config.policy.diffusers.largest_size
    return 4 * height * width * decoded_at_once(config) * (_VAE_MAPS * _maps(pipeline)[:2][-1] + _IMAGES)
