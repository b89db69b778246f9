"""The front's checks on arrival, in memory: limits, tokens, states, broken clients."""

import asyncio
import errno
import json
import os

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_reward.config import build
from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.front.auth import Auth
from cosmos_rl_reward.front.reconciler import Reconciler
from cosmos_rl_reward.results import encode
from cosmos_rl_reward.spool import Spool, Upload
from tests.fronts import front_in_memory
from tests.service import body, image, npy


def run(folder, test, **config):
    """Run an asynchronous test against a front in memory."""

    async def inside():
        async with front_in_memory(folder, **config).run() as front:
            return await test(front)

    return asyncio.run(inside())


def spooled(folder):
    return list(Spool(folder / "spool").open_jobs())


def test_accepted_means_on_disk_and_queued(tmp_path):
    async def test(front):
        answer = await front.enqueue(body(image(), "a", reward_fn={"a": 1, "b": 0.5}))
        assert answer.content == b'{"uuid":"%s"}' % answer.json()["uuid"].encode()
        return answer.json()["uuid"], front.queue.jobs

    job, queued = run(tmp_path, test)
    assert queued == {"a": [job], "b": [job]}
    assert [(j.id, j.rewards, j.media) for j in spooled(tmp_path)] == [(job, ("a", "b"), "image")]
    assert os.listdir(tmp_path / "spool" / "incoming") == []


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (b"", 400, "no newline"),
        (b'{"a": 1}', 400, "no newline"),
        (b"x" * (1 << 20) + b"xx", 413, "no newline within"),
        (b'{"reward_fn": {"c": 1}, "prompts": ["x"]}\n', 400, "'c' is not a reward of this service; enabled are a, b"),
        (b'{"reward_fn": {"a": 0, "b": -1}, "prompts": ["x"]}\n', 400, "no reward has a weight above 0"),
        (body(image(count=2), "a", prompts=["1", "2", "3"]), 400, "prompts: has 3 entries, but the payload has 2"),
        (body(image(), "a", geneval_tags=["x", "y"]), 400, "geneval_tags: has 2 entries"),
        (body(image(), "a", media_type="video"), 400, "videos must be"),
        (body(image(count=9), "a"), 413, "max_items"),
        (body(image(side=60), "a"), 413, "pixels"),
        (body(image(side=200), "a"), 413, "max_body_bytes"),
        (body(np.zeros((1, 48, 1, 2, 2), np.float16), "a", media_type="latent"), 400, "wan2pt2_model_path"),
    ],
)
def test_rejected_on_arrival(tmp_path, content, status, reason):
    async def test(front):
        sent = await front.enqueue(content)

        async def slowly():
            for i in range(0, len(content), 50_000):
                yield content[i : i + 50_000]

        streamed = await front.enqueue(slowly())
        assert (streamed.status_code, streamed.json()) == (sent.status_code, sent.json())
        return sent

    answer = run(
        tmp_path, test, max_items=8, max_pixels=3000, max_body_bytes=110_000 + (1 << 20) * (content[:1] == b"x")
    )
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["message"]
    assert spooled(tmp_path) == []
    assert os.listdir(tmp_path / "spool" / "incoming") == []


def test_what_a_reward_asks_for_is_checked_once_it_has_told(tmp_path):
    async def test(front):
        front.bus.set("a", "ready", media_types=["image"], required_metadata=["geneval_tags"])
        await Reconciler(front.front.tracker).refresh()
        video = await front.enqueue(body(np.zeros((1, 3, 1, 4, 4), np.uint8), "a", media_type="video"))
        missing = await front.enqueue(body(image(), "a"))
        good = await front.enqueue(body(image(), "a", geneval_tags=["counting"]))
        return video.json()["message"], missing.json()["message"], good.status_code

    video, missing, good = run(tmp_path, test)
    assert video == "reward a scores image, not video"
    assert missing == "metadata.geneval_tags: needed by reward a"
    assert good == 200


def test_over_the_limit_is_429_and_what_was_taken_stays(tmp_path):
    async def test(front):
        answers = await asyncio.gather(*(front.enqueue(body(image(), "a")) for _ in range(200)))
        other = await front.enqueue(body(image(), "b"))
        return answers, other

    answers, other = run(tmp_path, test, max_queued_jobs=100)
    taken = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(taken) + len(refused) == 200
    assert refused
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    assert {job.id for job in spooled(tmp_path) if "a" in job.rewards} == {a.json()["uuid"] for a in taken}
    assert len(taken) <= 100
    assert other.status_code == 200


def test_bytes_and_disk_have_limits_too(tmp_path):
    full = run(tmp_path / "a", lambda front: front.enqueue(body(image(), "a")), max_spool_bytes=4000)
    assert full.status_code == 429
    disk = run(tmp_path / "b", lambda front: front.enqueue(body(image(), "a")), min_free_bytes=1 << 60)
    assert disk.status_code == 507
    assert disk.json()["message"] == "the disk of the service is full"


@pytest.mark.parametrize("where", ["flush", "seal"])
def test_a_full_disk_refuses_and_leaves_nothing(tmp_path, monkeypatch, where):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def test(front):
        with monkeypatch.context() as patch:
            patch.setattr(Upload, where, no_space)
            answer = await front.enqueue(body(image(), "a"))
        return answer, await front.enqueue(body(image(), "a"))

    full, after = run(tmp_path, test)
    assert full.status_code == 507
    assert full.json()["message"] == "the service cannot store the job: No space left on device"
    assert after.status_code == 200
    assert os.listdir(tmp_path / "spool" / "incoming") == []


def test_a_stalled_and_a_half_sent_body_leave_nothing(tmp_path):
    async def test(front):
        async def stalls():
            yield body(image(), "a")[:300]
            await asyncio.sleep(3)

        stalled = await front.enqueue(stalls())

        messages = [{"type": "http.request", "body": body(image(), "a")[:300], "more_body": True}]
        messages.append({"type": "http.disconnect"})
        sent = []

        async def receive():
            return messages.pop(0)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/api/reward/enqueue", "headers": [], "query_string": b""}
        await front.app({**scope, "app": front.app}, receive, send)
        return stalled.status_code

    assert run(tmp_path, test, receive_timeout_s=0.3) == 408
    assert spooled(tmp_path) == []
    assert os.listdir(tmp_path / "spool" / "incoming") == []


def test_without_a_broker_jobs_are_taken_and_queued_later(tmp_path):
    async def test(front):
        front.queue.broken = True
        job = (await front.enqueue(body(image(), "a"))).json()["uuid"]
        assert front.queue.jobs == {}
        front.queue.broken, front.bus.name = False, "two"
        reconciler = Reconciler(front.front.tracker)
        await reconciler.refresh()
        assert front.queue.jobs == {"a": [job]}
        front.queue.jobs.clear()  # lost without a trace
        front.front.tracker.open[job].since -= 60
        await reconciler.requeue_unknown()
        assert front.queue.jobs == {"a": [job]}

    run(tmp_path, test)


def test_a_new_front_knows_the_jobs_of_the_old_one(tmp_path):
    async def first(front):
        return [(await front.enqueue(body(image(i), "a"))).json()["uuid"] for i in range(5)]

    jobs = run(tmp_path, first)
    Spool(tmp_path / "spool").write_result(jobs[0], "a", encode({"scores": {"a": [1]}, "state": "succeeded"}))

    async def second(front):
        assert sorted(front.queue.jobs["a"]) == sorted(jobs[1:])
        answer = await front.client.post("/api/reward/pull", data={"uuid": jobs[0], "type": "a"})
        assert answer.json()["scores"] == {"a": [1]}

    run(tmp_path, second)


def test_first_result_wins(tmp_path):
    async def test(front):
        job = (await front.enqueue(body(image(), "a"))).json()["uuid"]
        spool = front.front.tracker.spool
        assert spool.write_result(job, "a", encode({"scores": {"a": [1]}, "state": "succeeded"}))
        assert not spool.write_result(job, "a", encode({"scores": {"a": [2]}, "state": "succeeded"}))
        assert not await front.front.tracker.end(job, "a", "expired", "too late")
        return (await front.client.post("/api/reward/pull", data={"uuid": job, "type": "a"})).json()

    assert run(tmp_path, test)["scores"] == {"a": [1]}


