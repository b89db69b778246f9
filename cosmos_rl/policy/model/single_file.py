"""A model in one file, as model-sharing sites offer it: recognised, and what it lacks found. No torch."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import PolicyConfig
from cosmos_rl.policy.model.digest import find_folder
from cosmos_rl.storage.weight_files import read_table

SECOND_EXPERT = "transformer_2"
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.model.", "net.")
"""Of the transformer's tensors in files that may have other parts."""


@dataclass(frozen=True)
class _Row:
    """Published pipelines whose transformers have the same names of tensors."""

    marks: Sequence[str]
    """Regular expressions that some names have; the first row whose marks are all there counts."""
    bases: Mapping[str, int]
    """Pipeline -> the least number of blocks; of those that fit the largest number counts."""
    blocks: str = r"(?!)()"
    """Finds the number of a block in a name."""


_ORIGINAL, _DIFFUSERS = r"joint_blocks\.(\d+)\.", r"^transformer_blocks\.(\d+)\."
_SD3, _LARGE = {"stabilityai/stable-diffusion-3-medium-diffusers": 1}, {"stabilityai/stable-diffusion-3.5-large": 38}
_MEDIUM = {"stabilityai/stable-diffusion-3.5-medium": 1}
_WAN, _SINGLE = r"^blocks\.(\d+)\.cross_attn\.k\.", r"^single_blocks\.(\d+)\."
_ROWS = (
    _Row([_ORIGINAL, r"x_block\.attn2\."], _MEDIUM | _LARGE, _ORIGINAL),
    _Row([_ORIGINAL], _SD3 | _LARGE, _ORIGINAL),
    _Row([r"^distilled_guidance_layer\.", _SINGLE], {"lodestones/Chroma1-HD": 0}),
    _Row(
        [r"^double_stream_modulation_img\.lin\.", _SINGLE],
        {
            "black-forest-labs/FLUX.2-klein-base-4B": 20,
            "black-forest-labs/FLUX.2-klein-4B": 20,
            "black-forest-labs/FLUX.2-klein-base-9B": 24,
            "black-forest-labs/FLUX.2-klein-9B": 24,
            "black-forest-labs/FLUX.2-dev": 48,
        },
        _SINGLE,
    ),
    _Row(
        [r"^txt_in\.individual_token_refiner\."],
        {"hunyuanvideo-community/HunyuanVideo": 0, "hunyuanvideo-community/HunyuanVideo-I2V": 0},
    ),
    _Row(
        [r"^double_blocks\.0\.img_mod\.lin\.", r"^guidance_in\."],
        {"black-forest-labs/FLUX.1-dev": 0, "black-forest-labs/FLUX.1-Kontext-dev": 0},
    ),
    _Row([r"^double_blocks\.0\.img_mod\.lin\."], {"black-forest-labs/FLUX.1-schnell": 0}),
    _Row(
        [_WAN, r"^img_emb\."],
        {"Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": 40, "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": 40},
        _WAN,
    ),
    _Row(
        [_WAN],
        {
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 30,
            "Wan-AI/Wan2.2-TI2V-5B-Diffusers": 30,
            "Wan-AI/Wan2.1-T2V-14B-Diffusers": 40,
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers": 40,
            "Wan-AI/Wan2.2-I2V-A14B-Diffusers": 40,
        },
        _WAN,
    ),
    _Row([r"^noise_refiner\.0\.adaLN_modulation\.0\."], {"Tongyi-MAI/Z-Image": 0, "Tongyi-MAI/Z-Image-Turbo": 0}),
    _Row([r"^noise_refiner\.0\.adaLN_modulation\.1\."], {"Alpha-VLLM/Lumina-Image-2.0": 0}),
    _Row([r"^double_layers\.0\.modX\."], {"fal/AuraFlow-v0.3": 0}),
    _Row([r"^patchify_proj\.", r"^adaln_single\."], {"Lightricks/LTX-Video": 0}),
    _Row([r"^t5_y_embedder\."], {"genmo/mochi-1-preview": 0}),
    _Row([_DIFFUSERS, r"^pos_embed\.pos_embed$", r"\.attn2\.add_q_proj|\.attn2\.to_q"], _MEDIUM | _LARGE, _DIFFUSERS),
    _Row([_DIFFUSERS, r"^pos_embed\.pos_embed$", r"\.attn\.add_q_proj"], _SD3 | _LARGE, _DIFFUSERS),
)
_LARGE_BYTES = 16e9
"""Between the 2 B and the 14 B model of Cosmos-Predict2.5, in any dtype."""


