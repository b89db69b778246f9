"""Between states and what the VAE makes of media, without knowing how a family packs, scales or normalises.

Between the noise that `prepare_latents` draws and what `vae.decode` gets, every family only moves elements and applies
a factor and an offset to each. Both are measured by sending numbers through the pipeline's own code.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver.contract import Size

if TYPE_CHECKING:
    from cosmos_rl.policy.model.driver.driver import Driver


class DecodeMap(NamedTuple):
    """Decoder input ``z[k] = factor[k] * noise[index[k]] + offset[k]``, all of one row, flat.

    The factor is 0 where a medium gives the element.
    """

    factor: Tensor
    offset: Tensor
    index: Tensor
    noise_shape: tuple[int, ...]
    latent_shape: tuple[int, ...]


def measure_map(driver: "Driver", size: Size) -> DecodeMap:
    """Measure the map for one size (some runs of the pipeline without its denoiser).

    Raises:
        UserError: it is not of that form.
    """
    noise_shape = driver.noise_shape(size)
    count = torch.Size(noise_shape).numel()

    def through(noise: Tensor) -> Tensor:
        return driver.before_decoder(driver.pack(noise.reshape(1, *noise_shape), size), size)[0].double()

    first = through(torch.zeros(count))
    offset = first.flatten()
    factor = through(torch.ones(count)).flatten() - offset
    if driver.row.media is not None:
        factor = torch.where(factor.abs() > 1e-9, factor, 0.0)
    position = torch.arange(count)
    # positions are sent digit by digit, small enough for the dtypes on the way, of which some are not seen: LTX rounds
    # its latents to the dtype of the text features and hands them over in that of the VAE
    base, tolerance = 1024, 1e-4
    fine = 1 + 2**-12  # 1 in half precision
    moved = (through(torch.full((count,), fine)).flatten() - offset) / factor
    if float((moved[factor != 0] - fine).abs().median()) > tolerance:
        base, tolerance = 16, 0.05
    index, unit = torch.zeros(len(factor), dtype=torch.int64), 1
    while unit < count:
        digit = ((through((position // unit % base).float()).flatten() - offset) / factor).round()
        index += digit.nan_to_num(nan=-1e9, posinf=-1e9, neginf=-1e9).long().cpu() * unit
        unit *= base
    found = DecodeMap(factor, offset, index.to(factor.device), noise_shape, tuple(first.shape))
    _verify(found, through, tolerance, has_media=driver.row.media is not None)
    return found


def _verify(found: DecodeMap, through, tolerance: float, *, has_media: bool) -> None:
    count, live = torch.Size(found.noise_shape).numel(), found.factor != 0
    shown = found.index[live]
    one_each = len(shown) == len(shown.unique()) and int(shown.min()) >= 0 and int(shown.max()) < count
    if len(found.index) != count or not one_each or not (bool(live.all()) or has_media):
        raise UserError(
            f"what the decoder gets {found.latent_shape} is not a rearrangement of the noise {found.noise_shape}"
        )
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0))
    expected = found.factor * noise.to(found.factor)[torch.where(live, found.index, 0)] + found.offset
    error = float((through(noise).flatten() - expected).abs().max() / found.factor.abs().max().clamp(min=1.0))
    if error > tolerance:
        raise UserError(f"between noise and decoder is more than a factor and an offset per element: error {error:.1e}")


def encode_latents(driver: "Driver", media: Tensor) -> Tensor:
    """Media ``[N, (T,) 3, H, W]`` in [-1, 1] -> what the VAE makes of them (the posterior's mean)."""
    vae = driver.pipeline.vae
    if media.ndim == 5:
        media = media.movedim(2, 1)
    elif len(driver.facts.latent_shape) == 4:  # a VAE for videos, of which an image is one frame
        media = media.unsqueeze(2)
    made = vae.encode(media.to(driver.device, vae.dtype))
    if hasattr(made, "latent_dist"):
        return made.latent_dist.mode()
    if hasattr(made, "latent"):
        return made.latent
    return made[0]


def pack_state(driver: "Driver", latents: Tensor, found: DecodeMap, size: Size) -> Tensor:
    """Latents as the VAE makes them -> clean states, by the map backwards and the pipeline's own packing.

    Raises:
        UserError: the media had another size.
    """
    if tuple(latents.shape[1:]) != found.latent_shape:
        raise UserError(
            f"the VAE makes {tuple(latents.shape[1:])} of these media, the pipeline decodes {found.latent_shape} for "
            f"{size}: give media of that size"
        )
    live = found.factor != 0
    noise = torch.zeros(len(latents), len(found.index), dtype=torch.float64, device=latents.device)
    noise[:, found.index[live]] = ((latents.double().flatten(1) - found.offset) / found.factor)[:, live]
    return driver.pack(noise.float().reshape(-1, *found.noise_shape), size)
