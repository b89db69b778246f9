"""Small video files whose frames can be told apart by their brightness."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

STEP = 12
"""Difference in brightness between a frame and the next, far above what compression changes."""


def write_video(
    file: Path, frames: int, *, fps: float = 16, size: tuple[int, int] = (32, 32), times: list[int] | None = None
) -> None:
    """Frame k is grey with the value ``STEP * k`` (k below 21). ``times``: when each is shown, in 1 / 1000 s."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", Fraction(fps).limit_denominator(1001), {"crf": "1", "bf": "2"})
        stream.height, stream.width = size
        stream.pix_fmt, stream.gop_size = "yuv420p", 4
        if times is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for k in range(frames):
            pixels = np.full((*size, 3), STEP * (k % 21), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[k], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