def test_jobs_that_nobody_can_score_end_with_the_reason(tmp_path):
    async def test(front):
        reconciler, tracker = Reconciler(front.front.tracker), front.front.tracker
        old = (await front.enqueue(body(image(), "a"))).json()["uuid"]
        waits = (await front.enqueue(body(image(), "b"))).json()["uuid"]
        front.bus.set("b", "failed", "weights missing")
        await reconciler.refresh()
        refused = await front.enqueue(body(image(), "b"))
        assert refused.status_code == 503
        assert refused.json()["message"] == "reward b is not available: weights missing"
        assert "Retry-After" in refused.headers
        await reconciler.reconcile()
        assert waits in tracker.open  # it may still come back
        await asyncio.sleep(0.3)
        await reconciler.reconcile()
        tracker.open[old].since -= 4000
        await reconciler.reconcile()
        fields = [{"uuid": old, "type": "a"}, {"uuid": waits, "type": "b"}]
        expired, failed = [(await front.client.post("/api/reward/pull", data=f)).json() for f in fields]
        assert (expired["state"], failed["state"]) == ("expired", "failed")
        assert "3600 s" in expired["error"]
        assert failed["error"] == "reward b is not available: weights missing"
        assert not tracker.open
        assert (tracker.bytes, tracker.depth("a"), tracker.depth("b")) == (0, 0, 0)
        gone = (await front.client.get("/readyz")).json()
        assert gone["ready"] is False
        front.bus.rewards.clear()
        lost = (await front.enqueue(body(image(), "a"))).json()["uuid"]
        await reconciler.refresh()
        await reconciler.reconcile()
        await asyncio.sleep(0.3)
        await reconciler.reconcile()
        answer = await front.client.post("/api/reward/pull", data={"uuid": lost, "type": "a"})
        assert answer.json()["error"] == "reward a is not available: no worker serves it yet"

    run(tmp_path, test, fail_after_s=0.2, no_worker_after_s=0.2)


def test_latents_without_anybody_to_decode_them_end(tmp_path):
    async def test(front):
        reconciler = Reconciler(front.front.tracker)
        await reconciler.refresh()
        latents = np.zeros((1, 16, 1, 2, 2), np.float16)
        job = (await front.enqueue(body(latents, "a", media_type="latent"))).json()["uuid"]
        assert front.queue.jobs == {"_decode": [job]}
        await reconciler.reconcile()
        await asyncio.sleep(0.3)
        await reconciler.reconcile()
        return (await front.client.post("/api/reward/pull", data={"uuid": job, "type": "a"})).json()

    assert run(tmp_path, test, no_worker_after_s=0.2)["error"].startswith("latents cannot be decoded")


def test_odd_reward_names_are_unknown(tmp_path):
    async def test(front):
        job = (await front.enqueue(body(image(), "a"))).json()["uuid"]
        for name in ("../../../x", "a" * 300, "a\0", "ä"):
            answer = await front.client.post("/api/reward/pull", data={"uuid": job, "type": name})
            assert (answer.status_code, answer.json()["state"]) == (400, "unknown")

    run(tmp_path, test)


def test_results_go_after_their_time(tmp_path):
    async def test(front):
        tracker = front.front.tracker
        jobs = [(await front.enqueue(body(image(), "a"))).json()["uuid"] for _ in range(4)]
        for job in jobs[:3]:
            await tracker.end(job, "a", "failed", "x")
        assert tracker.spool.sweep(3600, keep=2) == 1
        assert tracker.spool.sweep(-1, keep=10) == 2
        codes = [(await front.client.post("/api/reward/pull", data={"uuid": j, "type": "a"})).json() for j in jobs]
        assert [c["state"] for c in codes] == ["unknown", "unknown", "unknown", "queued"]

    run(tmp_path, test)


TOKENS = {"all": "a" * 20, "submit": "s" * 20, "read": "r" * 20}


