"""Image files -> tensors. One loader for every path, so that a check and the training see the same thing."""

from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image, ImageOps
from torch import Tensor

from cosmos_rl.data.items import BadSample
from cosmos_rl.data.tar_files import TarChanged, opened
from cosmos_rl.data.texts import printable

_PIXELS_AT_ONCE = 2**20
DECODING = f"1, Pillow {PIL.__version__}"
"""How files become tensors, for caches of what is made of them: another number when the functions below give other
pixels."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Any PIL mode -> RGB: EXIF orientation applied, transparency on white, 16-bit grey scaled to 8 bits."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # PIL would clip 16-bit values instead of scaling them
        values = np.asarray(image, dtype=np.float64)
        scale = 1.0
        if values.max(initial=0) > 255 or image.mode.startswith("I;16"):
            scale = 255.0 / 65535.0
        return Image.fromarray((values * scale).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def fit(image: Image.Image, height: int, width: int) -> Image.Image:
    """Scale so that the image just covers ``height`` x ``width`` (aspect kept), then crop the centre."""
    if image.size == (width, height):
        return image
    return ImageOps.fit(image, (width, height), method=Image.Resampling.BICUBIC)


def to_tensor(image: Image.Image) -> Tensor:
    """RGB image -> float32 ``[3, H, W]`` in [-1, 1]."""
    array = np.array(image, dtype=np.uint8)
    return torch.from_numpy(array).permute(2, 0, 1).to(torch.float32).div_(127.5).sub_(1.0)


def load_image(path: Path, height: int, width: int) -> Tensor:
    """Image file, or member of a tar -> float32 ``[3, height, width]`` in [-1, 1].

    Raises:
        BadSample: the file cannot be decoded; the message names it.
    """
    try:
        with opened(path) as file, Image.open(file) as image:
            return to_tensor(fit(to_rgb(image), height, width))
    except TarChanged:
        raise
    except Exception as error:  # whatever a decoder makes of a broken file is the fault of that file
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise BadSample(f"{printable(str(path))}: cannot be read as an image ({why})") from error


def are_finite(media: Tensor) -> Tensor:
    """Bool ``[N]`` on the CPU: whether all pixels are numbers, which uint8 no longer shows."""
    extremes = torch.stack([torch.stack(one.aminmax()) for one in media])  # NaN where there is one; makes no copy
    return extremes.isfinite().all(1).cpu()


def to_uint8(media: Tensor) -> Tensor:
    """Images ``[N, 3, H, W]`` or videos ``[N, T, 3, H, W]`` in [0, 1], any float dtype -> uint8 with the channels last,
    rounded, on the CPU. Frames of a megapixel at a time: the steps in between are not those of a whole video."""
    height, width = media.shape[-2:]
    frames = media.flatten(0, -4)
    found = torch.empty(len(frames), height, width, 3, dtype=torch.uint8)
    at_once = max(_PIXELS_AT_ONCE // (height * width), 1)
    for rows, part in zip(found.split(at_once), frames.split(at_once), strict=True):
        rows.copy_((part.float().clamp(0, 1) * 255).round().to("cpu", torch.uint8).movedim(-3, -1))
    return found.reshape(*media.shape[:-3], height, width, 3)
