"""Layouts, ranges and prompts that are read right or refused with a reason."""

import numpy as np
import pytest
import torch

from cosmos_rl_reward.handler import BadInput
from cosmos_rl_reward.rewards.samples import (
    SampleError,
    as_frames,
    as_images,
    as_videos,
    get_frame_rate,
    get_per_sample,
    score_samples,
)

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "given",
    [
        IMAGES,
        IMAGES.transpose(0, 3, 1, 2),
        torch.from_numpy(IMAGES),
        torch.from_numpy(IMAGES).permute(0, 3, 1, 2),
    ],
)
def test_one_image_in_every_layout(given):
    found = as_images(given)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, IMAGES)


def test_an_ambiguous_shape_is_read_as_documented():
    cube = np.arange(27, dtype=np.uint8).reshape(1, 3, 3, 3)
    np.testing.assert_array_equal(as_images(cube), cube)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (IMAGES[0], "shape"),
        (IMAGES[..., :2], "shape"),
        (IMAGES[:0], "no image"),
        (IMAGES / 255, "dtype float64"),
        (IMAGES > 9, "dtype bool"),
    ],
)
def test_what_is_no_image_is_refused(given, reason):
    with pytest.raises(BadInput, match=reason):
        as_images(given)


def test_videos_and_frames():
    video = np.stack([IMAGES] * 2).transpose(0, 4, 1, 2, 3)  # [2, 3, 2, 5, 7]
    np.testing.assert_array_equal(as_videos(video), video)
    np.testing.assert_array_equal(as_frames(video)[1], IMAGES)
    np.testing.assert_array_equal(as_frames(IMAGES)[:, 0], IMAGES)
    with pytest.raises(BadInput, match=r"\[B, 3, T, H, W\]"):
        as_videos(video.transpose(0, 2, 1, 3, 4))


def test_prompts_and_frame_rates():
    assert get_per_sample({"prompts": ["a", "b"]}, "prompts", 2) == ["a", "b"]
    for wrong, reason in [({}, "expected a list"), ({"prompts": ["a"]}, "1 entries for 2 samples")]:
        with pytest.raises(BadInput, match=f"metadata.prompts: {reason}"):
            get_per_sample(wrong, "prompts", 2)
    assert get_frame_rate([{"video_fps": 16}], 0) == 16.0
    with pytest.raises(SampleError, match=r"video_infos\[1\].video_fps is missing"):
        get_frame_rate([{"video_fps": 16}, {}], 1)


def test_one_failing_sample_costs_one_score():
    def score(index):
        if index == 1:
            raise SampleError("no target")
        if index == 2:
            raise ZeroDivisionError("broken")
        return {"a": index}

    result = score_samples(("a",), 4, score)
    assert result["scores"] == {"a": [0, None, None, 3]}
    assert result["item_errors"] == {1: "no target", 2: "ZeroDivisionError: broken"}


def test_a_fault_of_every_sample_is_raised_so_that_it_is_tried_again():
    with pytest.raises(ZeroDivisionError):
        score_samples(("a",), 2, lambda index: {"a": 1 / 0})
