"""The client of the reward service against a service that misbehaves."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, RemoteRewardConfig
from cosmos_rl.reward import access
from cosmos_rl.reward.access import find_missing_access, read_service_access
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.protocol import Asked, build_reward_fn, list_requested_scores, read_scores, request_body
from cosmos_rl.reward.remote import RemoteScorer
from cosmos_rl.reward.table import RewardTable, ScoringRequest
from tests.support.reward_server import DROP, NOT_READY, RewardServer, result

WAIT = 60.0


def table(*names: str, **keys: object) -> RemoteRewardConfig:
    fns = [{"name": name} for name in names or ("a",)]
    return RemoteRewardConfig.model_validate({"reward_fns": fns, **keys})


def request(count: int = 2, size: int = 4, **fields: object) -> ScoringRequest:
    """Sample k is an image of the grey k + 1."""
    media = torch.arange(1, count + 1, dtype=torch.uint8)[:, None, None, None].expand(count, size, size, 3)
    values = {"prompts": [f"p{k}" for k in range(count)], "metadata": [{}] * count, "sample_ids": range(count)}
    return ScoringRequest(**{"media": media.contiguous(), **values, **fields})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    for name in ("TOKEN", "ENQUEUE_URL", "FETCH_URL"):
        for generation in ("REMOTE_REWARD", "WFM_REWARD", "DIFFUSION_REWARD"):
            monkeypatch.delenv(f"{generation}_{name}", raising=False)
    made = RewardServer()
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", f"{made.url}/enqueue")
    monkeypatch.setenv("REMOTE_REWARD_FETCH_URL", f"{made.url}/pull")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", "s3cret")
    yield made
    made.close()


@pytest.fixture
def start(server: RewardServer) -> Iterator[Callable[..., RemoteScorer]]:
    started: list[RemoteScorer] = []

    def make(*names: str, **keys: object) -> RemoteScorer:
        started.append(RemoteScorer(table(*names, **keys)))
        return started[-1]

    yield make
    for scorer in started:
        scorer.close()


def grey(count: int) -> list[float]:
    return [(k + 1) / 255 for k in range(count)]


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


# ---- the conversation ----------------------------------------------------------------------------------------------


def test_scores_of_all_rewards_come_back_in_the_order_of_the_samples(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    scorer = start("a", "b", batch_size=2)
    scores = scorer.submit(request(5)).result(WAIT)
    assert scores.values["a"].tolist() == pytest.approx(grey(5))
    assert scores.values["b"].tolist() == pytest.approx(grey(5))
    assert sorted(len(job.array) for job in server.jobs) == [1, 2, 2]
    by_first = {job.line["prompts"][0]: job for job in server.jobs}
    assert by_first["p2"].line["prompts"] == ["p2", "p3"]
    assert by_first["p2"].array[:, 0, 0, 0].tolist() == [3, 4]


def test_a_hundred_samples_with_48_in_a_request_are_three_requests(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    start(batch_size=48).submit(request(100)).result(WAIT)
    assert sorted(len(job.array) for job in server.jobs) == [4, 48, 48]


def test_the_token_and_the_replica_go_with_every_pull(
    start: Callable[..., RemoteScorer], server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.extra = {"replica_id": "r7"}
    start().submit(request()).result(WAIT)
    monkeypatch.setenv("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA", "1")
    start().submit(request()).result(WAIT)
    (first, second) = (headers for _, headers in server.pulls)
    assert first["authorization"] == second["authorization"] == "Bearer s3cret"
    assert first["x-lepton-replica-target"] == "r7"
    assert "x-lepton-replica-target" not in second
    assert server.pulls[0][0] == {"uuid": "u1", "type": "a"}  # nothing that an old service would not know
    assert server.jobs[0].headers["content-type"] == "application/octet-stream"


def test_without_a_token_there_is_no_authorisation(
    start: Callable[..., RemoteScorer], server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REMOTE_REWARD_TOKEN")
    start().submit(request()).result(WAIT)
    assert "authorization" not in server.jobs[0].headers


def test_not_ready_is_asked_again_and_rewards_are_asked_side_by_side(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    ready = threading.Event()

    def pull(job, reward, tries):
        if reward == "b" and tries == 3:
            ready.set()  # the slow one has been asked three times while the other was not ready
        return (200, result(job, reward)) if ready.is_set() else NOT_READY

    server.pull = pull
    scores = start("a", "b").submit(request()).result(WAIT)
    assert scores.values["a"].tolist() == pytest.approx(grey(2))


def test_a_service_that_can_wait_is_asked_to(start: Callable[..., RemoteScorer], server: RewardServer) -> None:
    server.headers = {"X-Job-State": "running"}
    server.pull = lambda job, reward, tries: (200, result(job, reward)) if tries > 2 else NOT_READY
    start(timeout_s=9.0).submit(request()).result(WAIT)
    assert all(0 < float(form["wait"]) <= 9.0 for form, _ in server.pulls)
    assert len(server.pulls) == 3


def test_an_answer_that_is_lost_is_asked_for_again_with_the_same_key(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    server.take = lambda number, headers: DROP if number == 1 else (503, {"detail": "busy"}) if number == 2 else None
    keys = []
    inner = server.take
    server.take = lambda number, headers: keys.append(headers["idempotency-key"]) or inner(number, headers)
    server.pull = lambda job, reward, tries: [None, (502, b"<html>"), (200, b"{half"), (200, result(job, reward))][
        min(tries, 4) - 1
    ]
    scores = start().submit(request()).result(WAIT)
    assert scores.values["a"].tolist() == pytest.approx(grey(2))
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_a_pause_that_the_service_asks_for_is_kept(start: Callable[..., RemoteScorer], server: RewardServer) -> None:
    import time

    times = []
    server.take = lambda number, headers: (
        times.append(time.monotonic()) or ((429, {"detail": "full"}, {"Retry-After": "1"}) if number == 1 else None)
    )
    start().submit(request()).result(WAIT)
    assert times[1] - times[0] >= 1.0


def test_a_request_that_the_service_forgot_is_sent_again(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    server.pull = lambda job, reward, tries: (
        (404, {"error": "Unknown uuid: u1"}) if job.number == 1 and reward == "b" else (200, result(job, reward))
    )
    scores = start("a", "b").submit(request()).result(WAIT)
    assert scores.values["b"].tolist() == pytest.approx(grey(2))
    assert [(form["uuid"], form["type"]) for form, _ in server.pulls if form["type"] == "a"] == [("u1", "a")]
    assert len(server.jobs) == 2


def test_a_request_that_is_always_forgotten_is_missing(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    server.pull = lambda job, reward, tries: (404, {"error": "Unknown uuid"})
    scores = start().submit(request()).result(WAIT)
    assert len(server.jobs) == 3
    assert "does not know the request any more: 404 Unknown uuid" in scores.reasons["a"][0]


def test_one_that_is_never_ready_does_not_hold_up_the_next(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    server.pull = lambda job, reward, tries: NOT_READY if job.line["prompts"] == ["p0"] else (200, result(job, reward))
    scorer = start(batch_size=1, timeout_s=2.0)
    first, second = scorer.submit(request(1)), scorer.submit(request(2, prompts=["p1", "p2"]))
    assert second.result(WAIT).values["a"].tolist() == pytest.approx(grey(2))
    assert not first.done()
    scores = first.result(WAIT)
    assert torch.isnan(scores.values["a"]).all()
    assert scores.reasons == {"a": {0: "the score did not come in time"}}


def test_the_scores_that_came_count_when_another_reward_does_not(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    server.pull = lambda job, reward, tries: NOT_READY if reward == "b" else (200, result(job, reward))
    scores = start("a", "b", timeout_s=1.0).submit(request()).result(WAIT)
    assert scores.values["a"].tolist() == pytest.approx(grey(2))
    assert set(scores.reasons["b"]) == {0, 1}


def test_a_failed_request_is_missing_with_the_workers_words(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    server.pull = lambda job, reward, tries: (200, {"scores": None, "error": "CUDA out of memory", "type": reward})
    assert start().submit(request()).result(WAIT).reasons == {"a": dict.fromkeys((0, 1), "CUDA out of memory")}
    server.pull = lambda job, reward, tries: (400, {"message": "worker lost"}, {"X-Job-State": "failed"})
    scores = start().submit(request()).result(WAIT)
    assert scores.reasons["a"][1] == "the service has ended the request: worker lost"


@pytest.mark.parametrize(
    ("status", "said", "message"),
    [
        (401, {"detail": "bad token"}, "REMOTE_REWARD_TOKEN: the reward service refuses the token: 401 bad token"),
        (403, {}, "REMOTE_REWARD_TOKEN"),
        (422, {"detail": [{"loc": "prompts"}]}, r'\(REMOTE_REWARD_ENQUEUE_URL\) refuses the request: 422 \[{"loc"'),
        (400, {"error": "unknown reward 'a'; enabled: ocr"}, "refuses the request: 400 unknown reward 'a'; enabled: o"),
        (413, {}, "batch_size: a request is too large"),
        (404, {"detail": "Not Found"}, "REMOTE_REWARD_ENQUEUE_URL: there is no such address .* 404 Not Found"),
        (307, b"", "REMOTE_REWARD_ENQUEUE_URL: there is no such address"),
    ],
)
def test_what_no_further_try_would_change_stops_at_once(
    start: Callable[..., RemoteScorer], server: RewardServer, status: int, said: Any, message: str
) -> None:
    server.take = lambda number, headers: (status, said)
    scorer = start(batch_size=1, max_in_flight=1)
    with pytest.raises(UserError, match=message):
        scorer.submit(request(4)).result(WAIT)
    assert server.enqueued == 1
    with pytest.raises(UserError, match=message):  # neither do the next ones go out
        scorer.submit(request(1)).result(WAIT)
    assert server.enqueued == 1


def test_a_pull_that_is_refused_stops_while_another_reward_waits(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    server.pull = lambda job, reward, tries: (401, {"detail": "expired"}) if reward == "b" else NOT_READY
    with pytest.raises(UserError, match="REMOTE_REWARD_TOKEN.*401 expired"):
        start("a", "b").submit(request()).result(WAIT)


def test_five_requests_without_a_result_in_a_row_stop_the_run(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    server.pull = lambda job, reward, tries: (400, {"message": "gone"}, {"X-Job-State": "cancelled"})
    scorer = start(batch_size=1, max_in_flight=1)
    scorer.submit(request(4)).result(WAIT)
    server.pull = lambda job, reward, tries: (200, {"scores": None, "error": "a reason"})  # an answer, if a bad one
    scorer.submit(request(1)).result(WAIT)
    server.pull = lambda job, reward, tries: (400, {"message": "gone"}, {"X-Job-State": "cancelled"})
    scorer.submit(request(4)).result(WAIT)
    with pytest.raises(UserError, match="no result for 5 requests in a row, the last error: .*gone; is it running"):
        scorer.submit(request(1)).result(WAIT)


def test_a_service_that_is_not_there_is_missing_after_the_deadline(
    start: Callable[..., RemoteScorer],
    server: RewardServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", "http://127.0.0.1:9/enqueue")  # the discard port: nobody listens
    scores = start(timeout_s=1.0).submit(request()).result(WAIT)
    assert "cannot be reached (last error: ConnectError" in scores.reasons["a"][0]
    assert "reward service: ConnectError" in capsys.readouterr().out


def test_a_slow_reader_gets_it_all(start: Callable[..., RemoteScorer], server: RewardServer) -> None:
    server.bytes_per_s = 4e6
    scorer = start(batch_size=1)
    small, large = scorer.submit(request(1, 8)), scorer.submit(request(2, 512))
    assert small.result(WAIT).values["a"].tolist() == pytest.approx(grey(1))
    assert large.result(WAIT).values["a"].tolist() == pytest.approx(grey(2))


def test_submit_returns_before_anything_is_read_or_sent(
    start: Callable[..., RemoteScorer], server: RewardServer
) -> None:
    """Neither the array nor the network is touched by the caller's thread: both wait for a lock that it holds."""
    callers = threading.RLock()
    seen: list[int] = []

    class Media(torch.Tensor):
        def numpy(self, *args, **kwargs):
            seen.append(threading.get_ident())
            with callers:
                return super().numpy(*args, **kwargs)

    asked = request(2)
    object.__setattr__(asked, "media", asked.media.as_subclass(Media))
    with callers:
        future = start().submit(asked)
        assert isinstance(future, Future)
        assert not server.jobs
    future.result(WAIT)
    assert seen
    assert threading.get_ident() not in seen


