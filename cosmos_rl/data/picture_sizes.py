"""How large images and videos are on disk, and what scaling and cropping leaves of them. No torch."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from cosmos_rl.data.tar_files import TarChanged, opened
from cosmos_rl.data.texts import printable
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.buckets import Sides, choose_size, kept_share

LOOKED_AT = 2000
"""Pictures of a folder that are measured where only a report asks for it."""
_MUCH = Fraction(1, 4)
"""Share of a picture's area whose loss is worth a word."""
_AT_ONCE = 8
_ORIENTATION = 0x0112
_LYING = (5, 6, 7, 8)
"""Values of EXIF's orientation that exchange height and width."""


class Measured(NamedTuple):
    """A picture and its sides."""

    name: str
    sides: Sides


def measure_image(path: Path) -> Sides:
    """Height and width as `to_rgb` turns it, from the head of the file.

    Raises:
        UserError: the file is no image.
    """
    from PIL import Image

    try:
        with opened(path) as file, Image.open(file) as image:
            # the method of PNG's own class decodes the whole file, to find what hardly any has behind its pixels
            lying = Image.Image.getexif(image).get(_ORIENTATION) in _LYING
            return (image.width, image.height) if lying else (image.height, image.width)
    except TarChanged:
        raise
    except Exception as error:  # whatever a decoder makes of a broken file is the fault of that file
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise UserError(f"{printable(str(path))}: cannot be read as an image ({why})") from error


def measure_video(path: Path) -> Sides:
    """Height and width of the first frame, as it is shown.

    Raises:
        UserError: the file is no video.
    """
    import av

    try:
        with opened(path) as file, av.open(file, "r") as container:
            frame = next(container.decode(video=0))
            return (frame.width, frame.height) if frame.rotation % 180 else (frame.height, frame.width)
    except TarChanged:
        raise
    except Exception as error:  # as with images
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise UserError(f"{printable(str(path))}: cannot be read as a video ({why})") from error


def measure_all(count: int, measure: Callable[[int], Measured]) -> list[Measured | UserError]:
    """Elements 0 ... count - 1, or why they cannot be measured. Files are read several at a time."""

    def look(index: int) -> Measured | UserError:
        try:
            return measure(index)
        except UserError as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(look, range(count)))


def measure_some(count: int, measure: Callable[[int], Measured]) -> list[Measured]:
    """At most `LOOKED_AT` of the elements, spread evenly; those that cannot be read are left out."""
    chosen = range(0, count, max(-(-count // LOOKED_AT), 1))
    found = measure_all(len(chosen), lambda number: measure(chosen[number]))
    return [one for one in found if not isinstance(one, UserError)]


def measure_file(folder: Path, file: str, *, video: bool) -> Measured:
    """An image or a video of a folder.

    Raises:
        UserError: it cannot be read.
    """
    if video:
        return Measured(file, measure_video(folder / file))
    return Measured(file, measure_image(folder / file))


def name_pictures(config: Config) -> str:
    """What reports call elements of the training data; a folder that is repeated has more of them than files."""
    if any(folder.repeats > 1 for folder in config.train.train_policy.dataset.folders):
        return "samples"
    return "videos" if config.policy.diffusers.is_video else "images"


def describe_cuts(
    pictures: Sequence[Measured], sizes: Sequence[Sides], total: int, noun: str, *, in_buckets: bool
) -> str:
    """One line about pictures that lose more than a quarter of their area; empty: none does.

    Args:
        sizes: those that are trained on.
        total: how many there are, of which ``pictures`` were measured.
        noun: what they are, for the message.
        in_buckets: these are the sizes of buckets, of which there may be one.
    """
    kept = [(kept_share(one.sides, choose_size(one.sides, sizes)), one.name) for one in pictures]
    cut = [entry for entry in kept if entry[0] < 1 - _MUCH]
    if not cut:
        return ""
    least, worst = min(cut)
    of = str(total)
    if len(pictures) < total and total > LOOKED_AT:
        of = f"{len(pictures)} looked at among {total}"
    where, advice = "the nearest of the buckets", "add a size of their ratio to policy.diffusers.buckets"
    if not in_buckets:
        where = f"{sizes[0][0]} x {sizes[0][1]} (height x width)"
        advice = "[policy.diffusers.buckets] trains on several sizes"
    return (
        f"{len(cut)} of {of} {noun} lose more than a quarter of their area when they are cropped to {where}; "
        f"{printable(worst)} loses most, {float(1 - least):.0%}; {advice}"
    )


def describe_buckets(pictures: Sequence[Measured], sizes: Sequence[Sides], noun: str) -> list[str]:
    """How many pictures go to each of several sizes, and how much of them is left; nothing for no pictures."""
    if not pictures:
        return []
    chosen = [choose_size(one.sides, sizes) for one in pictures]
    kept = [(kept_share(one.sides, size), one.name) for one, size in zip(pictures, chosen, strict=True)]
    least, worst = min(kept)
    counts = Counter(chosen)
    listed = ", ".join(f"{height} x {width}: {counts[height, width]}" for height, width in sorted(counts))
    mean = float(sum(share for share, _ in kept) / len(kept))
    lines = [
        f"{len(pictures)} {noun} in buckets (height x width): {listed}",
        f"{mean:.1%} of their area is kept; {printable(worst)} loses most, {float(1 - least):.1%}",
    ]
    empty = len(set(sizes)) - len(counts)
    if empty:
        lines.append(f"{empty} of the {len(set(sizes))} sizes are those of no {noun.removesuffix('s')}")
    return lines
