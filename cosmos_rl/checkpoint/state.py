"""Everything that must survive a restart, as one flat dictionary of named tensors.

Listed in one place: trained weights, optimiser moments, and copies by kind: the EMA's shadow, the old policy, what a
task holds out. Positions in the data, random draws and the
learning rate are functions of the step and need no state; the step itself is in ``trainer_state.json``.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from cosmos_rl.errors import UserError

StateDict = dict[str, Tensor]
Copies = Mapping[str, Mapping[str, Tensor]]
"""Kind (``ema``, ``old``, ...) -> name -> tensor."""


def collect(
    params: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer | None, copies: Copies
) -> StateDict:
    """Views of the live state: ``model.<name>``, ``optim.<name>.<key>``, ``<kind>.<name>`` for each kind of copy."""
    state: StateDict = {f"model.{name}": param.detach() for name, param in params.items()}
    moments = optimizer.state if optimizer is not None else {}
    for name, param in params.items():
        for key, value in moments.get(param, {}).items():
            state[f"optim.{name}.{key}"] = value
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
    save has no moments and starts fresh. Without an optimiser only the weights are read.

    Raises:
        UserError: the checkpoint holds other weights than the run at hand trains.
    """
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    _check_names(folder, set(stored), params, copies)
    for name, param in params.items() if optimizer is not None else ():
        moments = {key.removeprefix(f"optim.{name}."): key for key in stored if key.startswith(f"optim.{name}.")}
        if moments and optimizer is not None:
            fused = bool(optimizer.param_groups[0].get("fused"))
            optimizer.state[param] = {k: _empty_moment(k, param, fused) for k in moments}
    target = collect(params, optimizer, copies)
    _check_shapes(folder, stored, target)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # an export runs without a group
        dcp.load(target, checkpoint_id=folder)


def _empty_moment(key: str, param: torch.nn.Parameter, fused: bool) -> Tensor:
    if key == "step":  # torch's optimisers count in a float32 scalar, fused ones on the parameter's device
        return torch.zeros((), dtype=torch.float32, device=param.device if fused else "cpu")
    return torch.zeros_like(param, memory_format=torch.preserve_format)


def _check_names(folder: Path, stored: set[str], params: Mapping[str, torch.nn.Parameter], copies: Copies) -> None:
    wanted = {f"model.{n}" for n in params} | {f"{kind}.{n}" for kind, tensors in copies.items() for n in tensors}
    missing = sorted(wanted - stored)
    foreign = sorted(key for key in stored - wanted if key.startswith(("model.", "ema.")))
    if missing or foreign:
        lines = [f"  not in the checkpoint: {key}" for key in missing[:5]]
        lines += [f"  only in the checkpoint: {key}" for key in foreign[:5]]
        raise UserError(
            f"{folder} does not belong to this configuration: {len(missing)} tensors are missing, {len(foreign)} are "
            "foreign (policy.lora, train.ema_enable and the model must be those of the saved run):\n" + "\n".join(lines)
        )


def _check_shapes(folder: Path, stored: Mapping[str, object], target: StateDict) -> None:
    for key, value in target.items():
        size = getattr(stored[key], "size", None)
        if size is not None and tuple(size) != tuple(value.shape):
            raise UserError(f"{folder}: {key} has shape {tuple(size)}, the run at hand needs {tuple(value.shape)}")
