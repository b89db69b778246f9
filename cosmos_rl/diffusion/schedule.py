"""Sigmas (noise levels): where training draws them and how they mix data with noise."""

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


def density(
    normal_or_uniform_B: Tensor,
    scheme: str,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    mode_scale: float = 1.29,
) -> Tensor:
    """Position ``u`` in [0, 1] of each sample in the ascending list of training noise levels.

    Args:
        normal_or_uniform_B: ``[B]`` standard normal draws for ``logit_normal``, else uniform draws in [0, 1).
        scheme: ``logit_normal`` (``u = sigmoid(mean + std * z)``), ``mode`` (``1 - r - s (cos(pi r / 2)^2 - 1 + r)``),
            both of Esser et al. 2024 (arXiv 2403.03206), section 3.1; the others are uniform.
    """
    if scheme == "logit_normal":
        return torch.sigmoid(logit_mean + logit_std * normal_or_uniform_B.double())
    r = normal_or_uniform_B.double()
    if scheme == "mode":
        return (1.0 - r - mode_scale * (torch.cos(torch.pi * r / 2) ** 2 - 1.0 + r)).clamp(0.0, 1.0)
    if scheme in UNIFORM_SCHEMES:
        return r
    raise ValueError(f"unknown weighting scheme {scheme!r}")


UNIFORM_SCHEMES = ("none", "sigma_sqrt", "cosmap")


def loss_weight(sigma_B: Tensor, scheme: str) -> Tensor | None:
    """Weight of each sample's loss by its noise level, ``[B]`` float32; None where all weigh the same.

    ``sigma_sqrt``: ``sigma^-2``; ``cosmap``: ``2 / (pi (1 - 2 sigma + 2 sigma^2))``, as in diffusers' SD3 training.
    """
    sigma = sigma_B.float()
    if scheme == "sigma_sqrt":
        return sigma**-2.0
    if scheme == "cosmap":
        return 2.0 / (torch.pi * (1.0 - 2.0 * sigma + 2.0 * sigma**2))
    return None


def index_from_density(u_B: Tensor, num_levels: int) -> Tensor:
    """``floor(u * num_levels)`` as int64 ``[B]``, kept below ``num_levels`` where u rounds to 1."""
    return (u_B * num_levels).long().clamp_(max=num_levels - 1)
