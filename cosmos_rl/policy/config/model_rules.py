"""Rules between a configuration and its model, the same for a check that knows files alone and for the model itself."""

import difflib
import math
import re
from collections.abc import Container, Iterable, Iterator, Sequence

from cosmos_rl.policy.config.policy import DiffusersConfig

INSTRUCTION, BINNING = "complex_human_instruction", "use_resolution_binning"
"""Arguments of a pipeline's call: texts in front of every prompt, and whether sizes are replaced by those of a list."""

_SERVICE_VAES = {"AutoencoderKLWan": (16, 48)}
"""VAEs that the reward service can decode with: class of diffusers -> channels of the latents."""

NF4_BLOCK = 64
"""Weights that share a scale of 8 bits."""
_IN_A_BLOCK = re.compile(r"(^|\.)\d+\..*\.weight$")
_BLOCK = re.compile(r"((?:transformer(?:_2)?\.)?[^.]*(?:blocks|layers)\.\d+)\.")
"""Of the lists of a denoiser itself. Not those of its embedders, nor refiners, which not all families compute again in
the backward pass."""
_BYTES_OF_A_ROW = 5
"""Of a weight in 8 bits: a scale in float32, and the code of zero."""


def is_quantised(form: str, name: str, shape: Sequence[int]) -> bool:
    """Whether `policy.lora.quantize_base` packs a tensor of a transformer: the weight of a linear layer in a block."""
    if form == "nf4" and math.prod(shape) % NF4_BLOCK:
        return False
    return len(shape) == 2 and _IN_A_BLOCK.search(name) is not None


def find_block(name: str) -> str | None:
    """The block that `train.base_offload` fetches as a whole with a tensor of a denoiser; None: the tensor stays."""
    match = _BLOCK.match(name)
    return match and match[1]


def offload_problem(denoiser: str, tensors: Iterable[str], *, recomputes: bool) -> str | None:
    """Why `train.base_offload` cannot fetch a denoiser block by block; None: it can.

    Args:
        denoiser: its class, for the message.
        tensors: their names, without those of adapters.
        recomputes: whether it supports gradient checkpointing.
    """
    found = f"train.base_offload: found true; allowed: false with {denoiser}, "
    if all(find_block(name) is None for name in tensors):
        return f"{found}none of whose weights are in a list of blocks by a known name (...blocks.<n> or ...layers.<n>)"
    if not recomputes:
        return (
            f"{found}which does not support gradient checkpointing, so that all its blocks would stay on the device "
            "for the backward pass"
        )
    return None


def recompute_remark(denoiser: str) -> str:
    """What is said of gradient checkpointing of a denoiser whose class does not support it."""
    return f"policy.model_gradient_checkpointing has no effect: {denoiser} does not support it"


def packed_bytes(form: str, shape: Sequence[int], size: int) -> int:
    """Bytes of a packed weight whose numbers took ``size`` bytes each."""
    if form == "nf4":
        return nf4_bytes(math.prod(shape), size)
    return math.prod(shape) + _BYTES_OF_A_ROW * shape[0]


