"""The consolidated `.pt` checkpoints of Cosmos-Predict2.5: read safely, written, and their names against diffusers'.

The names are those that diffusers' own `scripts/convert_cosmos_to_diffusers.py` maps.
"""

import io
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.storage import atomic

PIPELINE = "Cosmos2_5_PredictBasePipeline"
_MAX_STRUCTURE_BYTES = 2**26
"""Of the part of a file that says how its tensors are arranged; the one of a 14 B model takes a megabyte."""
_WRAPPERS = ("model", "module", "state_dict")
_PREFIX = "net."
_NO_WEIGHTS = re.compile(r"^accum_|^pos_embedder\.(seq|dim_spatial_range|dim_temporal_range)$|(^|\.)_extra_state$")
"""Counters and tables, which the model of diffusers computes or has no use for."""
_MODEL_NAMES = {
    "x_embedder.proj.1": "patch_embed.proj",
    "t_embedder.1": "time_embed.t_embedder",
    "t_embedding_norm": "time_embed.norm",
    "final_layer.adaln_modulation.1": "norm_out.linear_1",
    "final_layer.adaln_modulation.2": "norm_out.linear_2",
    "final_layer.linear": "proj_out",
}
_BLOCK_NAMES = {
    "adaln_modulation_self_attn.1": "norm1.linear_1",
    "adaln_modulation_self_attn.2": "norm1.linear_2",
    "adaln_modulation_cross_attn.1": "norm2.linear_1",
    "adaln_modulation_cross_attn.2": "norm2.linear_2",
    "adaln_modulation_mlp.1": "norm3.linear_1",
    "adaln_modulation_mlp.2": "norm3.linear_2",
    "mlp.layer1": "ff.net.0.proj",
    "mlp.layer2": "ff.net.2",
}
_ATTENTION_NAMES = {
    "q_proj": "to_q",
    "k_proj": "to_k",
    "v_proj": "to_v",
    "output_proj": "to_out.0",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}
_BLOCK_NAMES |= {f"self_attn.{old}": f"attn1.{new}" for old, new in _ATTENTION_NAMES.items()}
_BLOCK_NAMES |= {f"cross_attn.{old}": f"attn2.{new}" for old, new in _ATTENTION_NAMES.items()}
_LISTED = 5


def to_diffusers(name: str) -> str:
    """The name of a tensor in diffusers' transformer; one that is the same in both stays."""
    block = re.match(r"blocks\.(\d+)\.(.*)", name)
    if block is None:
        return _replace_layer(name, _MODEL_NAMES)
    return f"transformer_blocks.{block[1]}.{_replace_layer(block[2], _BLOCK_NAMES)}"


def to_consolidated(name: str) -> str:
    """The name in a consolidated checkpoint of a tensor of diffusers' transformer, without the prefix `net.`."""
    block = re.match(r"transformer_blocks\.(\d+)\.(.*)", name)
    if block is None:
        return _replace_layer(name, {new: old for old, new in _MODEL_NAMES.items()})
    return f"blocks.{block[1]}.{_replace_layer(block[2], {new: old for old, new in _BLOCK_NAMES.items()})}"


def _replace_layer(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def read_consolidated(file: Path, wanted: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The weights of a checkpoint by the names of diffusers, on the CPU; the disk is read when they are used.

    Nothing in the file is run: torch's reader of weights takes tensors, containers and numbers alone, and in-memory
    files, which some layers of these checkpoints keep as extra state.

    Args:
        wanted: name in diffusers -> shape of all tensors that the model has.

    Raises:
        UserError: it is no such file, or its tensors are not exactly those of the model.
    """
    file = file.expanduser()
    _check_archive(file)
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{file}: cannot be read as weights alone ({str(error).splitlines()[0]})") from error
    found = {to_diffusers(name): value for name, value in _select_weights(file, content).items()}
    _check_tensors(file, found, wanted)
    return found


def write_consolidated(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights of diffusers' transformer as a consolidated checkpoint, whole or not at all."""
    with atomic.staging_file(file) as stage, stage.open("wb") as opened:
        torch.save({_PREFIX + to_consolidated(name): value.contiguous() for name, value in weights.items()}, opened)


def _check_archive(file: Path) -> None:
    """Check the sizes that torch's reader would trust."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{file}: not a whole checkpoint of torch ({error})") from error
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UserError(f"{file}: not a checkpoint of torch, which are not compressed")
    if sum(member.file_size for member in members) > file.stat().st_size:
        raise UserError(f"{file}: not a whole checkpoint of torch (its parts are larger than the file)")
    if any(member.file_size > _MAX_STRUCTURE_BYTES for member in members if member.filename.endswith(".pkl")):
        raise UserError(f"{file}: not a checkpoint of weights alone (more than {_MAX_STRUCTURE_BYTES} bytes of pickle)")


def _select_weights(file: Path, content: Any) -> dict[str, Tensor]:
    """The tensors of the network, without the prefix and without what is no weight."""
    while isinstance(content, dict):
        inner = [content[key] for key in _WRAPPERS if isinstance(content.get(key), dict)]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{file}: holds no table of tensors by name")
    named = {name.removeprefix(_PREFIX): value for name, value in content.items()}
    weights = {name: value for name, value in named.items() if not _NO_WEIGHTS.search(name)}
    foreign = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if foreign:
        raise UserError(f"{file}: {foreign[0]} is a {type(weights[foreign[0]]).__name__}, not a tensor")
    return weights


def _check_tensors(file: Path, found: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    missing = [to_consolidated(name) for name in wanted if name not in found]
    unexpected = [to_consolidated(name) for name in found if name not in wanted]
    reshaped = [
        f"{to_consolidated(name)} is {list(found[name].shape)}, in the model {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    groups = (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
    lines = [line for title, names in groups for line in _describe(title, names)]
    if lines:
        fitting = len(wanted) - len(missing) - len(reshaped)
        raise UserError(
            f"{file}: {fitting} of the {len(wanted)} tensors of the model can be loaded:\n" + "\n".join(lines)
        )


def _describe(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = []
    if len(names) > _LISTED:
        more = [f"    and {len(names) - _LISTED} more"]
    return [f"  {len(names)} {title}:", *(f"    {name}" for name in names[:_LISTED]), *more]
