"""What is sent to the reward service, and how its answers are read."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, RemoteRewardConfig
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.protocol import (
    Asked,
    build_reward_fn,
    list_requested_scores,
    list_terms,
    read_scores,
    request_body,
)
from cosmos_rl.reward.remote import RemoteScorer
from tests.support.reward_requests import WAIT, grey, request, table
from tests.support.reward_server import RewardServer

# ---- what is sent --------------------------------------------------------------------------------------------------


def test_a_request_is_a_line_of_json_and_a_numpy_file() -> None:
    images = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    body = request_body(images, ["a", "ü"], [{}, {}], {"ocr": 1.0})
    line, _, payload = body.partition(b"\n")
    assert line == b'{"prompts": ["a", "\\u00fc"], "reward_fn": {"ocr": 1.0}, "media_type": "image"}'
    assert payload[:8] == b"\x93NUMPY\x01\x00"
    assert payload[128:] == images.tobytes()  # a header of 128 bytes, then the array in C order


def test_the_documented_size_of_a_request_of_images() -> None:
    body = request_body(np.zeros((2, 512, 512, 3), np.uint8), ["a", "b"], [{}, {}], {"ocr": 1.0})
    assert len(body.partition(b"\n")[2]) == 1_572_992


@pytest.mark.parametrize(("fps", "expected"), [(None, 16.0), (24.0, 24.0)])
def test_videos_travel_channels_first_and_latents_as_half_precision(fps: float | None, expected: float) -> None:
    import io

    video = np.arange(2 * 5 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 5, 4, 6, 3)
    line, _, payload = request_body(video, ["a", "b"], [{}, {}], {"dance_grpo": 1.0}, fps).partition(b"\n")
    assert json.loads(line)["media_type"] == "video"
    assert json.loads(line)["video_infos"] == [{"video_fps": expected}] * 2
    sent = np.load(io.BytesIO(payload))
    assert sent.shape == (2, 3, 5, 4, 6)
    assert (sent[1, 2, 3] == video[1, 3, :, :, 2]).all()
    latents = np.linspace(-9, 9, 16 * 2 * 3 * 3, dtype=np.float32).reshape(1, 16, 2, 3, 3)
    line, _, payload = request_body(latents, ["a"], [{}], {"dance_grpo": 1.0}, fps).partition(b"\n")
    sent = np.load(io.BytesIO(payload))
    assert (json.loads(line)["media_type"], sent.dtype, sent.shape) == ("latent", np.float16, latents.shape)
    assert np.abs(sent - latents).max() < 0.01


def test_geneval_requirements_travel_with_the_request() -> None:
    rows = [
        {"tag": "counting", "include": [{"class": "cup", "count": 2}], "exclude": [{"class": "cup", "count": 3}]},
        {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]},
    ]
    images = np.zeros((2, 4, 4, 3), np.uint8)
    line = json.loads(request_body(images, ["a", "b"], rows, {"gen_eval": 1.0}).partition(b"\n")[0])
    assert line["geneval_tags"] == ["counting", "colors"]
    assert line["geneval_includes"] == [row["include"] for row in rows]
    assert line["geneval_excludes"] == [rows[0]["exclude"], []]
    with pytest.raises(UserError, match='gen_eval: the prompt "b" has no "tag"'):
        request_body(images, ["a", "b"], [rows[0], {}], {"gen_eval": 1.0})
    with pytest.raises(UserError, match='has no "include"'):
        request_body(images, ["a", "b"], [rows[0], {"tag": "x", "include": []}], {"gen_eval": 1.0})
    assert "geneval_tags" not in json.loads(request_body(images, ["a", "b"], rows, {"ocr": 1.0}).partition(b"\n")[0])


def test_penalties_are_asked_for_with_weight_1_and_weight_0_not_at_all() -> None:
    fns = [{"name": "a", "weight": 0.5}, {"name": "b", "weight": -2.0}, {"name": "c", "weight": 0.0}]
    several = RemoteRewardConfig.model_validate({"reward_fns": fns})
    assert build_reward_fn(several) == {"a": 0.5, "b": 1.0}
    assert [one and one.name for one in list_requested_scores(several)] == ["a", "b", None]
    fns[2]["measured"] = True
    several = RemoteRewardConfig.model_validate({"reward_fns": fns})
    assert build_reward_fn(several) == {"a": 0.5, "b": 1.0, "c": 1.0}
    assert [one and one.name for one in list_requested_scores(several)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("ocr", "ocr_reward"),
        ("gen_eval", "gen_eval_score"),
        ("cosmos_reason1", "no_score"),
        ("dance_grpo", "overall_reward"),
        ("pickscore", "pickscore"),
    ],
)
def test_the_usual_score_of_a_reward_needs_no_key(name: str, key: str) -> None:
    assert list_requested_scores(table(name)) == [Asked(name, name, key)]


def test_two_scores_of_one_reward_are_one_request(start: Callable[..., RemoteScorer], server: RewardServer) -> None:
    fns = [{"name": "r", "score_key": "r"}, {"name": "r", "score_key": "r+r_reward", "weight": 0.5}]
    scorer = start(reward_fns=fns)
    scores = scorer.submit(request()).result(WAIT)
    assert scores.values["r.r"].tolist() == pytest.approx(grey(2))
    assert scores.values["r.r+r_reward"].tolist() == pytest.approx([3 * g for g in grey(2)])
    assert [job.line["reward_fn"] for job in server.jobs] == [{"r": 1.0}]
    assert len(server.pulls) == 1


def test_requests_stay_within_what_the_service_takes(
    start: Callable[..., RemoteScorer], server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = torch.zeros(5, 3, 4, 4, 3, dtype=torch.uint8)  # 144 bytes each
    latents = torch.zeros(5, 16, 1, 1, 1, dtype=torch.float16)  # 32 bytes each
    monkeypatch.setattr("cosmos_rl.reward.remote._MAX_BYTES", 300)
    start(batch_size=4).submit(request(5, media=clips)).result(WAIT)
    assert sorted(len(job.array) for job in server.jobs) == [1, 2, 2]
    server.jobs.clear()
    start(batch_size=4, payload="latents").submit(request(5, media=clips, latents=latents)).result(WAIT)
    assert sorted(len(job.array) for job in server.jobs) == [1, 4]
    server.jobs.clear()
    monkeypatch.setattr(
        "cosmos_rl.reward.remote._MAX_DECODED_BYTES", 100
    )  # less than one: it is for the service to say
    start(payload="latents").submit(request(2, media=clips[:2], latents=latents[:2])).result(WAIT)
    assert [job.array.shape for job in server.jobs] == [(1, 16, 1, 1, 1)] * 2


def test_the_terms_of_a_sum_are_listed_unless_they_are_asked_for() -> None:
    assert [one.name for one in list_terms([Asked("dance_grpo", "dance_grpo", "overall_reward")])] == [
        "dance_grpo.vq_reward",
        "dance_grpo.mq_reward",
        "dance_grpo.ta_reward",
    ]
    asked = [Asked("r.a", "r", "a"), Asked("r.a+b", "r", "a+b"), Asked("s", "s", "s")]
    assert list_terms(asked) == [Asked("r.b", "r", "b", optional=True)]


def test_terms_are_shown_by_themselves_and_not_trained_on(server: RewardServer) -> None:
    rows = {"overall_reward": [3.0, 1.0], "vq_reward": [0.5, 0.5], "mq_reward": [2.0, None]}
    server.pull = lambda job, reward, tries: (200, {"scores": rows})
    job = {"type": "grpo", "use_remote_reward": True, "remote_reward": {"reward_fns": [{"name": "dance_grpo"}]}}
    rewards = make_rewards(Config.model_validate({"train": {"train_policy": job}}), None, validation=False)
    try:
        found = rewards.submit(request(2, media=torch.zeros(2, 3, 4, 4, 3, dtype=torch.uint8))).result(WAIT)
    finally:
        rewards.close()
    assert found.total_N.tolist() == [3.0, 1.0]
    assert found.reasons == {}
    assert list(found.scores) == list(rewards.names) == ["dance_grpo", *rewards.terms]
    assert found.scores["dance_grpo.vq_reward"].tolist() == [0.5, 0.5]
    assert found.scores["dance_grpo.mq_reward"].isnan().tolist() == [False, True]
    assert found.scores["dance_grpo.ta_reward"].isnan().all()  # a service that gives no such field
    assert [rewards.weights[name] for name in rewards.names] == [1.0, 0.0, 0.0, 0.0]
    assert len(server.jobs) == 1


# ---- what comes back -----------------------------------------------------------------------------------------------

ASKED = Asked("a", "a", "a")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"scores": {"a": [1, 2.5]}}, [1.0, 2.5]),
        ({"scores": {"a": [1, None]}, "item_errors": {"1": "no text in the image"}}, [1.0, "no text in the image"]),
        ({"scores": {"a": [1, None]}}, [1.0, "the service gave no score"]),
        ({"scores": {"a": [float("nan"), float("inf")]}}, ["the service gave nan", "the service gave inf"]),
        ({"scores": {"a": [1]}}, ["the service gave 1 scores for 2 samples"] * 2),
        ({"scores": {"a": 1.0}}, ["the service gave no list of scores for 2 samples"] * 2),
        ({"scores": {"a": ["Error", 1]}}, ["the service gave Error", 1.0]),
        ({"scores": None, "error": "out of memory"}, ["out of memory"] * 2),
        ({}, ["the service gave no scores and no reason"] * 2),
    ],
)
def test_what_is_no_finite_number_is_missing_with_its_reason(answer: object, expected: list[object]) -> None:
    assert read_scores(answer, ASKED, 2) == expected


def test_sums_of_keys_are_missing_with_any_part_and_a_key_with_a_plus_comes_first() -> None:
    asked = Asked("a", "a", "x+y")
    assert read_scores({"scores": {"x": [1, None], "y": [2, 3]}}, asked, 2) == [3.0, "the service gave no score"]
    assert read_scores({"scores": {"x+y": [7, 8], "x": [0, 0]}}, asked, 2) == [7.0, 8.0]


def test_a_missing_score_key_stops_the_run_and_lists_what_there_is(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    scorer = start(reward_fns=[{"name": "ocr", "score_key": "nope"}])
    with pytest.raises(UserError, match='"nope" of the reward ocr: the service gives no nope; available: ocr, ocr_rew'):
        scorer.submit(request()).result(WAIT)


def test_a_request_for_some_rewards_asks_for_no_others(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    scorer = start(reward_fns=[{"name": "a"}, {"name": "x", "score_key": "x+x_reward"}, {"name": "b", "weight": 0.5}])
    scores = scorer.submit(request(3, rewards=["a"])).result(WAIT)
    assert list(scores.values) == ["a"]
    assert scores.values["a"].tolist() == pytest.approx(grey(3))
    scores = scorer.submit(request(2, rewards=["b", "x"])).result(WAIT)
    assert list(scores.values) == ["x", "b", "x.x", "x.x_reward"]  # with the terms of the sum
    assert [job.line["reward_fn"] for job in server.jobs] == [{"a": 1.0}, {"x": 1.0, "b": 0.5}]
    assert [len(job.line["prompts"]) for job in server.jobs] == [3, 2]