def scales_at_once(count: int) -> int:
    """Scales of so many weights that share one of their own: up to 256 that come out even."""
    return math.gcd(count // NF4_BLOCK, 256)


def unpacking_bytes(form: str, count: int, size: int) -> int:
    """Bytes that come and go while so many packed weights become numbers of ``size`` bytes each; measured."""
    if form == "nf4":
        return count * (8 + 3 * size)
    return count * (8 + size % 4)


def nf4_bytes(count: int, size: int) -> int:
    """Bytes of so many weights in 4 bits whose other numbers take ``size`` bytes each: halves, scales of 8 bits, their
    scales and mean, and the 16 values of the code."""
    scales = count // NF4_BLOCK
    return count // 2 + scales + size * (scales // scales_at_once(count) + 17)


def target_problems(targets: Sequence[str], layers: Iterable[str], modules: Iterable[str]) -> list[str]:
    """A line for each target that PEFT would refuse.

    A target is the name of a layer or the end of one, and not of a module that cannot have an adapter: FLUX.2 calls a
    layer of its single blocks ``attn.to_out``, and a list of modules in the others.

    Args:
        targets: as the configuration has them.
        layers: names that can have an adapter.
        modules: names of all modules, those of the layers among them.
    """
    names = list(layers)
    others = sorted(set(modules) - set(names))
    lines = []
    for target in targets:
        found = [name for name in names if _is_end(target, name)]
        wrong = [name for name in others if _is_end(target, name)]
        if wrong:
            lines.append(_describe_modules(target, wrong, found, names))
        elif not found:
            lines.append(_describe_unknown(target, names))
    return lines


def _is_end(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _describe_unknown(target: str, names: Sequence[str]) -> str:
    endings = {".".join(parts[-n:]) for parts in (name.split(".") for name in names) for n in (1, 2, 3)}
    near = difflib.get_close_matches(target, endings, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"policy.lora.target_modules: {target!r} matches no layer of the transformer{hint}"


def _describe_modules(target: str, wrong: Sequence[str], found: Sequence[str], names: Sequence[str]) -> str:
    """``wrong``: modules that the target matches and that cannot have an adapter; ``found``: layers that it matches."""
    inside = {f"{target}{name[len(one) :]}" for one in wrong for name in names if name.startswith(f"{one}.")}
    line = f"policy.lora.target_modules: {target!r} matches no layer of the transformer, only "
    if found:
        line = f"policy.lora.target_modules: {target!r} matches layers of the transformer, but also "
    line += f"{_shorten(wrong)}, which cannot have an adapter"
    choices = [_shorten([repr(name) for name in sorted(those)]) for those in (inside, found) if those]
    if not choices:
        return line
    return f"{line}; choose among {', and '.join(choices)}"


def _shorten(names: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    if len(names) > limit:
        shown += f" (and {len(names) - limit} more)"
    return shown


def adapter_name_problems(adapters: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Why an adapter cannot have its name: PEFT distinguishes adapters from modules by it, between dots."""
    parts = {part for name in modules for part in name.split(".")}
    taken = [name for name in adapters if name in parts or not name.isidentifier()]
    if not taken:
        return []
    return [
        f"policy.lora.lora_names: {', '.join(map(repr, taken))} cannot name an adapter: names are identifiers that no "
        "part of the transformer has"
    ]


def size_problems(diffusers: DiffusersConfig, model: str, factor: int, positions: int | None = None) -> Iterator[str]:
    """`size_problem` for every configured size."""
    key, buckets = "policy.diffusers.inference_size", diffusers.buckets
    if buckets is not None and buckets.area is not None and buckets.step % factor:
        near = max(factor, (buckets.step + factor // 2) // factor * factor)
        yield (
            f"policy.diffusers.buckets.step = {buckets.step}: {model} needs multiples of {factor} (VAE times patch "
            f"size), as {near}"
        )
        return
    if buckets is not None:
        key = "policy.diffusers.buckets, size"
    found = (size_problem(size, model, factor, positions, key=key) for size in diffusers.training_sizes)
    yield from (problem for problem in found if problem is not None)


def size_problem(
    size: tuple[int, int],
    model: str,
    factor: int,
    positions: int | None = None,
    *,
    key: str = "policy.diffusers.inference_size",
) -> str | None:
    """Why images of ``size`` do not fit a model; None: they fit.

    Args:
        size: height and width in pixels.
        model: its name, for the message.
        factor: pixels of a token's side, of which height and width are multiples.
        positions: tokens of a side for which the model knows positions; None: any number.
        key: what sets the size.
    """
    found = f"{key} = {list(size)}: {model}"
    if any(side % factor for side in size):
        near = [max(factor, (side + factor // 2) // factor * factor) for side in size]
        return f"{found} needs multiples of {factor} (VAE times patch size), as {near}"
    if positions is not None and max(size) > factor * positions:
        return f"{found} has positions for at most {factor * positions} pixels a side"
    return None


def frames_problem(key: str, frames: int, model: str, factor: int) -> str | None:
    """Why a model cannot make so many frames; None: it can. `factor`: frames of a latent frame after the first."""
    over = (frames - 1) % factor
    if not over:
        return None
    near = f"{frames - over} or {frames - over + factor}"
    return f"{key} = {frames}: {model} makes a multiple of {factor}, plus 1, as {near}"


def call_switches(*, prompt_instruction: bool, resolution_binning: bool) -> dict[str, bool | None]:
    """Arguments that the switches give to every call of a pipeline that has them; without one its own default holds."""
    call: dict[str, bool | None] = {BINNING: resolution_binning}
    if not prompt_instruction:
        call[INSTRUCTION] = None
    return call


def switch_problems(diffusers: DiffusersConfig, pipeline_class: str, accepted: Container[str]) -> list[str]:
    """A line for each switch that is set and that the pipeline's call, with the arguments `accepted`, does not have."""
    lines = []
    if not diffusers.prompt_instruction and INSTRUCTION not in accepted:
        lines.append(f"policy.diffusers.prompt_instruction = false: {pipeline_class} has no instruction to leave out")
    if diffusers.resolution_binning and BINNING not in accepted:
        lines.append(f"policy.diffusers.resolution_binning = true: {pipeline_class} has no list of sizes")
    return lines


def latents_problem(key: str, model: str, vae: str, channels: object, *, is_video: bool) -> str | None:
    """Why the samples of a model cannot be sent to the reward service as latents; None: they can.

    Args:
        key: the setting that asks for it.
        model: its name, for the message.
        vae: class of its VAE.
        channels: of the latents, as the VAE's configuration has them.
        is_video: whether its samples are videos.
    """
    if not is_video:
        return f'{key} = "latents": the reward service takes latents of videos only; set it to "pixels"'
    if channels in _SERVICE_VAES.get(vae, ()):
        return None
    return (
        f'{key} = "latents": the reward service decodes latents with Wan\'s VAE ({" and ".join(_SERVICE_VAES)} with 16 '
        f'or 48 channels), and {model} has another one ({vae}); set it to "pixels"'
    )


def conditional_frames_problem(wanted: tuple[int, int], model: str, able: tuple[int, int]) -> str | None:
    """Why a model cannot be given so many latent frames (least and most); None: it can. ``able``: what it can do."""
    found = f"policy.diffusers.conditional_frames = {list(wanted)}: "
    if able[0] <= wanted[0] and wanted[1] <= able[1]:
        return None
    if able == (0, 0):
        return (
            f"{found}{model} makes videos of texts alone; leave the key out "
            "(--policy.diffusers.conditional_frames=none)"
        )
    return f"{found}{model} takes from {able[0]} to {able[1]}"
