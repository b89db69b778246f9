"""The policies that share one transformer: the trained one, the old one that samples, the reference.

With LoRA the old policy is a second adapter. The reference is the base without adapters where a fresh adapter changes
nothing, else a frozen copy of the adapter as it was at the start. With all weights trained both are copies of the
trained parameters. Copies are sharded like what they copy, and made only when they are wanted.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NotRequired, Protocol, TypedDict, Unpack

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cosmos_rl.distributed.sharding import local_part
from cosmos_rl.policy.config import LoraConfig

PolicyName = Literal["default", "old", "reference"]


class Policies(Protocol):
    """Which weights a forward pass of the transformer uses."""

    old_equals_current: bool
    """The old policy is exactly the trained one: set by a hard copy, cleared by the next optimiser step."""

    def using(self, name: PolicyName, number: int = 0) -> contextlib.AbstractContextManager[None]:
        """The transformer acts as this policy inside the block. Never changes what is trainable.

        ``number``: of several references, 0 the reference, from 1 on the teachers.
        """
        ...

    def update_old(self, decay: float) -> None:
        """``old = decay * old + (1 - decay) * default``."""
        ...

    def reset_reference(self) -> None:
        """The reference becomes the trained policy as it is now; only where it was made to move."""
        ...

    def load_reference(self, load: Callable[[], None], number: int = 0) -> None:
        """The reference, or a teacher, becomes what ``load`` fills the trained weights with; these are then what they
        were."""
        ...

    def old_state(self) -> Mapping[str, Tensor]:
        """The old policy's weights by the names of the trained parameters; empty when none are kept."""
        ...

    def reference_state(self) -> Mapping[str, Tensor]:
        """What a resumed run cannot take from the base model; empty when there is nothing."""
        ...

    def teacher_states(self) -> Sequence[Mapping[str, Tensor]]:
        """The weights of each teacher, which never change."""
        ...


