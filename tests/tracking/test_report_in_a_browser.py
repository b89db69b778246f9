"""The report's videos before and after play in a browser, from the file as it lies on the disk."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl.tracking.media import Shown, save_gallery
from cosmos_rl.tracking.report import write_report
from tests.support.browser import browse
from tests.support.patience import HANG_S, wait_until
from tests.tracking.test_clips import moving_square

pytestmark = [pytest.mark.zoo, pytest.mark.timeout(HANG_S)]

NOTE_TIMES = """[...document.querySelectorAll("video")].forEach(video => {
    video.times = new Set();
    video.addEventListener("timeupdate", () => video.times.add(video.currentTime));
})"""
LOOK = """[...document.querySelectorAll("video")].map(video => ({
    width: video.videoWidth, height: video.videoHeight, duration: video.duration, paused: video.paused,
    times: video.times.size, frames: video.getVideoPlaybackQuality().totalVideoFrames,
    error: video.error && video.error.message, label: video.closest("figure, div").innerText,
}))"""


def test_a_browser_plays_the_videos_before_and_after(tmp_path: Path, program: str) -> None:
    clip = torch.from_numpy(moving_square())
    for step in (0, 2):
        shown = [Shown(clip, "a square", 0, "fixed", {"total": 0.5}, fps=16.0)]
        save_gallery(tmp_path / f"run/media/validation/step_{step}", shown)
    report = write_report(tmp_path / "run")
    with browse(program, tmp_path / "profile") as page:
        page.open(report)
        page.evaluate(NOTE_TIMES)
        videos: list[dict[str, Any]] = []

        def all_play() -> bool:
            videos[:] = page.evaluate(LOOK)
            return any(video["error"] for video in videos) or all(video["times"] >= 3 for video in videos)

        wait_until(all_play, "the videos playing")
    assert len(videos) == 2  # nothing but the page started them
    for video in videos:
        assert (video["error"], video["paused"], video["width"], video["height"]) == (None, False, 64, 64)
        assert video["duration"] == pytest.approx(9 / 16, abs=0.01)
        assert video["frames"] > 1
    labels = [video["label"].split()[0] for video in videos]
    assert labels == ["before", "now"]  # "after" only in a run that has ended
