"""`cosmos-rl sample --image` and `--video`: what samples are conditioned on. Imports torch only to load it."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cosmos_rl.data.pair_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver.rows import find_row

_SUFFIXES = {"--image": IMAGE_SUFFIXES, "--video": VIDEO_SUFFIXES}


class GivenFile(NamedTuple):
    """A file and the flag that names it."""

    flag: str
    path: Path


def check_file(image: Path | None, video: Path | None) -> GivenFile | None:
    """The file that the flags name; None: none.

    Raises:
        UserError: it is not there, or of another kind.
    """
    path, flag = video, "--video"
    if image is not None:
        path, flag = image, "--image"
    if path is None:
        return None
    if path.suffix.lower() not in _SUFFIXES[flag]:
        raise UserError(f"{flag} {path}: expected a file that ends with {', '.join(_SUFFIXES[flag])}")
    if not path.expanduser().is_file():
        raise UserError(f"{flag} {path}: no such file")
    return GivenFile(flag, path.expanduser())


def check_class(pipeline_class: str, file: GivenFile | None) -> None:
    """Raise `UserError` where a pipeline takes no such file, or cannot do without one."""
    row = find_row(pipeline_class)
    if file is not None and row.clean_frames[1] == 0:
        raise UserError(f"{file.flag} {file.path}: {pipeline_class} makes samples of texts alone; leave it out")
    if file is None and row.needs_media:
        raise UserError(f"{pipeline_class} needs an image: give --image or --video")


def load_media(pipe: Any, file: GivenFile, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the stock call that condition on the file, as validation conditions: on as much as it can give.

    Args:
        settings: the other arguments; the size without them is the call's own.

    Raises:
        UserError: the file cannot be decoded, or is too short.
    """
    from cosmos_rl.data.given import choose_given, load_given
    from cosmos_rl.data.items import BadSample
    from cosmos_rl.data.prompts import PromptRecord
    from cosmos_rl.policy.model.driver.contract import Medium
    from cosmos_rl.policy.model.driver.first_look import temporal_factor

    row, defaults = find_row(type(pipe).__name__), inspect.signature(type(pipe).__call__).parameters
    height, width = (settings.get(side, defaults[side].default) for side in ("height", "width"))
    given = choose_given(PromptRecord("", {"video": str(file.path)}), row.clean_frames)
    assert given is not None
    assert row.media is not None
    count = 1 + (given.clean - 1) * temporal_factor(pipe)
    try:
        frames = load_given(given, count, height, width, needed_by=f"{file.flag}, {given.clean} latent frames")
    except BadSample as error:
        raise UserError(str(error)) from error
    return dict(row.media(Medium(frames, given.clean)))
