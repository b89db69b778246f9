"""What samples are conditioned on besides their texts: an image, or frames of a video."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from cosmos_rl.data.images import load_image, to_uint8
from cosmos_rl.data.pair_files import IMAGE_SUFFIXES
from cosmos_rl.data.prompts import BEGINNING, PromptRecord
from cosmos_rl.data.texts import printable
from cosmos_rl.errors import UserError

_KEYS = ("image", "video", BEGINNING)
"""Keys of a prompt's row that name a file, relative to the file of prompts."""
_SHOWN = 5
"""Rows that a message names."""


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


def find_file(record: PromptRecord) -> Path | None:
    """The image or the video that a record names; None: it names none."""
    for key in _KEYS:
        named = record.metadata.get(key)
        if isinstance(named, str) and named:
            return (record.folder or Path()) / Path(named).expanduser()
    return None


def check_media(records: Sequence[PromptRecord], clean_frames: tuple[int, int]) -> None:
    """Raise `UserError` where a record lacks a medium that its samples need, or names a file that is not there."""
    least, most = clean_frames
    if most == 0:
        return
    wrong = []
    for number, record in enumerate(records):
        path = find_file(record)
        if path is None and least > 0:
            wrong.append(f'{number} ({printable(record.prompt[:40])!r}): has no "image" or "video"')
        elif path is not None and not path.is_file():
            wrong.append(f"{number} ({printable(record.prompt[:40])!r}): no file {printable(str(path))}")
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise UserError("prompts that cannot be conditioned:\n  " + "\n  ".join(wrong[:_SHOWN]) + more)


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
    at_start = not any(record.metadata.get(key) for key in _KEYS if key != BEGINNING)
    return Given(str(path), clean, path, at_start)


def first_frames(visual: Tensor, name: str, clean: int, count: int) -> Given:
    """The first ``count`` frames of a training sample ``[3, T, H, W]`` in [-1, 1] as what it is conditioned on."""
    if clean == 0:
        return Given("", 0)
    frames = to_uint8((visual[:, :count].movedim(0, 1) + 1.0) / 2.0)
    return Given(name, clean, frames=frames)


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
        return given.frames
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


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES
