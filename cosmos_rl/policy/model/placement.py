"""Where the parts of a pipeline are: on the device, or at rest in host memory."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.utils import _pytree as tree

from cosmos_rl.policy.model.base_offload import OffloadedBlock, offload_base


def _say_device(module: nn.Module, device: torch.device) -> None:
    """Have it say that it is on the device: pipelines ask, and its weights are on none between its calls."""
    kind = type(module)
    if kind not in _SAYING.values():
        module.__class__ = _SAYING.get(kind) or _SAYING.setdefault(kind, _derive(kind))
    module._said_device = device  # pyright: ignore[reportArgumentType]


def _derive(kind: type) -> type:
    said = property(lambda module: module._said_device)
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "device": said})


_SAYING: dict[type, type] = {}
"""Class -> the class derived from it, whose modules say on which device they are."""


class Placement:
    """Moves whole parts between the device and the place where they rest: the CPU, or the device itself."""

    def __init__(self, device: torch.device, *, at_rest: bool) -> None:
        """``at_rest``: what is not used rests on the CPU."""
        self.device = device
        self.resting = torch.device("cpu") if at_rest else device
        self._present: set[nn.Module] = set()
        self._in_blocks: set[nn.Module] = set()
        self._offloaded: dict[nn.Module, list[OffloadedBlock]] = {}
        self._in_turns = False

    @property
    def moves(self) -> bool:
        """Whether anything ever leaves the device."""
        return self.resting != self.device

    def bring_by_block(self, part: nn.Module) -> None:
        """From now on it rests on the CPU, and a block of it is on the device while that is called. Without gradients.

        A block is what transformers and diffusers never split (``_no_split_modules``); what is in none comes layer by
        layer. Between its calls a weight has no values.
        """
        if part in self._in_blocks:
            return
        part.to("cpu")
        blocks = getattr(part, "_no_split_modules", None)
        cpu_offload(part, self.device, preload_module_classes=list(blocks or ()))
        for module in part.modules():
            if hasattr(type(module), "device"):
                _say_device(module, self.device)
        self._in_blocks.add(part)

    def bring_base_by_block(self, denoiser: nn.Module) -> None:
        """From now on the frozen weights of its blocks stay in host memory, wherever the rest of it is, and those of a
        block are on the device while that is called. With gradients."""
        self._offloaded[denoiser] = offload_base(denoiser, self.device)

    def _move(self, part: nn.Module, device: torch.device) -> None:
        with contextlib.ExitStack() as stack:
            for block in self._offloaded.get(part, ()):
                stack.enter_context(block.holding(lambda _: None))
            part.to(device)

    def bring(self, part: nn.Module) -> None:
        """Have it on the device."""
        if part not in self._present and part not in self._in_blocks:
            self._move(part, self.device)
            self._present.add(part)

    def send(self, part: nn.Module) -> None:
        """Have it at rest."""
        if part in self._in_blocks:
            return
        self._move(part, self.resting)
        self._present.discard(part)

    @contextlib.contextmanager
    def on_device(self, *parts: nn.Module) -> Iterator[None]:
        """All of them are on the device inside the block; those that rested do so again after it."""
        moved = [part for part in parts if part not in self._present]
        for part in moved:
            self.bring(part)
        try:
            yield
        finally:
            for part in moved:
                self.send(part)

    @contextlib.contextmanager
    def in_turns(self, *groups: Sequence[nn.Module]) -> Iterator[None]:
        """Inside the block a part comes to the device when it, or a module in it, is called, and those of the other
        groups leave before; what is not called is not moved. After the block all are where they were.

        A block inside such a block changes nothing.
        """
        if self._in_turns or not self.moves:
            yield
            return
        groups = tuple([part for part in group if part not in self._in_blocks] for group in groups)
        parts = [part for group in groups for part in group]
        before = [part for part in parts if part in self._present]
        hooks = []
        for group in groups:
            others = [part for part in parts if part not in group]
            for part in group:
                come = functools.partial(self._come, part, others)
                hooks += [  # before FSDP2's own, which gather what must be on the device
                    module.register_forward_pre_hook(come, prepend=True, with_kwargs=True) for module in part.modules()
                ]
        self._in_turns = True
        try:
            yield
        finally:
            self._in_turns = False
            for hook in hooks:
                hook.remove()
            self._restore(parts, before)

    def _restore(self, parts: Sequence[nn.Module], before: Sequence[nn.Module]) -> None:
        for part in parts:
            if part in self._present and part not in before:
                self.send(part)
        for part in before:
            self.bring(part)

    def _come(
        self, part: nn.Module, others: Sequence[nn.Module], _called: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Make room for ``part``; its inputs come too, as callers ask a part where it is."""
        if part in self._present:
            return None
        for other in others:
            if other in self._present:
                self.send(other)
        self.bring(part)
        return tree.tree_map_only(Tensor, lambda value: value.to(self.device), (args, kwargs))
