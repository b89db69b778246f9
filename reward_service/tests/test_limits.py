"""What a job and a wait may cost: bytes on the disk while they arrive, decoded bytes, memory, ages, long polls."""

import asyncio
import contextlib
import json
import os
import time
import uuid

import httpx
import numpy as np
import pytest

from cosmos_rl_reward import clock
from cosmos_rl_reward.clock import SteadyClock
from cosmos_rl_reward.front import uploads
from cosmos_rl_reward.front.reconciler import Reconciler
from cosmos_rl_reward.spool import Spool
from tests.fronts import front_in_memory
from tests.service import body, image
from tests.test_front import run, spooled

MIB = 1 << 20


def on_disk(folder):
    return sum(_size(file) for file in (folder / "spool" / "incoming").iterdir())


def _size(file):
    try:
        return file.stat().st_size
    except FileNotFoundError:  # it was refused meanwhile
        return 0


async def slow_upload(front, size, stop, **metadata):
    """A chunked body of ``size`` bytes, of which the last part comes when ``stop`` is set."""
    head = body(np.zeros((0, 1, 1, 3), np.uint8), "a", **metadata)

    async def parts():
        yield head
        for _ in range(size // MIB):
            yield bytes(MIB)
            await asyncio.sleep(0)
        await stop.wait()

    return await front.enqueue(parts())


@pytest.mark.parametrize("limit", ["max_spool_bytes", "min_free_bytes"])
def test_chunked_bodies_count_while_they_arrive(tmp_path, monkeypatch, limit):
    """Four of 12 MiB at once, room for two: never more than that on the disk."""
    free = 1 << 40

    async def test(front):
        stop, peak = asyncio.Event(), 0
        if limit == "min_free_bytes":
            monkeypatch.setattr(front.front.tracker.spool, "free_bytes", lambda: free + 28 * MIB - on_disk(tmp_path))
        sending = [asyncio.create_task(slow_upload(front, 12 * MIB, stop)) for _ in range(4)]
        for _ in range(100):
            await asyncio.sleep(0.01)
            peak = max(peak, on_disk(tmp_path))
        stop.set()
        return peak, [answer.status_code for answer in await asyncio.gather(*sending)]

    config = {"max_spool_bytes": 28 * MIB} if limit == "max_spool_bytes" else {"min_free_bytes": free}
    peak, statuses = run(tmp_path, test, **config)
    assert peak <= 29 * MIB
    assert statuses.count(429 if limit == "max_spool_bytes" else 507) >= 2
    assert set(statuses) <= {429, 507, 400}  # 400: it came whole, and is no array
    assert os.listdir(tmp_path / "spool" / "incoming") == []


def test_many_slow_bodies_stay_off_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "_MAX_BUFFERED", 4 * MIB)

    async def test(front):
        stop, sent = asyncio.Event(), []

        async def parts():
            yield body(np.zeros((0, 1, 1, 3), np.uint8), "a")
            yield bytes(900_000)
            sent.append(900_000)
            await stop.wait()

        sending = [asyncio.create_task(front.enqueue(parts())) for _ in range(60)]
        async with asyncio.timeout(60):
            while len(sent) < 60 or front.front.receiver._buffered > 5 * MIB:  # all of them are 51
                await asyncio.sleep(0.01)
        stop.set()
        await asyncio.gather(*sending)
        return front.front.receiver._buffered

    assert run(tmp_path, test) == 0


def test_an_eighth_of_the_connections_may_send_jobs(tmp_path):
    async def test(front):
        stop = asyncio.Event()
        sending = [asyncio.create_task(slow_upload(front, 0, stop)) for _ in range(4)]
        await asyncio.sleep(0.1)
        refused = await front.enqueue(body(image(), "a"))
        stop.set()
        await asyncio.gather(*sending)
        return refused, (await front.enqueue(body(image(), "a"))).status_code

    refused, after = run(tmp_path, test, max_connections=32)
    assert (refused.status_code, after) == (429, 200)
    assert refused.headers["Retry-After"]


LATENTS = np.zeros((2, 16, 2, 4, 4), np.float16)  # 2 x 5 frames of 32 x 32: 30 720 bytes of pixels


