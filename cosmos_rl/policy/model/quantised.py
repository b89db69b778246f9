"""Frozen linear layers in 4 bits under adapters: NF4 with quantised scales (QLoRA, arXiv 2305.14314), by torchao."""

from typing import Any

import torch
from torch import Tensor, nn

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.model_rules import NF4_BLOCK, is_quantised, scales_at_once


def quantise_base(denoiser: nn.Module, device: torch.device) -> None:
    """Store the weights of the linear layers in a denoiser's blocks as NF4 on the device; adapters stay as they are.

    Layer by layer, so that the denoiser need not fit on the device before. Call it after the adapters were added: PEFT
    would take other layers over quantised ones.

    Raises:
        UserError: torchao is missing.
    """
    try:
        from torchao.quantization import NF4Tensor  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            'policy.lora.quantize_base = "nf4" needs torchao 0.18 or newer: pip install -U torchao'
        ) from error
    for name, module in denoiser.named_modules():
        plain = f"{name.replace('.base_layer', '')}.weight"
        if ".lora_" in name or not isinstance(module, nn.Linear) or not is_quantised(plain, module.weight.shape):
            continue
        weight = module.weight.detach().to(device)
        packed: Any = NF4Tensor.from_tensor(weight, NF4_BLOCK, scales_at_once(weight.numel()))
        module.weight = nn.Parameter(packed, requires_grad=False)


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is quantised."""
    return hasattr(weight, "get_original_weight")


def restore(weight: Any) -> Tensor:
    """A weight as numbers, whether it is quantised or not."""
    return weight.get_original_weight() if is_packed(weight) else weight
