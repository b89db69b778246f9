"""Frozen linear layers in 8 or 4 bits, by torchao: one scale a row, or NF4 with quantised scales (QLoRA, arXiv
2305.14314)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_rl.distributed.sharding import find_weight_files
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.model_rules import NF4_BLOCK, is_quantised, scales_at_once
from cosmos_rl.storage.weight_files import open_weights


def quantise_base(denoiser: nn.Module, form: str, device: torch.device) -> None:
    """Store the weights of the linear layers in a denoiser's blocks packed on the device; adapters stay as they are.

    Layer by layer, so that the denoiser need not fit on the device before. Call it after the adapters were added: PEFT
    would take other layers over quantised ones.

    Args:
        form: "int8" or "nf4".

    Raises:
        UserError: torchao is missing.
    """
    for module in find_packed(denoiser, form).values():
        weight = pack(module.weight.detach().to(device), form)
        module.weight = nn.Parameter(weight, requires_grad=False)


def read_packed(layers: Mapping[str, nn.Linear], folder: Path, form: str, device: torch.device) -> None:
    """Fill layers (see ``find_packed``) whose weights have no memory yet from a diffusers model folder, packed on the
    device: one unpacked weight at a time is in memory."""
    names: dict[Path, list[str]] = {}
    for name, file in find_weight_files(folder).items():
        if name in layers:
            names.setdefault(file, []).append(name)
    for file, held in names.items():
        with open_weights(file) as opened:
            for name in held:
                weight = pack(opened.get_tensor(name).to(device, layers[name].weight.dtype), form)
                layers[name].weight = nn.Parameter(weight, requires_grad=False)


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


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is quantised."""
    return hasattr(weight, "get_original_weight")


def restore(weight: Any) -> Tensor:
    """A weight as numbers, whether it is quantised or not."""
    return weight.get_original_weight() if is_packed(weight) else weight
