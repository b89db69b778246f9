"""Functions that score samples: how they are called, what their errors do, and those that we bring."""

import functools
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cosmos_rl.errors import UserError
from cosmos_rl.reward import batch_reward, examples
from cosmos_rl.reward.functions import build_given_rewards
from cosmos_rl.reward.table import ScoringRequest
from tests.support.paths import ROOT
from tests.support.scored import WAIT, request, score

# ---- functions -------------------------------------------------------------------------------------------------------


def test_a_function_gets_the_keywords_that_it_takes(rewards_of: Callable[..., Any]) -> None:
    calls: dict[str, Any] = {}

    def documented(to_be_evaluated, reference=None, **kw):
        calls["documented"] = (to_be_evaluated.dtype, to_be_evaluated.shape, reference, kw)
        return 1

    def image_only(image):
        return float(image[..., 0].mean())

    def some(image, *, prompt, fps=5):
        calls["some"] = (prompt, fps)
        return 2

    class Judge:
        def __call__(self, image, metadata):
            return metadata["level"]

    metadata = [{"level": k, "reference": f"r{k}"} for k in range(3)]
    found = score(rewards_of([documented, image_only, some, Judge()]), request(3, metadata, frames=2))
    assert calls["documented"] == (
        np.uint8,
        (2, 4, 6, 3),
        "r2",
        {"prompt": "p2", "metadata": metadata[2], "fps": 12.0},
    )
    assert calls["some"] == ("p2", 12.0)
    assert found.scores["image_only"].tolist() == [0.0, 1.0, 2.0]
    assert found.scores["Judge"].tolist() == [0.0, 1.0, 2.0]
    assert found.total_N.tolist() == [3.0, 5.0, 5.0]  # 1 + 1 + 2 + 1 = 5, and 7 is cut


def test_functions_come_with_weights_and_names(rewards_of: Callable[..., Any]) -> None:
    def one(image):
        return 1.0

    rewards = rewards_of({"x": one, "y": (one, -0.5), "z": (functools.partial(one), 0.0)}, {"scale": 2.0})
    assert rewards.names == ("x", "y", "z")
    assert score(rewards).total_N.tolist() == [1.0] * 3
    assert [(r.name, r.weight) for r in build_given_rewards([(one, 2.0)])] == [("one", 2.0)]


def test_a_batch_function_is_called_with_at_most_so_many_samples(rewards_of: Callable[..., Any]) -> None:
    sizes = []

    @batch_reward
    def many(media, prompts, metadata, fps):
        sizes.append((len(media), list(prompts), len(metadata), fps))
        return torch.from_numpy(media[:, 0, 0, 0].astype(np.float32))

    found = score(rewards_of([functools.partial(many)], {"batch_size": 2}), request(5))
    assert sizes == [(2, ["p0", "p1"], 2, None), (2, ["p2", "p3"], 2, None), (1, ["p4"], 1, None)]
    assert found.total_N.tolist() == [0, 1, 2, 3, 4]


def test_what_is_no_finite_number_is_missing(rewards_of: Callable[..., Any]) -> None:
    @batch_reward
    def many(media, prompts):
        return [None, np.float32("nan"), float("inf"), True, torch.tensor([0.5])]

    def half(image):
        return None if image.max() else np.float64(3)

    found = score(rewards_of([many, (half, 0.0)]), request(5))
    assert found.total_N.tolist()[3:] == [1.0, 0.5]
    assert found.reasons == {
        0: "many: the function gave None",
        1: "many: the function gave nan",
        2: "many: the function gave inf",
    }
    assert found.missing_N.tolist() == [True, True, True, False, False]  # not by the one of weight 0
    assert torch.isnan(found.scores["half"]).tolist() == [False, True, True, True, True]


