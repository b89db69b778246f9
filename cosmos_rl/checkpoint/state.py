"""Everything that must survive a restart, as one flat dictionary of named tensors.

Listed in one place: trained weights, optimiser moments, and copies by kind: the EMA's shadow, the old policy, what a
task holds out. Positions in the data, random draws and the
learning rate are functions of the step and need no state; the step itself is in ``trainer_state.json``.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from cosmos_rl.distributed.blocks import blocks_in_a_row
from cosmos_rl.distributed.sharding import local_part, shard_like
from cosmos_rl.errors import UserError

StateDict = dict[str, Tensor]
_NUMBERS = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}
"""Type of a moment that is no tensor, as its key ends -> type of the tensor that holds it."""
Copies = Mapping[str, Mapping[str, Tensor]]
"""Kind (``ema``, ``old``, ...) -> name -> tensor."""

AVERAGE = "average"
"""Kind of the weights to use, where the optimiser trains others; for an export, a resumed run computes them."""
OPTIONAL = ("guard",)
"""Kinds without which a run can be continued; whoever has them knows from its own counters whether they were saved."""


def collect(
    params: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer | None, copies: Copies
) -> StateDict:
    """Views of the live state: ``model.<name>``, ``optim.<name>.<key>``, ``<kind>.<name>`` for each kind of copy."""
    state: StateDict = {f"model.{name}": param.detach() for name, param in params.items()}
    moments = optimizer.state if optimizer is not None else {}
    for name, param in params.items():
        for key, value in moments.get(param, {}).items():
            state |= {
                f"optim.{name}.{key}{part}": tensor for part, tensor in _to_storable(value, param, optimizer).items()
            }
    for kind, tensors in copies.items():
        state |= {f"{kind}.{name}": value for name, value in tensors.items()}
    return state


def restore(
    folder: Path,
    params: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    copies: Copies,
) -> None:
    """Load ``folder`` into the live objects. Every weight must be there; a parameter that had no gradient before the
    save has no moments and starts fresh. Without an optimiser only the weights are read. Copies of an ``OPTIONAL`` kind
    that are not there, or not of their shape, stay as they are.

    Raises:
        UserError: the checkpoint holds other weights than this run trains.
    """
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    copies = {kind: tensors for kind, tensors in copies.items() if kind not in OPTIONAL or _fits(stored, kind, tensors)}
    _check_names(folder, set(stored), params, copies)
    for name, param in params.items() if optimizer is not None else ():
        moments = {
            key.removeprefix(f"optim.{name}."): about
            for key, about in stored.items()
            if key.startswith(f"optim.{name}.")
        }
        if moments and optimizer is not None:
            optimizer.state[param] = _create_empty_moments(moments, param, optimizer)
    target = collect(params, optimizer, copies)
    _check_moments(folder, set(stored), set(target))
    _check_shapes(folder, stored, target)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # an export runs without a group
        dcp.load(target, checkpoint_id=folder)
    if optimizer is not None:
        _take_numbers(target, params, optimizer)


def holds_average(folder: Path) -> bool:
    """Whether a checkpoint has weights to use that are not the trained ones."""
    return any(name.startswith(f"{AVERAGE}.") for name in FileSystemReader(folder).read_metadata().state_dict_metadata)


def _to_storable(value: Any, param: Tensor, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """A moment as tensors that can be stored and split over any number of ranks: itself, or 8-bit codes and scales.

    Raises:
        UserError: it is neither a tensor nor a number.
    """
    if isinstance(value, int | float):
        return {f".{type(value).__name__}": torch.tensor(value, dtype=_NUMBERS[type(value).__name__])}
    if not isinstance(value, Tensor):
        raise UserError(
            f"train.optm_name: {type(optimizer).__name__} keeps a {type(value).__name__} for each weight, which a "
            "checkpoint cannot hold; use another optimiser"
        )
    blocks = blocks_in_a_row(param.shape) if _uses_eight_bits(optimizer) and value.ndim else 0
    if not blocks:
        return {"": value}
    local = local_part(value)
    rows = local.shape[0]
    codes, scale = getattr(local, "codes", None), getattr(local, "scale", None)
    if codes is None or scale is None:  # this rank holds no part of it
        codes, scale = local.to(torch.uint8), local.new_zeros(0)
    whole = torch.Size([param.shape[0], blocks])
    return {
        ".codes": shard_like(param, codes, param.shape),
        ".scale": shard_like(param, scale.view(rows, blocks), whole),
    }


def _uses_eight_bits(optimizer: torch.optim.Optimizer | None) -> bool:
    return hasattr(optimizer, "block_size")  # of torchao


def _create_empty_moments(
    stored: Mapping[str, Any], param: torch.nn.Parameter, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """What ``stored`` is loaded into: name of a moment, with its parts -> what the checkpoint says of it."""
    if _uses_eight_bits(optimizer):
        new: Any = optimizer
        names = [key for key in dict.fromkeys(key.partition(".")[0] for key in stored) if key != "step"]
        moments = {name: new._new_buffer(param, name == "exp_avg") for name in names}
        return {"step": torch.zeros((), dtype=torch.float32), **moments}
    return dict(_create_empty(key, about, param, optimizer) for key, about in stored.items())


def _create_empty(key: str, about: Any, param: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> tuple[str, Any]:
    name, _, kind = key.partition(".")
    if kind in _NUMBERS:
        return name, {"bool": False, "int": 0, "float": 0.0}[kind]
    dtype, size = about.properties.dtype, about.size
    if size == param.shape and name != "step":
        return name, torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    # torch's optimisers count on the CPU, fused ones on the parameter's device
    on_cpu = name == "step" and not optimizer.param_groups[0].get("fused")
    return name, torch.zeros(size, dtype=dtype, device="cpu" if on_cpu else param.device)


def _take_numbers(
    target: StateDict, params: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Moments that are no tensors, from those that held them in the checkpoint."""
    for name, param in params.items():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, int | float):
                optimizer.state[param][key] = target[f"optim.{name}.{key}.{type(value).__name__}"].item()


def _check_moments(folder: Path, stored: set[str], wanted: set[str]) -> None:
    kept = {key for key in stored if key.startswith("optim.")} if any(k.startswith("optim.") for k in wanted) else set()
    if kept != {key for key in wanted if key.startswith("optim.")}:
        raise UserError(
            f"{folder} holds the state of another optimiser: train.optm_name must be that of the saved run, with or "
            "without 8bit"
        )


def _check_names(folder: Path, stored: set[str], params: Mapping[str, torch.nn.Parameter], copies: Copies) -> None:
    wanted = {f"model.{n}" for n in params} | {f"{kind}.{n}" for kind, tensors in copies.items() for n in tensors}
    missing = sorted(wanted - stored)
    foreign = sorted(key for key in stored - wanted if key.startswith(("model.", "ema.")))
    if missing or foreign:
        lines = [f"  not in the checkpoint: {key}" for key in missing[:5]]
        lines += [f"  only in the checkpoint: {key}" for key in foreign[:5]]
        raise UserError(
            f"{folder} does not belong to this configuration: {len(missing)} tensors are missing, {len(foreign)} are "
            "foreign (policy.lora, train.ema_enable, the model and whether kl_beta is 0 must be as in the saved run):\n"
            + "\n".join(lines)
        )


def _fits(stored: Mapping[str, object], kind: str, tensors: Mapping[str, Tensor]) -> bool:
    sizes = {name: getattr(stored.get(f"{kind}.{name}"), "size", None) for name in tensors}
    return all(size is not None and tuple(size) == tuple(tensors[name].shape) for name, size in sizes.items())


def _check_shapes(folder: Path, stored: Mapping[str, object], target: StateDict) -> None:
    for key, value in target.items():
        size = getattr(stored[key], "size", None)
        if size is not None and tuple(size) != tuple(value.shape):
            raise UserError(f"{folder}: {key} has shape {tuple(size)}, this run needs {tuple(value.shape)}")
