"""Frozen linear layers in 8 or 4 bits, by torchao: one scale a row, or NF4 with quantised scales (QLoRA, arXiv
2305.14314)."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cosmos_rl.distributed.sharding import read_tensors
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.model_rules import NF4_BLOCK, is_quantised, scales_at_once


def quantise_base(denoiser: nn.Module, form: str, device: torch.device, *, resting: Collection[str] = ()) -> None:
    """Store the weights of the linear layers in a denoiser's blocks packed on the device; adapters stay as they are.

    Layer by layer, so that the denoiser need not fit on the device before. Call it after the adapters were added: PEFT
    would take other layers over quantised ones.

    Args:
        form: "int8" or "nf4".
        resting: names of weights that are packed on the device too, and are in host memory then.

    Raises:
        UserError: torchao is missing.
    """
    for name, module in find_packed(denoiser, form).items():
        weight = _place(pack(module.weight.detach().to(device), form), rests=name in resting)
        module.weight = nn.Parameter(weight, requires_grad=False)


def read_packed(
    layers: Mapping[str, nn.Linear], folder: Path, form: str, device: torch.device, *, resting: Collection[str] = ()
) -> None:
    """Fill layers (see ``find_packed``) whose weights have no memory yet from a diffusers model folder, packed on the
    device: one unpacked weight at a time is in memory. ``resting``: as in ``quantise_base``."""
    for name, value in read_tensors(folder, layers):
        weight = pack(value.to(device, layers[name].weight.dtype), form)
        layers[name].weight = nn.Parameter(_place(weight, rests=name in resting), requires_grad=False)


def _place(weight: Any, *, rests: bool) -> Any:
    return map_leaves(weight, lambda leaf: leaf.to("cpu")) if rests else weight


def find_packed(denoiser: nn.Module, form: str) -> dict[str, nn.Linear]:
    """The layers whose weights are packed, by the names that the weights have without adapters."""
    found = {}
    for name, module in denoiser.named_modules():
        plain = f"{name.replace('.base_layer', '')}.weight"
        if ".lora_" not in name and isinstance(module, nn.Linear) and is_quantised(form, plain, module.weight.shape):
            found[plain] = module
    return found


def pack(weight: Tensor, form: str) -> Any:
    """A weight ``[out, in]`` in 8 or 4 bits.

    Raises:
        UserError: torchao is missing.
    """
    try:
        if form == "int8":
            from cosmos_rl.policy.model.int8 import pack_int8

            return pack_int8(weight)
        from torchao.quantization import NF4Tensor  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f'policy.lora.quantize_base = "{form}" needs torchao 0.18 or newer: pip install -U torchao'
        ) from error
    return NF4Tensor.from_tensor(weight, NF4_BLOCK, scales_at_once(weight.numel()))


def map_leaves(weight: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The weight with ``change`` done to each tensor that it consists of: itself, or codes and scales where packed.

    The results of ``change`` are all on one device.
    """
    if not is_traceable_wrapper_subclass(weight):
        return change(weight)
    parts: Any = weight.__tensor_flatten__()
    names, context = parts
    leaves = {name: change(getattr(weight, name)) for name in names}
    if "tensor_meta" in context:  # NF4 keeps its device by itself
        meta = dataclasses.replace(context["tensor_meta"], device=leaves[names[0]].device)
        context = {**context, "tensor_meta": meta}
    return type(weight).__tensor_unflatten__(leaves, context, weight.shape, weight.stride())


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is quantised."""
    return hasattr(weight, "get_original_weight")


def restore(weight: Any) -> Tensor:
    """A weight as numbers, whether it is quantised or not."""
    return weight.get_original_weight() if is_packed(weight) else weight
