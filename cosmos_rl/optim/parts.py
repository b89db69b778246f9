"""A step of an optimiser on plain tensors, where its class has operations that tensors spread over ranks lack."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cosmos_rl.distributed.sharding import local_part


@contextlib.contextmanager
def on_whole_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimiser has this rank's parts of its parameters, their gradients and its state inside the block, as plain
    tensors of the same memory. Every rank must hold all of each parameter, and then comes to the same result."""
    groups = [group["params"] for group in optimizer.param_groups]
    parts = {param: _to_part(param) for params in groups for param in params}
    for param, part in parts.items():
        _move_state(optimizer, param, part)
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parts[param] for param in params]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        for param, part in parts.items():
            _move_state(optimizer, part, param)


def _to_part(param: Tensor) -> nn.Parameter:
    part = nn.Parameter(local_part(param.detach()), requires_grad=param.requires_grad)
    if part.shape != param.shape:
        raise RuntimeError(f"a rank holds {tuple(part.shape)} of a weight {tuple(param.shape)}")
    if param.grad is not None:
        part.grad = local_part(param.grad)
    return part


def _move_state(optimizer: torch.optim.Optimizer, old: Tensor, new: Tensor) -> None:
    if old in optimizer.state:
        state = optimizer.state.pop(old)
        # what a checkpoint was read into is spread like the parameter
        optimizer.state[new] = {k: local_part(v) if isinstance(v, Tensor) else v for k, v in state.items()}