def test_the_media_are_gone_before_the_scores_are_there(rewards_of: Callable[..., Any]) -> None:
    rewards, asked, held = rewards_of([lambda image: 1.0]), request(3), []
    media = StorageWeakRef(asked.media.untyped_storage())
    future = rewards.submit(asked)
    del asked
    future.add_done_callback(lambda _: held.append(not media.expired()))  # runs before whoever waits can look
    future.result(timeout=60)
    assert held == [False]


def test_an_error_for_one_sample_is_a_missing_score(
    rewards_of: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def fragile(image):
        if image[0, 0, 0] == 1:
            raise ValueError("no face")
        return 1.0

    found = score(rewards_of([fragile]))
    assert found.missing_N.tolist() == [False, True, False]
    assert found.reasons[1].startswith("fragile: ValueError: no face (test_reward_functions.py, line ")
    assert "in fragile" in capsys.readouterr().out  # the traceback, once


def test_an_error_of_a_batch_function_is_missing_for_its_batch(rewards_of: Callable[..., Any]) -> None:
    @batch_reward
    def many(media):
        if media[0, 0, 0, 0] == 2:
            raise RuntimeError("out of memory")
        return [1.0] * len(media)

    found = score(rewards_of([many], {"batch_size": 2}), request(5))
    assert found.missing_N.tolist() == [False, False, True, True, False]


def test_a_function_that_never_worked_and_looks_broken_stops_the_run(rewards_of: Callable[..., Any]) -> None:
    def broken(image):
        return image.nope

    rewards = rewards_of([broken])
    for _ in range(2):
        with pytest.raises(UserError, match=r"broken: the function cannot be used: Attri.*_functions.py, line"):
            score(rewards)


def test_the_same_error_later_is_a_missing_score(rewards_of: Callable[..., Any]) -> None:
    def sometimes(image):
        return 1.0 if image.max() == 0 else image.nope

    assert score(rewards_of([sometimes])).missing_N.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("result", "message"),
    [("1.0", "gave str '1.0', not a number"), ([1, 2], r"gave list \[1, 2\], not a"), (1j, "gave complex 1j, not a n")],
)
def test_a_result_that_is_no_number_stops_the_run(rewards_of: Callable[..., Any], result: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(rewards_of([lambda image: result]))


def test_a_wrong_number_of_scores_stops_the_run(rewards_of: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="gave 2 scores for 3 samples"):
        score(rewards_of([batch_reward(lambda media: [1, 2])]))
    with pytest.raises(UserError, match="gave float 1.0 for 3 samples, not 3 scores"):
        score(rewards_of([batch_reward(lambda media: 1.0)]))


def test_a_function_may_write_into_its_image(rewards_of: Callable[..., Any]) -> None:
    def scribble(image):
        image[:] = 255
        return 1.0

    asked = request()
    found = score(rewards_of([scribble, examples.brightness]), asked)
    assert asked.media[0].max() == 0
    assert found.scores["brightness"][0] == 0


def test_a_function_that_never_returns_ends_the_run_after_its_time(rewards_of: Callable[..., Any]) -> None:
    block = threading.Event()
    rewards = rewards_of([lambda image: block.wait()], {"timeout_s": 0.2})
    with pytest.raises(UserError, match=r"has not returned after 0.2 s \(train.train_policy.local_reward.timeout_s\)"):
        score(rewards)
    with pytest.raises(UserError, match="has not returned"):  # at once: the function is still in there
        score(rewards)
    rewards.close()
    block.set()


def test_submit_returns_at_once_and_closing_fails_what_waits(rewards_of: Callable[..., Any]) -> None:
    inside, go = threading.Event(), threading.Event()

    def slow(image):
        inside.set()
        return float(go.wait(WAIT))

    rewards = rewards_of([slow])
    first, second = rewards.submit(request(1)), rewards.submit(request(1))
    assert isinstance(first, Future)
    assert inside.wait(WAIT)
    assert not first.done()
    closing = threading.Thread(target=rewards.close)
    closing.start()
    assert rewards._scorers[0]._closed.wait(WAIT)
    go.set()
    closing.join(WAIT)
    assert first.result(WAIT).total_N.tolist() == [1.0]
    with pytest.raises(RuntimeError, match="closed"):
        second.result(WAIT)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 1, "takes no positional argument"),
        (lambda image, tokenizer: 1, 'needs "tokenizer", which is not known; after the media it may take reference'),
        (lambda media, prompts: 1, "or mark it with cosmos_rl.reward.batch_reward"),
        (batch_reward(lambda media, prompt: 1), "it may take prompts, metadata, fps$"),
        (3, "3 is not a function"),
        ((examples.ink, "1"), "found the weight '1'"),
        ((examples.ink, 1.0, 2.0), "a function or a pair"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(
    rewards_of: Callable[..., Any], function: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rewards_of([function])


def test_parts_of_a_request_that_do_not_fit_are_refused() -> None:
    good = request(2)
    for media in (good.media.float(), good.media.movedim(-1, 1), good.media[:0], good.media[0]):
        with pytest.raises(ValueError, match="not uint8"):
            ScoringRequest(media, good.prompts, good.metadata, good.sample_ids)
    with pytest.raises(ValueError, match="2 samples with 3 prompts"):
        ScoringRequest(good.media, ["a"] * 3, good.metadata, good.sample_ids)


def test_the_functions_of_the_page_score(rewards_of: Callable[..., Any]) -> None:
    page = (ROOT / "docs" / "rewards.md").read_text()
    shown: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(block, shown)
    found = score(rewards_of([shown["green"], (shown["red"], 255.0)]))
    assert found.total_N.tolist() == pytest.approx([0.0, 1.0, 2.0])


# ---- the examples ----------------------------------------------------------------------------------------------------


def plain(*colour: int) -> np.ndarray:
    return np.broadcast_to(np.array(colour, np.uint8), (16, 16, 3)).copy()


def test_the_examples_by_hand() -> None:
    white, black, red = plain(255, 255, 255), plain(0, 0, 0), plain(255, 0, 0)
    half = np.concatenate([white[:8], black[:8]])
    assert examples.brightness(half) == pytest.approx(0.5)
    assert examples.darkness(red) == pytest.approx(1 - 0.299)
    assert examples.ink(half) == 0.5
    assert examples.sharpness(half) == pytest.approx((1 / 15 + 0) / 2)  # one edge of 15 between rows, none in rows
    assert examples.sharpness(plain(9, 9, 9)[:1, :1]) == 0.0
    assert examples.colourfulness(half) == 0.0
    assert examples.colourfulness(red) == pytest.approx(0.3 * np.hypot(255, 127.5) / 100)
    assert examples.jpeg_incompressibility(plain(128, 128, 128)) == 0.0


def test_noise_is_less_compressible_than_a_gradient_at_any_size() -> None:
    rng = np.random.default_rng(0)
    for size in (16, 128):
        noise = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
        gradient = np.broadcast_to(np.linspace(0, 255, size, dtype=np.uint8)[:, None], (size, size, 3)).copy(order="C")
        gradient[..., 1] = 0
        assert examples.jpeg_incompressibility(noise) > 4 > 2 > examples.jpeg_incompressibility(gradient) > 0
        assert examples.jpeg_compressibility(noise) == -examples.jpeg_incompressibility(noise)


@pytest.mark.parametrize(
    "function",
    [
        examples.brightness,
        examples.darkness,
        examples.ink,
        examples.sharpness,
        examples.colourfulness,
        examples.jpeg_compressibility,
        examples.jpeg_incompressibility,
    ],
)
def test_a_video_is_the_mean_over_its_frames(function: Callable[[np.ndarray], float]) -> None:
    frames = np.random.default_rng(1).integers(0, 256, (3, 8, 10, 3), dtype=np.uint8)
    frames[1] //= 3
    assert function(frames) == pytest.approx(np.mean([function(frame) for frame in frames]))