@pytest.mark.parametrize(
    ("array", "media", "size"),
    [
        (LATENTS, "latent", 30_720),
        (np.zeros((2, 48, 2, 2, 2), np.float16), "latent", 30_720),
        (image(count=3, side=64), "image", 36_864),
        (np.zeros((2, 3, 4, 32, 32), np.uint8), "video", 24_576),
    ],
)
def test_decoded_bytes_of_a_whole_job(tmp_path, array, media, size):
    decode = {"wan2pt2_model_path": "x"}

    def status(limit):
        folder = tmp_path / str(limit)
        answers = []

        async def test(front):
            answers.append(await front.enqueue(body(array, "a", media_type=media)))

        run(folder, test, max_decoded_bytes=limit, decode_args=decode)
        return answers[0]

    assert status(size).status_code == 200
    refused = status(size - 1)
    assert refused.status_code == 413
    assert f"{size} bytes of pixels in the job are more than max_decoded_bytes" in refused.json()["message"]


def test_latents_take_the_room_of_their_pixels(tmp_path):
    async def test(front):
        content = body(LATENTS, "a", media_type="latent")
        first = await front.enqueue(content)
        taken = front.front.tracker.bytes
        second = await front.enqueue(content)
        await front.front.tracker.end(first.json()["uuid"], "a", "failed", "x")
        return first.status_code, taken, second, front.front.tracker.bytes, (await front.enqueue(content)).status_code

    first, taken, second, after, third = run(tmp_path, test, max_spool_bytes=60_000)
    assert (first, third) == (200, 200)
    assert taken == 4096 + len(body(LATENTS, "a", media_type="latent")) + 30_720
    assert second.status_code == 429
    assert after == 0


@contextlib.contextmanager
def clock_set(monkeypatch, seconds):
    """The wall clock, moved by ``seconds``; file times as well."""
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + seconds)
        yield


@pytest.mark.parametrize("step", [3601.0, -86_400.0, 366 * 86_400.0])
def test_a_step_of_the_clock_ends_no_job_and_forgets_no_result(tmp_path, monkeypatch, step):
    async def before(front):
        reconciler, tracker = Reconciler(front.front.tracker), front.front.tracker
        await reconciler.refresh()
        done, waits = [(await front.enqueue(body(image(i), "a"))).json()["uuid"] for i in range(2)]
        await tracker.end(done, "a", "failed", "x")
        with clock_set(monkeypatch, step):
            await reconciler.reconcile()
            assert waits in tracker.open
            assert tracker.spool.sweep(86_400, keep=10) == 0
            late = (await front.enqueue(body(image(), "a"))).json()["uuid"]  # accepted after the step
            await tracker.end(late, "a", "failed", "x")
        assert tracker.spool.sweep(86_400, keep=10) == 0  # and the clock is set back
        tracker.open[waits].since -= 3599
        await reconciler.reconcile()
        assert waits in tracker.open
        return done, waits

    done, waits = run(tmp_path, before)

    async def restarted(front):
        reconciler, tracker = Reconciler(front.front.tracker), front.front.tracker
        await reconciler.refresh()
        await reconciler.reconcile()
        assert waits in tracker.open
        assert tracker.spool.sweep(86_400, keep=10) == 0
        assert tracker.spool.result(done, "a")
        tracker.open[waits].since -= 3601  # but its time does end
        await reconciler.reconcile()
        assert waits not in tracker.open

    with clock_set(monkeypatch, step):
        run(tmp_path, restarted)


def test_ages_count_across_a_restart_but_not_across_a_reboot(tmp_path, monkeypatch):
    """A job of this boot keeps its age; after a reboot, or in another machine's hands, it has all its time again."""

    async def first(front):
        return (await front.enqueue(body(image(), "a"))).json()["uuid"]

    job = run(tmp_path, first)

    async def second(front):
        return clock.uptime() - front.front.tracker.open[job].since

    here = clock.uptime()
    monkeypatch.setattr("cosmos_rl_reward.front.job_tracker.uptime", lambda: here + 500)
    assert run(tmp_path, second) < 100
    monkeypatch.setattr("cosmos_rl_reward.front.job_tracker.boot", lambda: "another boot")
    assert run(tmp_path, second) < -400  # since now, as the tracker has it


