"""Videos of a run: MP4 files, galleries, and the page that plays them."""

from pathlib import Path

import numpy as np
import torch

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


def test_a_gallery_of_videos_is_played_by_the_report(tmp_path: Path) -> None:
    clip = torch.from_numpy(moving_square())
    for step in (0, 2):
        shown = [Shown(clip, "a square", 0, "fixed", {"total": 0.5}, fps=16.0)]
        files = save_gallery(tmp_path / f"media/validation/step_{step}", shown)
        assert [file.suffix for file in files] == [".png"]  # what trackers show: the first frame
        assert files[0].with_suffix(".mp4").is_file()
    page = write_report(tmp_path).read_text()
    assert page.count("<video ") == 2
    assert "media-src data:" in page
    assert page.count("data:video/mp4;base64,") == 2


def test_a_clip_of_one_colour_is_blank_and_one_that_moves_is_not() -> None:
    assert not is_blank(torch.from_numpy(moving_square()))
    assert is_blank(torch.zeros(3, 8, 8, 3, dtype=torch.uint8))
