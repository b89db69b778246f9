"""The geometry of a pipeline, found out by running it: what its files do not say of every family."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.geometry import Geometry
from cosmos_rl.policy.model.driver.contract import Size
from cosmos_rl.policy.model.driver.driver import Driver

_LATENTS = 16
"""Of a side: enough that a transformer which fills its tokens up to a multiple shows how many there are."""
_MOST_FRAMES = 64


def measure_geometry(driver: Driver) -> Geometry:
    """Of a pipeline that was proved to be drivable.

    Raises:
        UserError: latents or tokens do not grow with the media.
    """
    small = _latents(driver, driver.size)
    stride = driver.size.height // small.shape[-2]
    edge = _LATENTS * stride
    base = driver.size._replace(height=edge, width=edge)
    frame_stride, longer = 1, None
    if driver.frames_name is not None:
        longer = _find_longer(driver, base)
        frame_stride = _find_longer(driver, longer).frames - longer.frames  # the first may be a number that is rounded
    shape = _latents(driver, base).shape
    counts = _count_tokens(driver, base)
    more = _growth(counts, _count_tokens(driver, base._replace(height=2 * edge)))
    if more <= 0:
        raise UserError(f"{driver.facts.pipeline}: twice the height does not give more tokens")
    moments, frame_patch = math.prod(shape[2:-2]), 1
    per_token = moments * _LATENTS * _LATENTS / more
    if longer is not None:
        # what one more latent frame adds shows the area of a token alone
        added = _growth(counts, _count_tokens(driver, longer))
        frame_patch = max(round(per_token * added / (_LATENTS * _LATENTS)), 1)
    return Geometry(shape[1], stride, frame_stride, math.isqrt(round(per_token / frame_patch)), frame_patch)


def _latents(driver: Driver, size: Size) -> Tensor:
    """What the decoder gets of one sample."""
    return driver.before_decoder(driver.pack(torch.zeros(1, *driver.noise_shape(size)), size), size)


def _find_longer(driver: Driver, base: Size) -> Size:
    """The next number of frames that makes one more latent frame."""
    numbers = math.prod(driver.noise_shape(base))
    for frames in range(base.frames + 1, base.frames + _MOST_FRAMES):
        size = base._replace(frames=frames)
        if math.prod(driver.noise_shape(size)) > numbers:
            return size
    raise UserError(f"{driver.facts.pipeline}: {_MOST_FRAMES} more frames make no more latents")


def _growth(before: list[int], after: list[int]) -> int:
    return max(b - a for a, b in zip(before, after, strict=True))


def _count_tokens(driver: Driver, size: Size) -> list[int]:
    """Lengths of all sequences that the denoiser's blocks get, in their order."""
    lengths: list[int] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = tree.tree_leaves((args, kwargs))
        lengths.extend(leaf.shape[1] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim == 3)

    parts = [part for denoiser in driver.denoisers.values() for part in denoiser.children()]
    blocks = [block for part in parts if isinstance(part, nn.ModuleList) for block in part]
    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        state = driver.pack(torch.zeros(1, *driver.noise_shape(size)), size)
        level = driver.training_level(torch.tensor(0.5), size)
        with torch.no_grad():
            driver.velocity(state, level, driver.encode([""]), None, size)
    finally:
        for hook in hooks:
            hook.remove()
    return lengths