@dataclass(frozen=True)
class SingleFile:
    """A transformer in one file, and what it lacks."""

    file: Path
    base: Path
    """Folder of the pipeline that has the other parts."""
    low_noise: Path | None = None
    """The file of the second expert; None: the base's own, where it has one."""


def find_single_file(policy: PolicyConfig) -> SingleFile | None:
    """The file that ``policy.model_name_or_path`` names; None: it names no file.

    Raises:
        UserError: it cannot be a base: what it is, and what to do.
    """
    name = policy.model_name_or_path
    path = Path(name).expanduser()
    if not path.is_file():
        return None
    what = f'policy.model_name_or_path = "{name}": is one file, and a pipeline is a folder with a model_index.json'
    if path.suffix == ".pt":
        command = _write_import_command(path)
        raise UserError(f"{what}. Of a checkpoint of Cosmos-Predict2.5 this makes one:\n  {command}")
    keys = _read_keys(path, what)
    if holds_adapter(keys):
        raise UserError(f"{what}; it holds an adapter: name its base there, and this file as policy.lora.lora_path")
    base = policy.single_file_base or _choose_base(keys, what)
    folder = find_folder(base, policy.model_revision)
    if folder is None or not (folder / "model_index.json").is_file():
        fetch = f"`hf download {base}` fetches it, or set" if _is_hub_name(base) else "there is no such pipeline; set"
        raise UserError(
            f"{what}. VAE, text encoders and tokenizers would be those of {base}, which is not here: {fetch} "
            "policy.single_file_base to a pipeline (folder or hub name)"
        )
    return SingleFile(path, folder, _find_low_noise(policy.single_file_low_noise, folder))


def _read_keys(path: Path, what: str) -> list[str]:
    if path.suffix != ".safetensors":
        raise UserError(f"{what}; only .safetensors files can take its place, and .pt files of Cosmos-Predict2.5")
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{what}; it is not a complete .safetensors file either ({error})") from error


def holds_adapter(keys: Iterable[str]) -> bool:
    """Whether tensors of these names are an adapter, also of a form that is not read (LoKr, LoHa, OFT)."""
    return any(re.search(r"[._](lora[12_.]|(lokr|hada|oft|boft)_)", key) for key in keys)


def _choose_base(keys: Sequence[str], what: str) -> str:
    bases = find_bases(keys)
    if not bases:
        raise UserError(
            f"{what}; its names are those of no transformer that is known here. Set policy.single_file_base to the "
            "pipeline (folder or hub name) that has its other parts"
        )
    if len(bases) > 1:
        raise UserError(
            f"{what}; {' and '.join(bases)} have transformers with these names: set policy.single_file_base to the one "
            "that it is of (`hf download NAME` fetches it), or to a folder of it"
        )
    return bases[0]


def _find_low_noise(name: str | None, base: Path) -> Path | None:
    index = read_table(base / "model_index.json")
    if name is None:
        return None
    what = f'policy.single_file_low_noise = "{name}"'
    if not index.get(SECOND_EXPERT, [None])[0]:
        raise UserError(f"{what}: {base} has no second expert; leave it out")
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"{what}: no such file")
    _read_keys(path, what)
    return path


def find_single_file_problem(policy: PolicyConfig) -> str | None:
    """Why the model cannot be trained when it is a file, and what to do; None: it is no file, or a good one."""
    try:
        find_single_file(policy)
    except UserError as error:
        return str(error)
    return None


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _write_import_command(file: Path) -> str:
    size = "2B"
    if file.stat().st_size > _LARGE_BYTES:
        size = "14B"
    base = f"--base nvidia/Cosmos-Predict2.5-{size} --revision diffusers/base/post-trained"
    return f"cosmos-rl import {shlex.quote(str(file))} {base} --out {shlex.quote(str(file.with_suffix('')))}"


def find_prefix(keys: Sequence[str]) -> str:
    """What the names of the transformer's tensors begin with in a file; may be empty."""
    return next((prefix for prefix in _PREFIXES if any(key.startswith(prefix) for key in keys)), "")


def find_bases(keys: Sequence[str]) -> Sequence[str]:
    """The published pipelines whose transformers have these names of tensors; none: it is not known."""
    prefix = find_prefix(keys)
    names = [key.removeprefix(prefix) for key in keys]
    for row in _ROWS:
        if not all(any(re.search(mark, name) for name in names) for mark in row.marks):
            continue
        blocks = {match[1] for name in names if (match := re.search(row.blocks, name))}
        fitting = [base for base, least in row.bases.items() if len(blocks) >= least]
        if fitting:
            largest = max(row.bases[base] for base in fitting)
            return [base for base in fitting if row.bases[base] == largest]
    return []
