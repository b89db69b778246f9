"""How a pipeline turns pixels into latents and tokens: measured by `cosmos-rl check-model`, else read from its files.

No torch. Names of keys are those of diffusers' configurations; no class is known by name.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl.launcher.pipeline_files import PipelineFiles, Shapes, Unknown, elements
from cosmos_rl.launcher.pipeline_source import call_defaults, makes_videos
from cosmos_rl.policy.config import Config
from cosmos_rl.storage import atomic
from cosmos_rl.storage.cache_folder import facts_folder

MEASURE = "measure it with `cosmos-rl check-model {folder}`"
_BLOCK = re.compile(r"^([^.]+\.\d+)\.")  # of a list of the transformer itself; those of its embedders are deeper
_SMALL_BLOCK = 0.25
"""Of the largest one's weights; what is smaller is no block."""
_TEXT_WIDTHS = ("joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cap_feat_dim")
_CLIP_TOKENS = 77


@dataclass(frozen=True)
class Geometry:
    """Of one sample."""

    channels: int
    """Of the latents that the VAE makes."""
    stride: int
    """Pixels of a latent's side."""
    frame_stride: int
    """Frames of each latent frame after the first; 1 for images."""
    patch: int
    """Latents of a token's side."""
    frame_patch: int = 1
    """Latent frames of a token."""

    @property
    def multiple(self) -> int:
        """Height and width are multiples of it."""
        return self.stride * self.patch

    @property
    def frame_multiple(self) -> int:
        """The number of frames is a multiple of it, plus 1."""
        return self.frame_stride * self.frame_patch

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """``(channels, h, w)``, or ``(channels, t, h, w)`` for several frames."""
        sides = (height // self.stride, width // self.stride)
        if frames == 1:
            return (self.channels, *sides)
        return (self.channels, (frames - 1) // self.frame_stride + 1, *sides)

    def tokens(self, height: int, width: int, frames: int = 1) -> int:
        """Tokens of the media, without those of the text."""
        moments = math.ceil(((frames - 1) // self.frame_stride + 1) / self.frame_patch)
        return moments * (height // self.multiple) * (width // self.multiple)

    def describe(self) -> str:
        """Latents and tokens in words."""
        latents = f"latents of {self.channels} channels, {self.stride} x {self.stride} pixels each"
        if self.frame_stride > 1:
            latents += f" and {self.frame_stride} frames"
        return f"{latents}; height and width in multiples of {self.multiple}{self._frames()}"

    def _frames(self) -> str:
        if self.frame_stride == 1:
            return ""
        return f", frames in multiples of {self.frame_multiple}, plus 1"


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a transformer."""

    layers: int
    width: int


def find_geometry(pipeline: PipelineFiles) -> Geometry:
    """What was measured, else what the configurations say.

    Raises:
        Unknown: neither; says how to measure it.
    """
    measured = _load(pipeline)
    if measured is not None:
        return measured
    try:
        found = _read_geometry(pipeline.configs.get("vae", {}), pipeline.configs["transformer"])
    except Unknown as why:
        raise Unknown(f"{why}; {MEASURE.format(folder=pipeline.folder)}") from None
    if makes_videos(pipeline.class_name) is False:  # an image model may have a VAE of videos
        return dataclasses.replace(found, frame_stride=1, frame_patch=1)
    return found


def find_blocks(pipeline: PipelineFiles) -> Blocks:
    """Number and width of the transformer's blocks, from the shapes of its weights.

    Raises:
        Unknown: no weights in numbered blocks.
    """
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in pipeline.transformer.items():
        match = _BLOCK.match(name)
        if match:
            blocks.setdefault(match[1], {})[name] = shape
    if not blocks:
        raise Unknown("the transformer's weights are not in numbered blocks")
    least = _SMALL_BLOCK * max(map(elements, blocks.values()))
    large = [found for found in blocks.values() if elements(found) >= least]
    sides = Counter(side for found in large for shape in _matrices(found) for side in shape)
    if not sides:
        raise Unknown("the transformer's blocks hold no matrices")
    return Blocks(len(large), sides.most_common(1)[0][0])


def _matrices(shapes: Shapes) -> list[tuple[int, ...]]:
    return [shape for shape in shapes.values() if len(shape) == 2]


def text_tokens(config: Config, pipeline: PipelineFiles) -> int:
    """The most tokens that a prompt makes.

    Raises:
        Unknown: the pipeline does not say how many it takes.
    """
    diffusers = config.policy.diffusers
    default = call_defaults(pipeline.class_name).get("max_sequence_length")
    if "max_prompt_length" in diffusers.model_fields_set or not isinstance(default, int):
        default = diffusers.max_prompt_length
    if "text_encoder_3" in pipeline.parts:  # next to those of two CLIP models
        return _CLIP_TOKENS + default
    return default


def text_width(pipeline: PipelineFiles) -> int:
    """Width of the text features that the transformer takes.

    Raises:
        Unknown: its configuration does not say so.
    """
    settings = pipeline.configs["transformer"]
    if settings.get("use_crossattn_projection"):
        return _whole(settings, "crossattn_proj_in_channels")
    return _first_whole(settings, *_TEXT_WIDTHS)


def frames_of(config: Config) -> int:
    """Frames of all media of a run; 1 for images."""
    diffusers = config.policy.diffusers
    if not diffusers.is_video:
        return 1
    return diffusers.train_frames


# ---- measured ----------------------------------------------------------------------------------------------------


def save_geometry(folder: Path, geometry: Geometry) -> Path:
    """Keep what was measured of the pipeline in that folder; the file."""
    file = _file_of(folder)
    atomic.write_text(file, json.dumps(dataclasses.asdict(geometry)))
    return file


def _load(pipeline: PipelineFiles) -> Geometry | None:
    try:
        found = json.loads(_file_of(pipeline.folder).read_text(encoding="utf-8"))
        return Geometry(**found)
    except (OSError, ValueError, TypeError):
        return None  # not measured, or by another version


def _file_of(folder: Path) -> Path:
    """The file is named by what decides the geometry: the index and the configurations of VAE and transformer."""
    digest = hashlib.sha256()
    for name in ("model_index.json", "vae/config.json", "transformer/config.json"):
        file = folder / name
        digest.update(file.read_bytes() if file.is_file() else b"")
    return facts_folder() / f"geometry_{digest.hexdigest()[:32]}.json"


# ---- read --------------------------------------------------------------------------------------------------------


def _read_geometry(vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> Geometry:
    channels = _first_whole(vae, "latent_channels", "z_dim")
    patch, frame_patch = _read_patch(transformer, channels)
    return Geometry(channels, _read_stride(vae), _read_frame_stride(vae), patch, frame_patch)


def _read_stride(vae: Mapping[str, Any]) -> int:
    """The ratio itself where it is written down, else how often the VAE halves the sides."""
    for key in ("scale_factor_spatial", "spatial_compression_ratio"):
        if vae.get(key) is not None:
            return _whole(vae, key)
    patch = 1
    if isinstance(vae.get("patch_size"), int):
        patch = vae["patch_size"]
    if "spatial_expansions" in vae:
        return math.prod(_list(vae, "spatial_expansions"))
    if "spatio_temporal_scaling" in vae:
        return patch * 2 ** sum(_list(vae, "spatio_temporal_scaling"))
    if "temperal_downsample" in vae:
        return patch * 2 ** len(_list(vae, "temperal_downsample"))
    return 2 ** (len(full_channels(vae)) - 1)


def _read_frame_stride(vae: Mapping[str, Any]) -> int:
    for key in ("scale_factor_temporal", "temporal_compression_ratio"):
        if vae.get(key) is not None:
            return _whole(vae, key)
    if "temporal_expansions" in vae:
        return math.prod(_list(vae, "temporal_expansions"))
    if "spatio_temporal_scaling" in vae:
        return int(vae.get("patch_size_t", 1)) * 2 ** sum(_list(vae, "spatio_temporal_scaling"))
    if "temperal_downsample" in vae:
        return 2 ** sum(_list(vae, "temperal_downsample"))
    return 1


def full_channels(vae: Mapping[str, Any]) -> list[int]:
    """Channels of the VAE's blocks, the ones at full size first.

    Raises:
        Unknown: its configuration does not say so.
    """
    for key in ("encoder_block_out_channels", "block_out_channels"):
        if key in vae:
            return _list(vae, key)
    raise Unknown(f"{_class(vae)} does not list its blocks")


def _read_patch(transformer: Mapping[str, Any], channels: int) -> tuple[int, int]:
    """Latents of a token: along a side, and along time."""
    inputs = transformer.get("in_channels")
    if isinstance(inputs, int) and inputs > channels:
        side = math.isqrt(inputs // channels)
        if side > 1 and side * side * channels == inputs:  # the pipeline makes tokens of the latents itself
            return side, 1
    if "all_patch_size" in transformer:
        return _list(transformer, "all_patch_size")[0], _list(transformer, "all_f_patch_size")[0]
    if isinstance(transformer.get("patch_size"), list):
        sides = _list(transformer, "patch_size")
        if len(sides) == 3 and sides[1] == sides[2]:
            return sides[1], sides[0]
        raise Unknown(f"{_class(transformer)} has patches of {sides}")
    return _whole(transformer, "patch_size"), int(transformer.get("patch_size_t") or 1)


def _first_whole(settings: Mapping[str, Any], *keys: str) -> int:
    found = next((key for key in keys if settings.get(key) is not None), keys[0])
    return _whole(settings, found)


def _whole(settings: Mapping[str, Any], key: str) -> int:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Unknown(f"the configuration of {_class(settings)} has no whole number {key}")
    return value


def _list(settings: Mapping[str, Any], key: str) -> list[int]:
    value = settings[key]
    if not isinstance(value, list) or not value or not all(isinstance(one, int) for one in value):
        raise Unknown(f"the configuration of {_class(settings)} has no list of whole numbers {key}")
    return [int(one) for one in value]


def _class(settings: Mapping[str, Any]) -> str:
    return str(settings.get("_class_name", "a pipeline without a VAE"))
