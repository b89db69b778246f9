"""Videos of a run: MP4 files, galleries, and the page that plays them."""

import base64
import io
import re
import struct
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl.tracking.clips import encode_clip, read_frames, shrink_clip
from cosmos_rl.tracking.media import Shown, is_blank, save_gallery
from cosmos_rl.tracking.report import write_report


def moving_square(side: int = 64, count: int = 9) -> np.ndarray:
    frames = np.full((count, side, side, 3), 40, np.uint8)
    for t in range(count):
        frames[t, 8:24, 4 * t : 4 * t + 16] = (220, 60, 60)
    return frames


def test_a_clip_keeps_its_frames_and_its_speed(tmp_path: Path) -> None:
    frames = moving_square()
    (tmp_path / "a.mp4").write_bytes(encode_clip(frames, 24.0))
    found, fps = read_frames(tmp_path / "a.mp4")
    assert fps == 24.0
    decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in found])
    assert decoded.shape == frames.shape
    assert np.abs(decoded.astype(int) - frames).mean() < 6  # colours at half the resolution


def test_a_clip_of_odd_sides_loses_one_pixel(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(encode_clip(moving_square(33), 16.0))
    found, _ = read_frames(tmp_path / "a.mp4")
    assert (found[0].height, found[0].width) == (32, 32)


def test_a_small_version_has_all_frames(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(encode_clip(moving_square(), 16.0))
    (tmp_path / "b.mp4").write_bytes(shrink_clip(tmp_path / "a.mp4", 32))
    found, fps = read_frames(tmp_path / "b.mp4")
    assert (len(found), found[0].width, fps) == (9, 32, 16.0)


def boxes_of(data: bytes) -> dict[str, int]:
    """The boxes of an MP4 file with their sizes, in their order."""
    found, at = {}, 0
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        found[name.decode()] = size
        at += size
    return found


@pytest.mark.parametrize("small", [False, True])
def test_a_clip_is_what_every_browser_plays(tmp_path: Path, small: bool) -> None:
    """H.264 with colours at half the resolution, and the index before the frames."""
    data = encode_clip(moving_square(), 16.0)
    if small:
        (tmp_path / "a.mp4").write_bytes(data)
        data = shrink_clip(tmp_path / "a.mp4", 32)
    boxes = boxes_of(data)
    assert sum(boxes.values()) == len(data)
    assert [name for name in boxes if name != "free"] == ["ftyp", "moov", "mdat"]
    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams
        assert isinstance(stream, av.VideoStream)
        assert (stream.codec_context.name, stream.pix_fmt, stream.frames) == ("h264", "yuv420p", 9)
        assert stream.duration is not None
        assert stream.time_base is not None
        assert float(stream.duration * stream.time_base) == pytest.approx(9 / 16, abs=1e-3)


def test_a_gallery_of_videos_is_played_by_the_report(tmp_path: Path) -> None:
    clip = torch.from_numpy(moving_square())
    for step in (0, 2):
        shown = [Shown(clip, "a square", 0, "fixed", {"total": 0.5}, fps=16.0)]
        files = save_gallery(tmp_path / f"media/validation/step_{step}", shown)
        assert [file.suffix for file in files] == [".png"]  # what trackers show: the first frame
        assert files[0].with_suffix(".mp4").is_file()
    page = write_report(tmp_path).read_text()
    videos = re.findall(r"<video ([^>]*)></video>", page)
    assert len(videos) == 2
    assert "media-src data:" in page
    for attributes in videos:
        assert {"autoplay", "muted", "playsinline", "loop", "controls"} <= set(attributes.split())
        poster, source = (
            base64_of(attributes, name, kind) for name, kind in (("poster", "image"), ("src", "video/mp4"))
        )
        assert Image.open(io.BytesIO(poster)).size == (64, 64)
        assert list(boxes_of(source))[:2] == ["ftyp", "moov"]
        with av.open(io.BytesIO(source), "r") as container:
            assert len(list(container.decode(video=0))) == 9


def base64_of(attributes: str, name: str, kind: str) -> bytes:
    """What stands in an attribute of a tag as a data URI."""
    found = re.search(rf'\b{name}="data:{kind}[^;]*;base64,([^"]*)"', attributes)
    assert found, (name, attributes[:200])
    return base64.b64decode(found[1])


def test_a_clip_of_one_colour_is_blank_and_one_that_moves_is_not() -> None:
    assert not is_blank(torch.from_numpy(moving_square()))
    assert is_blank(torch.zeros(3, 8, 8, 3, dtype=torch.uint8))
