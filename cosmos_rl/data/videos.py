"""Video files -> tensors: frames that follow one another, with their true rate. PyAV (FFmpeg) decodes."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import torch
from torch import Tensor

from cosmos_rl.data.images import fit, to_tensor
from cosmos_rl.data.items import BadSample
from cosmos_rl.data.tar_files import TarChanged, opened
from cosmos_rl.data.texts import printable

UNKNOWN_FPS = 16.0
"""Frames per second of a file that does not say how many it has."""


@dataclass(frozen=True)
class Clip:
    """Some frames of a video file."""

    visual: Tensor
    """``[3, T, H, W]`` float32 in [-1, 1]."""
    fps: float
    """Frames per second in the file: its mean rate where it varies."""
    start: int
    """Index of the first frame in the file."""
    windows: int
    """How many first frames there are to choose from."""


@dataclass(frozen=True)
class Window:
    """Some frames of a video file that were not decoded."""

    start: int
    """Index of the first frame in the file."""
    windows: int
    """How many first frames there are to choose from."""
    fps: float
    """Frames per second in the file: its mean rate where it varies."""


def count_frames(path: Path) -> int:
    """Number of frames in a video file, without decoding them.

    Raises:
        BadSample: the file cannot be read, or ends before its last frame.
    """
    with _open(path) as (container, stream):
        return len(_list_times(container, stream))


def start_of_middle(windows: int) -> int:
    """The first frame of the window in the middle."""
    return (windows - 1) // 2


def start_of_first(windows: int) -> int:
    """The first frame of all."""
    return 0


def start_of_last(windows: int) -> int:
    """The first frame of the last window."""
    return windows - 1


def load_clip(
    path: Path,
    frames: int,
    height: int,
    width: int,
    choose: Callable[[int], int] = start_of_middle,
    *,
    needed_by: str = "policy.diffusers.train_frames",
) -> Clip:
    """``frames`` frames of a file, one after the other; each scaled to cover ``height`` x ``width`` and cropped.

    Args:
        choose: the number of possible first frames -> the index of the one to take.
        needed_by: the key that asks for so many frames, for the message.

    Raises:
        BadSample: the file cannot be decoded or is too short; the message names it.
    """
    with _open(path) as (container, stream):
        times = _list_times(container, stream)
        window = _choose_window(path, stream, len(times), frames, choose, needed_by)
        wanted = times[window.start : window.start + frames]
        decoded = [to_tensor(fit(image, height, width)) for image in _decode(container, stream, wanted)]
        if len(decoded) < frames:
            broken = window.start + len(decoded)
            raise BadSample(f"{printable(str(path))}: frame {broken} of {len(times)} cannot be decoded")
        return Clip(torch.stack(decoded, 1), window.fps, window.start, window.windows)


def find_window(path: Path, frames: int, choose: Callable[[int], int]) -> Window:
    """The frames that `load_clip` decodes, without decoding them; the same errors for what shows without it."""
    with _open(path) as (container, stream):
        count = len(_list_times(container, stream))
        return _choose_window(path, stream, count, frames, choose, "policy.diffusers.train_frames")


def _choose_window(
    path: Path, stream: Any, count: int, frames: int, choose: Callable[[int], int], needed_by: str
) -> Window:
    windows = count - frames + 1
    if windows < 1:
        raise BadSample(f"{printable(str(path))}: {count} frames, need {frames} ({needed_by})")
    fps = float(stream.average_rate or stream.guessed_rate or UNKNOWN_FPS)
    return Window(choose(windows), windows, fps)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Any]]:
    """The file and its first video stream; whatever a decoder makes of a broken file becomes a `BadSample`."""
    try:
        with opened(path) as file, av.open(file, "r") as container:
            if not container.streams.video:
                raise BadSample(f"{printable(str(path))}: has no video in it")
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # several clips are decoded at once, by the loader's processes
            yield container, stream
    except (BadSample, TarChanged):
        raise
    except Exception as error:  # as with images
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise BadSample(f"{printable(str(path))}: cannot be read as a video ({why})") from error


def _list_times(container: Any, stream: Any) -> list[int]:
    """The presentation times of all frames, ascending, in units of the stream's time base.

    Read from the packets: a duration times a rate would be off by one, and decoding would take much longer.
    """
    packets = [packet for packet in container.demux(stream) if packet.size]
    if stream.frames and len(packets) < stream.frames:
        raise BadSample(f"{printable(container.name)}: {stream.frames} frames announced, {len(packets)} found")
    times = sorted(packet.pts for packet in packets if packet.pts is not None and not packet.is_discard)
    if not times:
        raise BadSample(f"{printable(container.name)}: its frames have no times")
    return times


def _decode(container: Any, stream: Any, wanted: list[int]) -> Iterator[Any]:
    """The frames of these presentation times as RGB images, up to the first that is not there."""
    container.seek(wanted[0], stream=stream)  # to the key frame before
    index = 0
    for frame in container.decode(stream):
        if frame.pts is None or frame.pts < wanted[index]:
            continue
        if frame.pts > wanted[index] or frame.is_corrupt:
            return
        image = frame.to_image()
        if frame.rotation:  # phones record upright videos lying on their side
            image = image.rotate(frame.rotation, expand=True)
        yield image
        index += 1
        if index == len(wanted):
            return