def test_the_steady_clock(tmp_path, monkeypatch):
    up, started = 1000.0, "one"
    monkeypatch.setattr(clock, "uptime", lambda: up)
    monkeypatch.setattr(clock, "boot", lambda: started)
    path = tmp_path / "clock"
    first = SteadyClock(path)
    begun = first.now()
    assert begun == pytest.approx(time.time(), abs=5)
    first.save()
    up += 50
    with clock_set(monkeypatch, 1e6):
        assert SteadyClock(path).now() == pytest.approx(begun + 50)
        first.save()
        up, started = 3.0, "two"  # a reboot, and the clock is wrong
        second = SteadyClock(path)
        assert second.now() == pytest.approx(begun + 50)
    up += 7
    assert second.now() == pytest.approx(begun + 57)
    path.write_text(json.dumps({"time": begun + 500, "uptime": 9e9, "boot": "another machine"}))
    second.save()
    assert second.now() == pytest.approx(begun + 500)
    path.write_text("{")
    second.save()
    assert SteadyClock(path).now() == pytest.approx(begun + 500)


def test_uploads_that_nobody_finished_go_by_an_age_that_the_clock_cannot_change(tmp_path, monkeypatch):
    spool = Spool(tmp_path)
    upload = spool.upload()
    upload.flush()
    with clock_set(monkeypatch, 1e6):
        spool.sweep(86_400, 10)
        assert upload.path.exists()
    up = clock.uptime()
    monkeypatch.setattr("cosmos_rl_reward.spool.uptime", lambda: up + 3601)
    later = time.time() + 1e6
    os.utime(upload.path, (later, later))
    spool.sweep(86_400, 10)
    assert not upload.path.exists()
    upload.discard()


def test_recovered_once_it_was_open_twice(tmp_path):
    async def test(front):
        reconciler, tracker = Reconciler(front.front.tracker), front.front.tracker
        await reconciler.refresh()
        job = (await front.enqueue(body(image(), "a"))).json()["uuid"]
        del tracker.open[job]  # another front's
        await reconciler.recover()
        assert job not in tracker.open  # its front may be about to queue it
        await reconciler.recover()
        assert job in tracker.open

    run(tmp_path, test)


def test_polls_cost_nothing_while_they_wait_and_are_bounded(tmp_path):
    async def test(front, port):
        url, tracker = f"http://127.0.0.1:{port}", front.front.tracker
        job = (await front.enqueue(body(image(), "a"))).json()["uuid"]
        fields = {"uuid": job, "type": "a", "wait": "60"}
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, timeout=70, limits=limits) as client:
            polls = [asyncio.create_task(client.post("/api/reward/pull", data=fields)) for _ in range(100)]
            early, _ = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED, timeout=30)
            assert {poll.result().status_code for poll in early} == {400}  # beyond the limit: answered at once
            async with asyncio.timeout(30):
                while front.front.polls < 64 or sum(poll.done() for poll in polls) < 36:
                    await asyncio.sleep(0.05)
            looks = []
            has_result = tracker.spool.has_result
            tracker.spool.has_result = lambda *place: looks.append(place) or has_result(*place)
            await asyncio.sleep(1.2)
            assert len(looks) == 0
            tracker.spool.write_result(job, "a", b'{"scores": {"a": [1]}, "state": "succeeded"}')
            answers = await asyncio.wait_for(
                asyncio.gather(*polls), 20
            )  # without any event: by the look of ``compare``
            assert front.front.polls == 0
        return [answer.status_code for answer in answers]

    async def inside():
        async with front_in_memory(tmp_path, max_connections=128).run() as front, front.serve() as port:
            return await test(front, port)

    statuses = asyncio.run(inside())
    assert statuses.count(200) == 64
    assert statuses.count(400) == 36


def test_a_wait_for_another_fronts_job_ends_without_an_event(tmp_path):
    async def test(front):
        tracker = front.front.tracker
        job = (await front.enqueue(body(image(), "a"))).json()["uuid"]
        del tracker.open[job]
        waiting = asyncio.create_task(tracker.wait(job, "a", 60))
        await asyncio.sleep(0.05)
        tracker.spool.write_result(job, "a", b'{"scores": {"a": [1]}, "state": "succeeded"}')
        await asyncio.wait_for(waiting, 20)
        await asyncio.wait_for(tracker.wait(job, "a", 60), 20)  # there already
        await asyncio.wait_for(tracker.wait(str(uuid.uuid4()), "a", 0.1), 20)

    run(tmp_path, test)


def test_a_key_makes_a_digest_and_nothing_else_does(tmp_path):
    async def test(front):
        await front.enqueue(body(image(), "a"))
        await front.enqueue(body(image(), "a"), **{"Idempotency-Key": "k"})

    run(tmp_path, test)
    assert sorted(len(job.sha256) for job in spooled(tmp_path)) == [0, 64]
