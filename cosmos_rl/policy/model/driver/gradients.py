"""Gradients of a few weights of a denoiser, sharded or not."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_rl.policy.model.quantised import is_packed


def sample_weights(module: torch.nn.Module, wanted: int = 8) -> list[torch.nn.Parameter]:
    """Weights from all over a module; of those that are trained, if any are: shards know no others."""
    floating = [weight for weight in module.parameters() if weight.is_floating_point() and not is_packed(weight)]
    floating = [weight for weight in floating if weight.requires_grad] or floating
    return floating[:: max(1, len(floating) // wanted) | 1]  # odd: of adapters, downs and ups in turn


def can_get_gradients(module: torch.nn.Module) -> bool:
    """Whether any weight of a module can have one: of shards only those that were not frozen when they were made."""
    weights = [weight for weight in module.parameters() if not is_packed(weight)]
    return any(weight.requires_grad or not isinstance(weight, DTensor) for weight in weights)


def compute_gradients(loss: Tensor, weights: list[torch.nn.Parameter]) -> list[Tensor | None]:
    """Gradients of some weights; shards get theirs by nothing but a whole backward pass."""
    if not any(isinstance(weight, DTensor) for weight in weights):
        return list(torch.autograd.grad(loss, weights, allow_unused=True))
    loss.backward()
    return [weight.grad for weight in weights]
