"""Videos of two ranks: each rank writes what it made, and the gallery is that of one rank."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmos_rl.tracking.clips import read_frames
from cosmos_rl.tracking.report import write_report
from tests.support.clips_on_ranks import COUNT, FRAMES, clip
from tests.support.family_runs import TrainedFamily, family_toml
from tests.support.nft_runs import prompt_file
from tests.support.ranks import train_on_ranks

CLIP = 5 * 32 * 32 * 3
"""Bytes of a video of the job."""


def index(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "index.json").read_text())


def first_frame(file: Path) -> np.ndarray:
    frames, _ = read_frames(file)
    assert len(frames) == 5
    return frames[0].to_ndarray(format="rgb24").astype(int)


@pytest.mark.process
def test_two_ranks_write_their_own_videos_into_one_gallery(tmp_path: Path) -> None:
    folder = train_on_ranks(2, tmp_path, tmp_path / "run", module="tests.support.clips_on_ranks")
    logs = [(folder / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert "rank 0 held [0, 2, 4] blank [0] sent 3 bytes" in logs[0]  # a flag for each of its samples
    assert "rank 1 held [1, 3] blank [0] sent 3 bytes" in logs[1]
    gallery = folder / "media/validation/step_1"
    assert [row["prompt"] for row in index(gallery)] == [f"clip {i}" for i in range(COUNT)]
    for i, row in enumerate(index(gallery)):
        frames, fps = read_frames(gallery / row["clip"])
        assert (len(frames), fps) == (FRAMES, 16.0)
        assert np.abs(frames[0].to_ndarray(format="rgb24").astype(int) - clip(i)[0].numpy()).mean() < 10
        assert np.array_equal(np.asarray(Image.open(gallery / row["file"])), clip(i)[0].numpy())
    assert [path.name for path in gallery.parent.iterdir()] == ["step_1"], "nothing is left aside"


@pytest.mark.process
@pytest.mark.zoo
def test_videos_are_written_by_the_rank_that_made_them_and_travel_nowhere(tmp_path: Path) -> None:
    config = family_toml(tmp_path, TrainedFamily("wan", frames=("num_frames", 5)), job="nft")
    prompts = prompt_file(tmp_path, ("a hat", "a shoe", "the sea"), "val.txt")
    options = [
        "--validation.enable=true",
        "--validation.freq=1",
        f"--validation.dataset.local_dir={prompts}",
        '--validation.local_reward.reward_fns=[{function = "tests.support.nft_rewards:smooth"}]',
        "--train.max_num_steps=1",
        "--train.ckpt.enable_checkpoint=false",
    ]
    one, two = (
        train_on_ranks(ranks, config, tmp_path / f"ranks_{ranks}", *options, module="tests.support.gallery_job")
        for ranks in (1, 2)
    )
    for kind, size in (("validation", 3), ("rollout", 8)):
        folders = [run / "media" / kind / "step_1" for run in (one, two)]
        alone, together = map(index, folders)
        assert len(together) == size
        for a, b in zip(alone, together, strict=True):
            assert {**a, "scores": {}} == {**b, "scores": {}}
            assert a["scores"] == pytest.approx(b["scores"], rel=1e-3)
            poster = folders[1] / b["file"]
            assert poster.stat().st_size > 100
            assert np.abs(first_frame(folders[0] / a["clip"]) - first_frame(folders[1] / b["clip"])).mean() < 1
    assert not list((two / "media").rglob(".*")), "nothing is left aside"
    sizes = [[int(line) for line in (two / f"gathered_{rank}.txt").read_text().split()] for rank in (0, 1)]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) > 3
    assert max(sizes[0]) < CLIP
    assert write_report(two).read_text().count("<video ") >= 3
