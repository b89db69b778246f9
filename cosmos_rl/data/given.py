"""What samples are conditioned on besides their texts: an image, or frames of a video."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cosmos_rl.data.images import fit, load_image, to_uint8
from cosmos_rl.data.items import BadSample, Item
from cosmos_rl.data.pair_files import IMAGE_SUFFIXES
from cosmos_rl.data.prompts import BEGINNING, MEDIA_KEYS, PromptRecord, find_file
from cosmos_rl.data.tar_files import has_file
from cosmos_rl.data.texts import printable
from cosmos_rl.errors import UserError

_SHOWN = 5
"""Rows that a message names."""
_READ_AT_ONCE = 8
"""Files; decoders let other threads run."""
_NAME_EDITED = 'the caption names no "image" that it was made of'
_NOTHING_NAMED = 'has no "image" or "video"'
_SMALL = 8
"""Side of images that are decoded only to see whether they can be."""


@dataclass(frozen=True)
class Given:
    """The frames of one sample that are given and not generated."""

    name: str
    """Which medium it is: two of one name are the same."""
    clean: int
    """How many latent frames it gives; 0: none, the sample is made of its text alone."""
    path: Path | None = field(default=None, compare=False)
    at_start: bool = False
    """Of a video its first frames are given, not its last ones."""
    frames: Tensor | None = field(default=None, compare=False, repr=False)
    """uint8 ``[k, H, W, 3]``, where they are decoded already."""
    source: str | None = field(default=None, compare=False)
    """Which frames of which file they are, as in `Item`."""


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt with its medium, as the key of its conditions."""

    text: str
    given: Given

    def __str__(self) -> str:
        return f"{self.text} ({self.given.clean} latent frames of {self.given.name})"


PromptKey = str | GivenPrompt


def text_of(key: PromptKey) -> str:
    """The prompt alone."""
    if isinstance(key, GivenPrompt):
        return key.text
    return key


def join_key(prompt: str, given: Given | None) -> PromptKey:
    """What the conditions of a sample are kept under."""
    if given is None:
        return prompt
    return GivenPrompt(prompt, given)


def find_media_problems(records: Sequence[PromptRecord], clean_frames: tuple[int, int], count: int = 1) -> str:
    """What is wrong with records that lack a medium which their samples need, or name a file that is missing or cannot
    be read; empty: nothing.

    Every file is decoded, once: a run would find a broken one only when its turn comes.

    Args:
        clean_frames: least and most latent frames; (0, 0): the model takes none, and nothing is looked at.
        count: frames that a video must have.
    """
    least, most = clean_frames
    if most == 0:
        return ""
    media = [choose_given(record, (1, 1)) for record in records]
    distinct = list(dict.fromkeys(one for one in media if one is not None))
    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        problems = dict(zip(distinct, pool.map(lambda one: _find_problem(one, count), distinct), strict=True))
    wrong = []
    for number, (record, one) in enumerate(zip(records, media, strict=True)):
        problem = None
        if one is not None:
            problem = problems[one]
        if problem == _NOTHING_NAMED and least == 0:
            problem = None
        if problem is not None:
            wrong.append(f"{number} ({printable(record.prompt[:40])!r}): {problem}")
    if not wrong:
        return ""
    more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return "prompts that cannot be conditioned:\n  " + "\n  ".join(wrong[:_SHOWN]) + more


def _find_problem(given: Given, count: int) -> str | None:
    if given.path is None:
        return _NOTHING_NAMED
    if not has_file(given.path):
        return f"no file {printable(str(given.path))}"
    try:
        load_given(given, count, _SMALL, _SMALL)
    except BadSample as error:
        return str(error)
    return None


def count_clean(clean_frames: tuple[int, int], u: float) -> int:
    """A number of latent frames: each of those that are allowed for as large a part of ``u`` in [0, 1)."""
    least, most = clean_frames
    return min(least + int(u * (most - least + 1)), most)


def choose_given(record: PromptRecord, clean_frames: tuple[int, int], u: float = 1.0) -> Given | None:
    """How much of its medium a record's samples get.

    An image makes one latent frame at most, whatever is asked for.

    Args:
        clean_frames: least and most latent frames; (0, 0): the model takes none.
        u: see `count_clean`; 1: the most.
    """
    if clean_frames[1] == 0:
        return None
    path = find_file(record)
    if path is None:
        return Given("", 0)
    clean = count_clean(clean_frames, u)
    if _is_image(path):
        clean = min(clean, 1)
    at_start = not any(record.metadata.get(key) for key in MEDIA_KEYS if key != BEGINNING)
    return Given(str(path), clean, path, at_start)


def choose_own(item: Item, name: str, clean: int, count: int) -> Given:
    """What a training sample is conditioned on: the first frames of its own video, or the image that it was made of.

    Raises:
        UserError: it is an image, and nothing says what it was made of.
    """
    if clean == 0:
        return Given("", 0)
    if item.visual.ndim == 4:
        return replace(first_frames(item.visual, name, clean, count), source=item.source)
    if item.edits is None:
        raise UserError(f"{printable(item.name)}: the model edits images, and {_NAME_EDITED}")
    return Given(str(item.edits), 1, item.edits)


def list_edited(dataset: Any) -> list[PromptRecord]:
    """The captions of a data set that knows them without decoding, each with the image that it edits; else nothing."""
    edited = getattr(dataset, "edited", None) or ()
    rows = zip(getattr(dataset, "prompts", None) or (), edited, strict=False)
    return [PromptRecord(prompt, {"image": image}) for prompt, image in rows]


def first_frames(visual: Tensor, name: str, clean: int, count: int) -> Given:
    """The first ``count`` frames of a training sample ``[3, T, H, W]`` in [-1, 1] as what it is conditioned on."""
    if clean == 0:
        return Given("", 0)
    frames = to_uint8((visual[:, :count].movedim(0, 1) + 1.0) / 2.0)
    return Given(name, clean, frames=frames)


def make_grey(clean: int, count: int, height: int, width: int) -> Given:
    """Frames of one colour, where there is no medium to try a model with."""
    return Given("grey", clean, frames=torch.full((count, height, width, 3), 127, dtype=torch.uint8))


def load_given(
    given: Given, count: int, height: int, width: int, *, needed_by: str = "policy.diffusers.conditional_frames"
) -> Tensor:
    """The frames ``[count, height, width, 3]`` uint8: an image, or the last ``count`` frames of a video, which the
    sample continues, or the first ones.

    Args:
        needed_by: what asks for so many frames, for the message.

    Raises:
        BadSample: the file cannot be decoded or is too short.
    """
    if given.frames is not None:
        return _refit(given.frames, height, width)
    assert given.path is not None
    if _is_image(given.path):
        visual = load_image(given.path, height, width).unsqueeze(1)
    else:
        from cosmos_rl.data.videos import load_clip, start_of_first, start_of_last

        choose = start_of_last
        if given.at_start:
            choose = start_of_first
        visual = load_clip(given.path, count, height, width, choose, needed_by=needed_by).visual
    return to_uint8((visual.movedim(0, 1) + 1.0) / 2.0)


def _refit(frames: Tensor, height: int, width: int) -> Tensor:
    """Decoded frames, which a bucket may have given another size, scaled to cover this one and cropped."""
    if frames.shape[1:3] == (height, width):
        return frames
    return torch.stack([torch.from_numpy(np.array(fit(Image.fromarray(f.numpy()), height, width))) for f in frames])


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES
