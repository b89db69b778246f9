"""Videos of a run as MP4 files that every browser plays (H.264, 4:2:0)."""

import io
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

_QUALITY = {"crf": "18", "preset": "veryfast"}
_INDEX_FIRST = {"movflags": "+faststart"}  # so that a page that is still loading plays it
_SMALL_QUALITY = {"crf": "28", "preset": "veryfast"}


def encode_clip(frames_THW3: NDArray[np.uint8], fps: float, options: dict[str, str] | None = None) -> bytes:
    """Frames uint8 ``[T, H, W, 3]`` -> the bytes of an MP4; an odd side loses its last row or column of pixels."""
    height, width = (side - side % 2 for side in frames_THW3.shape[1:3])
    target = io.BytesIO()

    def read_again(*_: object) -> io.BytesIO:
        """To put the index first, the muxer reads what it has written."""
        return io.BytesIO(target.getvalue())

    with av.open(target, "w", format="mp4", options=_INDEX_FIRST, io_open=read_again) as container:
        stream = container.add_stream("libx264", Fraction(fps).limit_denominator(1001), options or _QUALITY)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames_THW3[:, :height, :width]:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return target.getvalue()


def read_frames(file: Path) -> tuple[list[av.VideoFrame], float]:
    """The frames of a clip and how many there are in a second."""
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        return list(container.decode(stream)), float(stream.average_rate or 16)


def shrink_clip(file: Path, side: int) -> bytes:
    """The clip again with a longest side of at most ``side`` pixels and a lower quality."""
    frames, fps = read_frames(file)
    scale = min(1.0, side / max(frames[0].width, frames[0].height))
    width, height = (max(2, round(length * scale / 2) * 2) for length in (frames[0].width, frames[0].height))
    small = np.stack(list(_resize(frames, width, height)))
    return encode_clip(small, fps, _SMALL_QUALITY)


def _resize(frames: list[av.VideoFrame], width: int, height: int) -> Iterator[NDArray[np.uint8]]:
    for frame in frames:
        yield np.asarray(frame.reformat(width=width, height=height, format="rgb24").to_ndarray(), np.uint8)
