"""The client of the reward service against a service that misbehaves."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cosmos_rl.errors import UserError
from cosmos_rl.reward.remote import RemoteScorer
from tests.support.patience import wait_until
from tests.support.reward_requests import WAIT, grey, request
from tests.support.reward_server import DROP, NOT_READY, RewardServer, result


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
    # between two requests, or in one
    in_time = {"the score did not come in time", "the service did not answer in time"}
    assert scores.reasons["a"].keys() == {0}
    assert scores.reasons["a"][0] in in_time


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
    # whether the deadline falls into a try or into the pause after it, the reason is the last error
    assert scores.values["a"].isnan().all()
    assert "(last error: ConnectError" in scores.reasons["a"][0]
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


def test_scored_media_are_let_go_before_the_next_come(start: Callable[..., RemoteScorer]) -> None:
    asked, scorer = request(), start()
    there = StorageWeakRef(asked.media.untyped_storage())
    scorer.submit(asked).result(WAIT)
    del asked
    wait_until(there.expired, "the end of the media")


def test_closing_ends_what_is_under_way(start: Callable[..., RemoteScorer], server: RewardServer) -> None:
    server.pull = lambda job, reward, tries: NOT_READY
    scorer = start()
    future = scorer.submit(request())
    scorer.close()
    assert not scorer._thread.is_alive()
    assert future.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        scorer.submit(request())
