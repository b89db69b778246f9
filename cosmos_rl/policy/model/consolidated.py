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
from cosmos_rl.policy.model.original_names import name_tensor
from cosmos_rl.policy.model.original_tables import NAMES
from cosmos_rl.storage import atomic

PIPELINE = "Cosmos2_5_PredictBasePipeline"
_MAX_STRUCTURE_BYTES = 2**26
"""Of the part of a file that says how its tensors are arranged; the one of a 14 B model takes a megabyte."""
_WRAPPERS = ("model", "module", "state_dict")
_COSMOS = NAMES["CosmosTransformer3DModel"]
_LISTED = 5


def to_consolidated(name: str) -> str:
    """The name in a consolidated checkpoint of a tensor of diffusers' transformer, without the prefix `net.`."""
    return name_tensor(_COSMOS, name)


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
    ours = {to_consolidated(name): name for name in wanted}
    found = {ours.get(name, name): value for name, value in _select_weights(file, content).items()}
    _check_tensors(file, found, wanted)
    return found


def write_consolidated(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights of diffusers' transformer as a consolidated checkpoint, whole or not at all."""
    with atomic.staging_file(file) as stage, stage.open("wb") as opened:
        torch.save(
            {_COSMOS.prefix + to_consolidated(name): value.contiguous() for name, value in weights.items()}, opened
        )


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
    named = {name.removeprefix(_COSMOS.prefix): value for name, value in content.items()}
    weights = {name: value for name, value in named.items() if re.fullmatch(_COSMOS.unused, name) is None}
    foreign = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if foreign:
        raise UserError(f"{file}: {foreign[0]} is a {type(weights[foreign[0]]).__name__}, not a tensor")
    return weights


def _check_tensors(file: Path, found: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    missing = [to_consolidated(name) for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
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
