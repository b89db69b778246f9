"""Noise levels: where training draws them and how they mix data with noise."""

import torch
from torch import Tensor


def shape_like(value_B: Tensor, like: Tensor) -> Tensor:
    """View per-sample values ``[B]`` (or per-frame ``[B, T']``) so that they broadcast over ``like`` ``[B, C, ...]``.

    ``[B]`` becomes ``[B, 1, ...]``; ``[B, T']`` becomes ``[B, 1, T', 1, 1]``.
    """
    if value_B.ndim == 1:
        return value_B.reshape(-1, *[1] * (like.ndim - 1))
    return value_B.reshape(value_B.shape[0], 1, value_B.shape[1], *[1] * (like.ndim - 3))


def mix(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """``(1 - sigma) * clean + sigma * noise`` in float32; ``sigma`` is ``[B]`` or ``[B, T']``."""
    s = shape_like(sigma.float(), clean)
    return (1.0 - s) * clean.float() + s * noise.float()


def density(normal_or_uniform_B: Tensor, scheme: str, logit_mean: float = 0.0, logit_std: float = 1.0) -> Tensor:
    """Position ``u`` in [0, 1) of each sample in the ascending list of training noise levels.

    Args:
        normal_or_uniform_B: ``[B]`` standard normal draws for ``logit_normal``, uniform draws in [0, 1) for ``none``.
        scheme: ``logit_normal`` (``u = sigmoid(mean + std * z)``, Esser et al. 2024, eq. 19) or ``none`` (uniform).
    """
    if scheme == "logit_normal":
        return torch.sigmoid(logit_mean + logit_std * normal_or_uniform_B.double())
    if scheme == "none":
        return normal_or_uniform_B.double()
    raise ValueError(f"unknown weighting scheme {scheme!r}")


def index_from_density(u_B: Tensor, num_levels: int) -> Tensor:
    """``floor(u * num_levels)`` as int64 ``[B]``, kept below ``num_levels`` where u rounds to 1."""
    return (u_B * num_levels).long().clamp_(max=num_levels - 1)
