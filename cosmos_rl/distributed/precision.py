"""Parts of a denoiser that compute in float32 while the rest computes in half precision.

Diffusers keeps some parts of some denoisers in float32 whatever dtype a pipeline is loaded in
(``_keep_in_fp32_modules``; of Wan among others the embedding of the timestep). Training does the same, so that it sees
the model that inference sees.
"""

import functools
from typing import Any

import torch
from torch import nn


def list_float32_modules(denoiser: nn.Module) -> list[nn.Module]:
    """The outermost modules that diffusers keeps in float32."""
    kept = set(getattr(denoiser, "_keep_in_fp32_modules", None) or ())
    found: dict[str, nn.Module] = {}
    for name, module in denoiser.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if kept & set(name.split(".")) and not inside:
            found[name] = module
    return list(found.values())


def list_float32_units(denoiser: nn.Module) -> list[nn.Module]:
    """Those of them that a sharded denoiser keeps in float32: the ones outside of its blocks.

    In a block they share its unit of sharding, which has one dtype; units of their own would cost more calls than they
    are worth: what diffusers keeps there are norms, which compute in float32 anyway.
    """
    names = set(getattr(denoiser, "_no_split_modules", None) or ())
    blocks = [module for module in denoiser.modules() if type(module).__name__ in names]
    within = {part for block in blocks for part in block.modules()}
    kept = [module for module in list_float32_modules(denoiser) if module not in within]
    return [module for module in kept if next(module.parameters(), None) is not None]


def compute_in_float32(denoiser: nn.Module, device_type: str) -> None:
    """Have those of these modules that multiply matrices, which autocast would do in half precision, left out of it."""
    for module in list_float32_modules(denoiser):
        if any(isinstance(part, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) for part in module.modules()):
            module.forward = _without_autocast(module.forward, device_type)


def _without_autocast(forward: Any, device_type: str) -> Any:
    @functools.wraps(forward)
    def forward_in_float32(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return forward(*args, **kwargs)

    return forward_in_float32
