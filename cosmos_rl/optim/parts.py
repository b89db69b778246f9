"""A step of an optimiser on plain tensors, where its class has operations that tensors spread over ranks lack."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from cosmos_rl.distributed.sharding import local_part, shard_like

_Convert = Callable[[Tensor, Tensor], Tensor]
"""(A gradient or a moment, its parameter) -> the form that is wanted."""


def on_whole_parts(optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
    """The optimiser has this rank's parts of its parameters, their gradients and its state inside the block, as plain
    tensors of the same memory. Every rank must hold all of each parameter, and then comes to the same result."""
    return _exchange(optimizer, _take_whole, lambda value, _: value)


@contextlib.contextmanager
def on_flat_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """As `on_whole_parts`, with parts of any size, which are flat: for a class that steps on each number by itself but
    for sums over all of them, which it takes with `item`. These are then added over the ranks that share the weights.

    After the block every moment has the shape of its parameter and is spread like it, so that any number of ranks can
    continue, and one that was a single number for all is repeated.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    spread = [param for param in params if isinstance(param, DTensor)]
    if spread and len(spread) < len(params):
        raise RuntimeError("some trained weights are spread over ranks and some are not")
    sums = _SumsOverRanks(spread[0]) if spread else contextlib.nullcontext()
    with sums, _exchange(optimizer, _flatten, _unflatten):
        yield


class _SumsOverRanks(TorchFunctionMode):
    """What is taken out of a sum over this rank's parts as a number is the sum over the whole weights."""

    def __init__(self, param: DTensor) -> None:
        super().__init__()
        mesh = param.device_mesh
        self._device = mesh.device_type
        dims = [dim for dim, place in enumerate(param.placements) if place.is_shard() and mesh.size(dim) > 1]
        self._groups = [mesh.get_group(dim) for dim in dims]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func is not Tensor.item or not self._groups:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self._device)
        for group in self._groups:
            dist.all_reduce(total, group=group)
        return total.item()


@contextlib.contextmanager
def _exchange(optimizer: torch.optim.Optimizer, enter: _Convert, leave: _Convert) -> Iterator[None]:
    groups = [group["params"] for group in optimizer.param_groups]
    parts = {param: _to_part(param, enter) for params in groups for param in params}
    for param, part in parts.items():
        # what a checkpoint was read into is spread like the parameter
        _move_state(optimizer, param, part, lambda value, param=param: enter(value, param))
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parts[param] for param in params]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        for param, part in parts.items():
            _move_state(optimizer, part, param, lambda value, param=param: leave(value, param))


def _take_whole(value: Tensor, param: Tensor) -> Tensor:
    part = local_part(value)
    if value.shape != part.shape:
        raise RuntimeError(f"a rank holds {tuple(part.shape)} of a weight {tuple(param.shape)}")
    return part


def _flatten(value: Tensor, param: Tensor) -> Tensor:
    return local_part(value).reshape(-1 if value.ndim or not param.ndim else ())


def _unflatten(value: Tensor, param: Tensor) -> Tensor:
    own = local_part(param)
    return shard_like(param, value.expand(own.numel()).contiguous().view(own.shape), param.shape)


def _to_part(param: Tensor, enter: _Convert) -> nn.Parameter:
    value = param.detach()
    part = nn.Parameter(enter(value, param), requires_grad=param.requires_grad)
    if part.data_ptr() != local_part(value).data_ptr():
        raise RuntimeError(f"a weight {tuple(param.shape)} is not in one piece of memory")
    if param.grad is not None:
        part.grad = enter(param.grad, param)
    return part


def _move_state(
    optimizer: torch.optim.Optimizer, old: Tensor, new: Tensor, convert: Callable[[Tensor], Tensor]
) -> None:
    if old in optimizer.state:
        state = optimizer.state.pop(old)
        optimizer.state[new] = {k: convert(v) if isinstance(v, Tensor) else v for k, v in state.items()}