class AdapterPolicies:
    """Policies as LoRA adapters of one base."""

    def __init__(
        self,
        transformer: nn.Module,
        trained: str,
        old: str | None,
        *,
        copy_reference: bool = False,
        teachers: int = 0,
    ) -> None:
        """``trained`` and ``old`` name adapters; without ``old`` there is none to sample from.

        ``copy_reference``: the reference is the trained adapter as it is now; else the base without adapters.
        ``teachers``: further references, each the values of an adapter.
        """
        self._transformer = transformer
        self._trained = trained
        self._old = old
        self._layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
        named = dict(transformer.named_parameters())
        self._default_params = {name: p for name, p in named.items() if f".{trained}." in name and ".lora_" in name}
        self._old_params: dict[str, Tensor] = {}
        if old is not None:
            self._old_params = {n: named[n.replace(f".{trained}.", f".{old}.")] for n in self._default_params}
        self._reference = _copy(self._default_params) if copy_reference else {}
        self._teachers = [_copy(self._default_params) for _ in range(teachers)]
        self.old_equals_current = False
        self.update_old(0.0)

    @contextlib.contextmanager
    def using(self, name: PolicyName, number: int = 0) -> Iterator[None]:
        """Switch the layers directly: PEFT's ``set_adapter`` would also change which adapter is trainable."""
        if name == "old" and self._old is None:
            raise ValueError("this model keeps no old policy")
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        held = self._held(number) if name == "reference" else {}
        copied = bool(held)
        wanted = {"default": self._trained, "old": self._old, "reference": self._trained if copied else None}[name]
        for layer in self._layers:
            layer._disable_adapters = wanted is None
            if wanted is not None:
                layer._active_adapter = [wanted]
        if copied:
            _exchange(self._transformer, self._default_params, held)
        try:
            yield
        finally:
            if copied:
                _exchange(self._transformer, self._default_params, held)
            for layer, (active, disabled) in zip(self._layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def update_old(self, decay: float) -> None:
        """``old = decay * old + (1 - decay) * default``."""
        _blend(self._old_params, self._default_params, decay)
        self.old_equals_current = decay == 0.0

    def reset_reference(self) -> None:
        """``reference = default``."""
        _move_reference(self._reference, self._default_params)

    def load_reference(self, load: Callable[[], None], number: int = 0) -> None:
        """``reference = loaded``."""
        _load_reference(self._held(number), self._default_params, load)

    def old_state(self) -> Mapping[str, Tensor]:
        """The old adapter's weights by the names of the trained ones."""
        return {name: param.detach() for name, param in self._old_params.items()}

    def reference_state(self) -> Mapping[str, Tensor]:
        """The adapter at the start, where it is the reference."""
        return self._reference

    def teacher_states(self) -> Sequence[Mapping[str, Tensor]]:
        """The weights of each teacher."""
        return self._teachers

    def _held(self, number: int) -> dict[str, Tensor]:
        return (self._reference, *self._teachers)[number]


class CopyPolicies:
    """Policies as copies of all trained parameters, exchanged with the live ones while they are in use."""

    def __init__(
        self,
        transformer: nn.Module,
        params: Mapping[str, nn.Parameter],
        *,
        keep_old: bool,
        keep_reference: bool,
        moving_reference: bool = False,
        teachers: int = 0,
    ) -> None:
        """Without ``keep_old`` the old policy is the trained one; both must then never differ where it is used.

        ``moving_reference``: it will not always be the model at the start of the run.
        ``teachers``: further references, each a copy.
        """
        self._transformer = transformer
        self._params = dict(params)
        self._copies: dict[str, dict[str, Tensor]] = {}
        if keep_old:
            self._copies["old"] = _copy(self._params)
        if keep_reference:
            self._copies["reference"] = _copy(self._params)
        self._teachers = [_copy(self._params) for _ in range(teachers)]
        self._keeps_old = keep_old
        self._moving_reference = moving_reference
        self.old_equals_current = True

    @contextlib.contextmanager
    def using(self, name: PolicyName, number: int = 0) -> Iterator[None]:
        """The parameters hold the policy's values inside the block and the trained ones, bit for bit, after it."""
        if name == "default" or (name == "old" and (not self._keeps_old or self.old_equals_current)):
            yield
            return
        held = self._held(number) if name == "reference" else self._copies.get(name, {})
        if not held:
            raise ValueError(f"this model keeps no {name} policy")
        _exchange(self._transformer, self._params, held)
        try:
            yield
        finally:
            _exchange(self._transformer, self._params, held)

    def update_old(self, decay: float) -> None:
        """``old = decay * old + (1 - decay) * default``."""
        if self._keeps_old:
            _blend(self._copies["old"], self._params, decay)
        self.old_equals_current = decay == 0.0

    def reset_reference(self) -> None:
        """``reference = default``."""
        _move_reference(self._copies.get("reference", {}), self._params)

    def load_reference(self, load: Callable[[], None], number: int = 0) -> None:
        """``reference = loaded``."""
        _load_reference(self._held(number), self._params, load)

    def old_state(self) -> Mapping[str, Tensor]:
        """The old policy's weights; empty when it is always the trained one."""
        return self._copies.get("old", {})

    def reference_state(self) -> Mapping[str, Tensor]:
        """Nothing while the reference is the start of the run, the base model itself."""
        if self._moving_reference:
            return self._copies.get("reference", {})
        return {}

    def teacher_states(self) -> Sequence[Mapping[str, Tensor]]:
        """The weights of each teacher."""
        return self._teachers

    def _held(self, number: int) -> dict[str, Tensor]:
        return (self._copies.get("reference", {}), *self._teachers)[number]


class Kept(TypedDict):
    """Which policies are kept beside the trained one."""

    keep_old: bool
    keep_reference: bool
    moving_reference: NotRequired[bool]
    """The reference is a copy, which ``reset_reference`` renews."""
    teachers: NotRequired[int]
    """How many further references there are, which ``load_reference`` fills."""


def build_policies(
    transformer: nn.Module, params: Mapping[str, nn.Parameter], lora: LoraConfig | None, **kept: Unpack[Kept]
) -> Policies:
    """The old policy and the references of the trained one; all start as the weights are now.

    With LoRA ``old`` is the adapter of that name; the reference is the base, or a copy of an adapter that does
    something from the start.

    Args:
        params: what is trained.
    """
    if lora is None:
        return CopyPolicies(transformer, params, **kept)
    old = "old" if "old" in lora.lora_names else None
    copied = kept["keep_reference"] and (kept.get("moving_reference", False) or not lora.starts_as_base)
    teachers = kept.get("teachers", 0)
    return AdapterPolicies(transformer, lora.active_adapter, old, copy_reference=copied, teachers=teachers)


def _copy(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


@torch.no_grad()
def _exchange(transformer: nn.Module, params: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    free_gathered(transformer)
    for name, param in params.items():
        held = param.detach().clone()
        param.detach().copy_(other[name])
        other[name].copy_(held)
    free_gathered(transformer)


def _move_reference(reference: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    if not reference:
        raise ValueError("this model keeps no copy as its reference")
    _blend(reference, new, 0.0)


@torch.no_grad()
def _load_reference(reference: Mapping[str, Tensor], params: Mapping[str, Tensor], load: Callable[[], None]) -> None:
    held = {name: param.detach().clone() for name, param in params.items()}
    load()
    _move_reference(reference, params)
    for name, param in params.items():
        param.detach().copy_(held[name])


@torch.no_grad()
def _blend(old: Mapping[str, Tensor], new: Mapping[str, Tensor], decay: float) -> None:
    """``old = decay * old + (1 - decay) * new``; with decay 0 a copy, bit for bit."""
    for name, value in old.items():
        source = new[name].detach()
        if decay == 0.0:
            value.copy_(source)
        else:
            local, target = local_part(value), local_part(source)
            local.mul_(decay).add_(target.to(local.dtype), alpha=1.0 - decay)


def free_gathered(module: nn.Module) -> None:
    """Free weights that a forward pass without a backward pass left gathered: they would outlive a change of the
    shards."""
    if isinstance(module, nn.ModuleDict):
        for part in module.values():
            free_gathered(part)
    if not isinstance(module, FSDPModule):  # a sharded transformer is one as a whole, see distributed/sharding.py
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