def test_closing_ends_what_is_under_way(start: Callable[..., RemoteScorer], server: RewardServer) -> None:
    server.pull = lambda job, reward, tries: NOT_READY
    scorer = start()
    future = scorer.submit(request())
    scorer.close()
    assert not scorer._thread.is_alive()
    assert future.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        scorer.submit(request())


# ---- the environment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generation", "expected"), [("REMOTE_REWARD", 0), ("WFM_REWARD", 3), ("DIFFUSION_REWARD", 3)])
def test_three_generations_of_names_are_read(
    server: RewardServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    generation: str,
    expected: int,
) -> None:
    monkeypatch.setattr(access, "_told", set())
    values = {"ENQUEUE_URL": "http://h/enqueue", "FETCH_URL": "http://h/pull", "TOKEN": "t"}
    for name, value in values.items():
        monkeypatch.delenv(f"REMOTE_REWARD_{name}")
        monkeypatch.setenv(f"{generation}_{name}", value)
    for _ in range(2):
        found = read_service_access()
    assert (found.enqueue_url, found.fetch_url, found.token) == tuple(values.values())
    assert capsys.readouterr().out.count("is the name of an older version") == expected
    assert found.names["TOKEN"] == f"{generation}_TOKEN"


def test_the_newest_name_wins(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSION_REWARD_TOKEN", "oldest")
    monkeypatch.setenv("WFM_REWARD_TOKEN", "older")
    assert read_service_access().token == "s3cret"
    monkeypatch.delenv("REMOTE_REWARD_TOKEN")
    assert read_service_access().token == "older"


def test_secrets_are_in_no_text(
    server: RewardServer,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., RemoteScorer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", "ftp://user:pa55word@host/x")
    with pytest.raises(UserError) as caught:
        read_service_access()
    assert "REMOTE_REWARD_ENQUEUE_URL: is not an address" in str(caught.value)
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", server.url.replace("//", "//user:pa55word@") + "/enqueue")
    server.take = lambda number, headers: (401, {"detail": "no"})
    with pytest.raises(UserError) as refused:
        start().submit(request()).result(WAIT)
    text = f"{caught.value} {refused.value} {read_service_access()} {capsys.readouterr().out}"
    assert "pa55word" not in text
    assert "s3cret" not in text


def test_the_time_for_an_upload_grows_with_its_size_within_bounds(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [read_service_access().upload_s(mib * 2**20) for mib in (0, 10, 50, 1000)] == [60.0, 60.0, 180.0, 600.0]
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_TIMEOUT_MAX_S", "100")
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S", "fast")
    assert read_service_access().upload_s(50 * 2**20) == 100.0
    assert 'REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S: found "fast"' in capsys.readouterr().out
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_TIMEOUT_S", "7")
    assert read_service_access().upload_s(50 * 2**20) == 7.0


RL = {"type": "grpo", "use_remote_reward": True}


def test_a_missing_address_is_named_before_anything_starts(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.from_dict({"train": {"train_policy": RL}})
    assert find_missing_access(config) == []
    monkeypatch.delenv("REMOTE_REWARD_FETCH_URL")
    [line] = find_missing_access(config)
    assert line.startswith("REMOTE_REWARD_FETCH_URL: missing in the environment")
    with pytest.raises(UserError, match="REMOTE_REWARD_FETCH_URL: missing"):
        make_rewards(config, None, validation=False)
    for without in ({**RL, "bypass_reward": True}, {"type": "grpo"}, {"type": "sft"}):
        assert find_missing_access(Config.from_dict({"train": {"train_policy": without}})) == []
    only_validation = {"enable": True, "remote_reward": {"batch_size": 2}}
    config = Config.from_dict({"train": {"train_policy": {"type": "grpo"}}, "validation": only_validation})
    assert len(find_missing_access(config)) == 1


# ---- together with the other rewards -------------------------------------------------------------------------------


def test_remote_and_local_rewards_add_up(server: RewardServer) -> None:
    job = {**RL, "remote_reward": {"scale": 2.0, "reward_fns": [{"name": "a", "weight": -3.0}]}}
    rewards = make_rewards(Config.from_dict({"train": {"train_policy": job}}), [lambda image: 0.25], validation=False)
    found: RewardTable = rewards.submit(request()).result(WAIT)
    assert found.total_N.tolist() == pytest.approx([0.25 - 6 * g for g in grey(2)])
    assert set(rewards.names) == set(found.scores) == {"<lambda>", "a"}
    server.pull = lambda job, reward, tries: (200, {"scores": {"a": [0.5, None]}, "item_errors": {"1": "no face"}})
    found = rewards.submit(request()).result(WAIT)
    assert found.missing_N.tolist() == [False, True]
    assert found.reasons == {1: "a: no face"}
    server.pull = lambda job, reward, tries: NOT_READY
    future = rewards.submit(request())
    rewards.close()
    with pytest.raises(RuntimeError, match="closed"):
        future.result(WAIT)


def test_wide_scores_get_a_wide_clip_and_a_word(server: RewardServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.pull = lambda job, reward, tries: (200, {"scores": {"hpsv3": [10.9, 7.1]}})
    scorer = RemoteScorer(table("hpsv3"))
    scorer.close()
    assert (scorer.sum.rewards[0].clip_min, scorer.sum.rewards[0].clip_max) == (-15.0, 15.0)
    assert "reward hpsv3: its scores are wide" in capsys.readouterr().out
