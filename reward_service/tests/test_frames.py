"""Rewards of images that are asked to score videos."""

import json

import numpy as np
import pytest

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady
from cosmos_rl_reward.spool import Spool
from cosmos_rl_reward.worker.frames import choose_frames, score_frames
from cosmos_rl_reward.worker.scorer import Scorer
from tests.service import body
from tests.test_pool import ident, spooled


class Brightness(BaseRewardHandler):
    """Of images alone; with a text, a table, and a label that must fit its image."""

    reward_name = "brightness"
    array_type = "numpy"
    media_types = ("image",)
    mergeable = True
    max_batch = 4
    score_keys = ("brightness", "seen")

    def calculate_reward(self, images, metadata):
        assert images.ndim == 4
        assert images.shape[-1] == 3
        assert len(images) <= self.max_batch
        assert len(images) == len(metadata["prompts"]) == len(metadata["labels"])
        assert metadata["media_type"] == "image"
        mean = images.reshape(len(images), -1).mean(1)
        values = [None if m > 200 else float(m) for m in mean]
        times = [m * scale for m, scale in zip(mean, metadata["labels"], strict=True)]
        columns = {"brightness": values, "seen": [f"{m:g}" for m in mean], "table": {"scaled": times}}
        return {"scores": columns, "item_errors": {k: "too bright" for k, m in enumerate(mean) if m > 200}}


def clips(*levels):
    """uint8 ``[B, 3, T, 4, 6]``: the brightness of each frame of each video."""
    array = np.asarray(levels, np.uint8)
    return np.broadcast_to(array[:, None, :, None, None], (len(array), 3, array.shape[1], 4, 6)).copy()


def scorer(reward, video_frames=0):
    start = {"op": "score", "name": "x", "function": "", "self_test": False, "video_frames": video_frames}
    return Scorer({**start, "reward_class": reward, "kwargs": {"device": "cpu", "options": {}}})


def score(tmp_path, array, video_frames=0, **metadata):
    job = spooled(Spool(tmp_path), body(array, "x", media_type="video", **metadata), ident(1), "video")
    request = {"id": job.id, "path": str(Spool(tmp_path).job_path(job.id)), "decoded": ""}
    (reply,) = scorer("tests.test_frames:Brightness", video_frames).score([request])
    return json.loads(reply["body"])


@pytest.mark.parametrize(
    ("count", "wanted", "expected"),
    [
        (5, 0, [0, 1, 2, 3, 4]),
        (5, 9, [0, 1, 2, 3, 4]),
        (5, 1, [2]),
        (8, 4, [1, 3, 5, 7]),
        (93, 3, [15, 46, 77]),
        (81, 8, [5, 15, 25, 35, 45, 55, 65, 75]),
    ],
)
def test_frames_are_the_middles_of_equal_parts(count, wanted, expected):
    assert choose_frames(count, wanted).tolist() == expected


def test_a_reward_of_images_gives_a_video_the_mean_over_its_frames(tmp_path):
    labels = {"labels": [1, 10, 100], "video_infos": [{"video_fps": 8.0}] * 3}
    array = clips([10, 20, 30, 40, 50], [100, 100, 100, 100, 110], [0, 0, 0, 0, 1])  # 15 frames, 4 at a time
    result = score(tmp_path, array, **labels)
    assert result["scores"] == {
        "brightness": pytest.approx([30, 102, 0.2]),
        "table": {"scaled": pytest.approx([30, 1020, 20])},
    }
    assert result["provenance"]["frames"] == {"score": "mean over frames", "scored": 5, "of": 5}
    assert "item_errors" not in result
    assert result["input_info"]["shape"] == [3, 3, 5, 4, 6]


def test_a_number_of_evenly_spaced_frames_is_scored_when_it_is_configured(tmp_path):
    result = score(tmp_path, clips([10, 20, 30, 40, 50, 60]), 2, labels=[1])
    assert result["scores"]["brightness"] == [pytest.approx(35)]  # the second and the fifth
    assert result["provenance"]["frames"] == {"score": "mean over frames", "scored": 2, "of": 6}


def test_a_video_with_a_frame_that_has_no_score_has_none(tmp_path):
    result = score(tmp_path, clips([10, 20, 30, 250, 240], [1, 2, 3, 4, 5]), labels=[1, 1])
    assert result["scores"]["brightness"] == [None, pytest.approx(3)]
    assert result["item_errors"] == {"0": "frame 3: too bright"}


def test_a_frame_is_scored_like_the_same_image():
    rng = np.random.default_rng(0)
    videos = rng.integers(0, 200, (2, 3, 3, 4, 6), dtype=np.uint8)
    reward, seen = Brightness(), []

    def keep(images, metadata):
        seen.append(images)
        return reward.calculate_reward(images, metadata)

    score_frames(videos, {"prompts": ["a", "b"], "labels": [1, 2]}, np.arange(3), 4, keep)
    np.testing.assert_array_equal(np.concatenate(seen), videos.transpose(0, 2, 3, 4, 1).reshape(6, 4, 6, 3))


def test_what_is_offered_to_clients():
    assert scorer("tests.test_frames:Brightness").describe()["media_types"] == ["image", "video"]
    with pytest.raises(NotReady, match="reward_args.video_frames: x scores videos itself; leave it out"):
        scorer("cosmos_rl_reward.mock:MockReward", 4)