def test_tokens_and_scopes(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# ours\n{TOKENS['all']}\n{TOKENS['submit']} submit\n{TOKENS['read']} read  # dashboards\n")

    async def status(front, token, path):
        headers = {"Authorization": token} if token else {}
        if path == "enqueue":
            return (await front.enqueue(body(image(), "a"), **headers)).status_code
        return (await front.client.get(path, headers=headers)).status_code

    async def test(front):
        table = {
            (None, "enqueue"): 401,
            ("Bearer ", "enqueue"): 401,
            ("Bearer " + "x" * 20, "enqueue"): 401,
            (f"Basic {TOKENS['all']}", "enqueue"): 401,
            (f"Bearer {TOKENS['read']}", "enqueue"): 403,
            (f"Bearer {TOKENS['submit']}", "enqueue"): 200,
            (f"bearer {TOKENS['all']}", "enqueue"): 200,
            (f"Bearer {TOKENS['submit']}", "/metrics"): 403,
            (f"Bearer {TOKENS['read']}", "/metrics"): 200,
            (None, "/api/reward/rewards"): 401,
            (None, "/healthz"): 200,
            (None, "/readyz"): 200,
            (None, "/"): 200,
        }
        for (token, path), expected in table.items():
            assert await status(front, token, path) == expected, (token, path)
        tokens.write_text("n" * 20)  # rotated while it runs
        assert await status(front, f"Bearer {TOKENS['all']}", "enqueue") == 401
        assert await status(front, f"Bearer {'n' * 20}", "enqueue") == 200
        tokens.write_text("short")  # a mistake locks nobody out
        assert await status(front, f"Bearer {'n' * 20}", "enqueue") == 200
        keys = [await front.enqueue(body(image(), "a"), Authorization="Bearer " + "n" * 20) for _ in range(2)]
        assert keys[0].json() != keys[1].json()

    run(tmp_path, test, token_file=str(tokens))


def test_another_address_needs_a_token(tmp_path, monkeypatch):
    for host in ("0.0.0.0", "::", "192.0.2.1", ""):
        with pytest.raises(UserError, match="there is no token"):
            Auth(build({"host": host}, "test"))
    for host in ("localhost", "127.0.0.1", "::1"):
        Auth(build({"host": host}, "test"))
    monkeypatch.setenv("COSMOS_RL_REWARD_TOKENS", "t" * 20)
    Auth(build({"host": "0.0.0.0"}, "test"))
    monkeypatch.setenv("COSMOS_RL_REWARD_TOKENS", "secret-in-no-message")
    with pytest.raises(UserError, match="token_file") as missing:
        Auth(build({"token_file": str(tmp_path / "none")}, "test"))
    (tmp_path / "bad").write_text("hidden-hidden-hidden fly")
    with pytest.raises(UserError, match="line 1") as bad:
        Auth(build({"token_file": str(tmp_path / "bad")}, "test"))
    assert "secret" not in str(missing.value)
    assert "hidden" not in str(bad.value)


JSONS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
GOOD = body(image(), "a")


def test_fuzzed_requests_never_break_the_front(tmp_path):
    """A short run of ``benchmarks/fuzz_front.py``."""
    from benchmarks.fuzz_front import fuzz

    report = asyncio.run(fuzz(tmp_path, requests=1500, seed=1))
    assert report["unexpected"] == []
    assert report["growth_mib"] < 32
    assert report["statuses"].keys() <= {200, 400, 401, 404, 405, 408, 409, 413, 415, 422, 429}
    assert {200, 400, 422} <= report["statuses"].keys()


@given(st.dictionaries(st.sampled_from(["prompts", "reward_fn", "media_type", "video_infos"]), JSONS))
@settings(max_examples=60, deadline=None)
def test_any_metadata_gets_an_answer(tmp_path_factory, metadata):
    async def test(front):
        return await front.enqueue(json.dumps(metadata).encode() + b"\n" + npy(image()))

    answer = run(tmp_path_factory.mktemp("any"), test)
    assert answer.status_code in (200, 400)


def test_large_bodies_pass_through_without_staying_in_memory(tmp_path):
    piece, count = bytes(1 << 16), 91 << 4
    head = body(np.zeros((1, 1, 1, 3), np.uint8), "a")
    line = head[: head.index(b"\n") + 1]
    shape = (1, 1, (91 << 20) // 3 // 1024, 1024, 3)[1:]
    array = npy(np.zeros((0, *shape[1:]), np.uint8)).replace(b"(0,", b"(1,")
    total = shape[1] * shape[2] * 3
    process = psutil.Process()
    peak = [0]

    async def stream():
        yield line + array
        left = total
        for _ in range(count + 1):
            peak[0] = max(peak[0], process.memory_info().rss)
            part = piece[: min(left, len(piece))]
            left -= len(part)
            if part:
                yield part

    async def test(front):
        await front.enqueue(body(image(), "a"))
        before = process.memory_info().rss
        answer = await front.enqueue(stream())
        assert answer.status_code == 200, answer.text
        return peak[0] - before

    assert run(tmp_path, test) < 32 << 20
    assert max(job.size for job in spooled(tmp_path)) > 90 << 20
