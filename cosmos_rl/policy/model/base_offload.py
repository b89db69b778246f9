"""A frozen base that rests in host memory: a block's weights are on the device while the block is called.

A call has copies of the weights in their places, in rollouts, in the first pass of gradient checkpointing and in its
repetition alike. What autograd keeps for the backward pass of a block are the copies of the repetition, which are
tensors like others: nothing has to bring them back, and they are freed as the backward pass uses them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_rl.distributed.sharding import read_tensors
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.model_rules import find_block, offload_problem
from cosmos_rl.policy.model.quantised import map_leaves

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Where a weight is in a model."""

    owner: nn.Module
    leaf: str

    @property
    def weight(self) -> Any:
        """The parameter there."""
        return self.owner._parameters[self.leaf]

    def put(self, weight: Any) -> None:
        """Have another tensor there, or None."""
        self.owner._parameters[self.leaf] = weight


class OffloadedBlock:
    """A block whose frozen weights are in host memory and come to the device for its calls."""

    def __init__(self, block: nn.Module, places: list[Place], device: torch.device) -> None:
        self._device, self._resting = device, [(place, place.weight) for place in places]
        block.forward = self._fetch_for(block.forward)

    @contextlib.contextmanager
    def holding(self, choose: Callable[[Tensor], Any]) -> Iterator[None]:
        """Inside the block of code something else is in the places of the weights: what ``choose`` makes of each."""
        try:
            for place, weight in self._resting:
                place.put(choose(weight))
            yield
        finally:
            for place, weight in self._resting:
                place.put(weight)

    def _fetch(self, weight: Tensor) -> nn.Parameter:
        """A copy on the device; on a CPU too, so that there is one way. The copies and what computes with them are in
        one stream, and nobody writes to the weight, so the CPU need not wait."""
        copied = map_leaves(weight.detach(), lambda leaf: leaf.to(self._device, non_blocking=True, copy=True))
        return nn.Parameter(copied, requires_grad=False)

    def _fetch_for(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def forward_on_device(*args: Any, **kwargs: Any) -> Any:
            with self.holding(self._fetch):
                return forward(*args, **kwargs)

        return forward_on_device


def find_resting(denoiser: nn.Module) -> dict[str, Place]:
    """The frozen weights of a denoiser's blocks, by the names that they have without adapters.

    Raises:
        UserError: it has no blocks by the names that are known, or does not compute them again in the backward pass.
    """
    found = {}
    for prefix, module in denoiser.named_modules():
        for leaf, weight in module._parameters.items():
            name = f"{prefix}.{leaf}".replace(".base_layer.", ".")
            if weight is not None and ".lora_" not in name and find_block(name) is not None:
                found[name] = Place(module, leaf)
    recomputes = getattr(denoiser, "_supports_gradient_checkpointing", False)
    if problem := offload_problem(type(denoiser).__name__, found, recomputes=recomputes):
        raise UserError(problem)
    return found


def offload_base(denoiser: nn.Module, device: torch.device) -> list[OffloadedBlock]:
    """Have the frozen weights of a denoiser's blocks rest in host memory, next to a GPU in pinned memory.

    To be called when adapters and packed weights are in their places and the weights have their values. Names and
    values of the weights stay as they are.
    """
    blocks: dict[str, list[Place]] = {}
    for name, place in find_resting(denoiser).items():
        place.put(nn.Parameter(_rest(place.weight.detach(), device), requires_grad=False))
        block = find_block(name)
        assert block is not None
        blocks.setdefault(block, []).append(place)
    return [OffloadedBlock(denoiser.get_submodule(name), places, device) for name, places in blocks.items()]


def _rest(weight: Tensor, device: torch.device) -> Any:
    weight = map_leaves(weight, lambda leaf: leaf.to(HOST))
    if device.type == HOST.type:
        return weight
    return map_leaves(weight, lambda leaf: leaf.pin_memory())


def read_resting(places: Mapping[str, Place], folder: Path) -> None:
    """Fill weights that have no memory yet from a diffusers model folder, whole and in host memory."""
    for name, value in read_tensors(folder, places):
        weight = value.to(HOST, places[name].weight.dtype)
        places[name].put(nn.Parameter(weight, requires_grad=False))
