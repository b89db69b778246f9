"""The job queue on a real broker: nothing is lost, nothing is queued twice, leases of stopped consumers move."""

import asyncio
import contextlib
import subprocess
import time

import pytest

from cosmos_rl_reward.broker import queue as queue_module
from cosmos_rl_reward.broker.embedded import make_server_command, wait_for_socket
from cosmos_rl_reward.broker.event_bus import EventBus
from cosmos_rl_reward.broker.queue import Control, StreamQueue

pytestmark = pytest.mark.process


class Broker:
    """A private server that can be killed and started again, empty."""

    def __init__(self, folder):
        self.socket = folder / "b.sock"
        self.url = f"unix://{self.socket}"
        self.command = make_server_command(self.socket, folder)
        self.process: subprocess.Popen | None = None

    async def start(self):
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(self.command)
        await wait_for_socket(self.socket, 20)

    def kill(self):
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@contextlib.asynccontextmanager
async def brokered(folder):
    broker = Broker(folder)
    await broker.start()
    try:
        async with StreamQueue(broker.url) as queue:
            yield broker, queue
    finally:
        broker.kill()


async def until(condition, seconds=30.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Runs:
    """A ``run`` that notes its calls and ends when the test says so."""

    def __init__(self, free=True):
        self.calls, self.ended, self.most, self.now = [], [], 0, 0
        self.free = asyncio.Event()
        if free:
            self.free.set()

    async def __call__(self, job_id, tries):
        self.calls.append((job_id, tries))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.free.wait()
            self.ended.append(job_id)
        finally:
            self.now -= 1


@contextlib.asynccontextmanager
async def consuming(queue, run, concurrency=4):
    control = Control()
    task = asyncio.create_task(queue.consume("r", run, concurrency, control))
    try:
        yield control, task
    finally:
        control.end()
        async with asyncio.timeout(20):
            await task


def test_each_job_runs_once_in_order_and_is_known_until_it_ends(tmp_path):
    async def test():
        async with brokered(tmp_path) as (_, queue):
            ids = [f"job{n}" for n in range(50)]
            await queue.put("r", ids)
            await queue.put("r", [*ids[:7], "late", "late"])
            await queue.put("other", ["elsewhere"])
            assert await queue.unknown("r", [*ids, "late", "never", "elsewhere"]) == ["never", "elsewhere"]
            runs = Runs(free=False)
            async with consuming(queue, runs) as (control, task):
                await until(lambda: len(runs.calls) == 4)
                await queue.put("r", ids)  # queued or running: stays as it is
                runs.free.set()
                await until(lambda: len(runs.ended) == 51)
                control.stop.set()
                await asyncio.wait_for(task, 20)
            assert runs.calls == [(job_id, 1) for job_id in [*ids, "late"]]
            assert runs.most == 4
            assert await queue.unknown("r", ids) == ids
            await queue.put("r", ids[:1])  # it may come again now
            assert await queue.unknown("r", ids[:2]) == ids[1:2]

    asyncio.run(test())


def test_a_job_whose_run_raised_comes_back_with_a_higher_count(tmp_path, monkeypatch):
    monkeypatch.setattr(queue_module, "_RETRY_S", 0.01)

    async def test():
        tries = []

        async def run(job_id, number):
            tries.append(number)
            if number < 4:
                raise RuntimeError("not yet")

        async with brokered(tmp_path) as (_, queue):
            await queue.put("r", ["a"])
            async with consuming(queue, run):
                await until(lambda: len(tries) == 4)
            assert tries == [1, 2, 3, 4]
            assert await queue.unknown("r", ["a"]) == ["a"]

    asyncio.run(test())


def test_what_is_handed_back_runs_elsewhere_at_once(tmp_path):
    async def test():
        async with brokered(tmp_path) as (_, queue):
            await queue.put("r", ["a", "b", "c"])
            stuck, free = Runs(free=False), Runs()
            async with consuming(queue, stuck, 2):
                await until(lambda: len(stuck.calls) == 2)
            assert (stuck.ended, stuck.now) == ([], 0)
            async with consuming(queue, free):
                await until(lambda: len(free.ended) == 3)
            assert sorted(free.calls) == [("a", 2), ("b", 2), ("c", 1)]

    asyncio.run(test())


def test_what_arrives_after_all_was_handed_back_goes_back_too(tmp_path):
    async def test():
        async with brokered(tmp_path) as (_, queue):
            control, late, free = Control(), Runs(free=False), Runs()
            task = asyncio.create_task(queue.consume("r", late, 4, control))
            control.release.set()
            await queue.put("r", ["a"])
            await asyncio.sleep(0.5)
            control.stop.set()
            async with asyncio.timeout(20):
                await task
            assert late.calls == []
            async with consuming(queue, free):
                await until(lambda: free.ended)
            assert free.calls[0][1] > 1

    asyncio.run(test())


def test_the_jobs_of_a_dead_consumer_move_and_those_of_a_live_one_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(queue_module, "LEASE_S", 1.0)
    monkeypatch.setattr(queue_module, "_RENEW_S", 0.1)

    async def test():
        async with brokered(tmp_path) as (_, queue):
            await queue.put("r", ["lost"])
            dead, live, third = Runs(free=False), Runs(free=False), Runs()
            dying = asyncio.create_task(queue.consume("r", dead, 1, Control()))
            await until(lambda: dead.calls)
            dying.cancel()  # as a kill: nothing is handed back
            await asyncio.gather(dying, return_exceptions=True)
            async with consuming(queue, live, 1):
                await queue.put("r", ["mine"])
                await until(lambda: live.calls)
                async with consuming(queue, third):
                    await until(lambda: third.ended or len(live.calls) == 2)
                    began = time.monotonic()
                    await until(lambda: time.monotonic() - began > 2.5)  # the live one's lease would be over
                    live.free.set()
                    await until(lambda: len(live.ended) + len(third.ended) == 2)
            calls = live.calls + third.calls
            assert sorted(calls) == [("lost", 2), ("mine", 1)]
            assert await queue.unknown("r", ["lost", "mine"]) == ["lost", "mine"]

    asyncio.run(test())


def test_a_broker_that_dies_and_comes_back_empty(tmp_path):
    """What runs continues; what is put afterwards is run; a job that is put again while it runs ends both times."""

    async def test():
        async with brokered(tmp_path) as (broker, queue), EventBus(broker.url) as bus:
            epoch = await bus.epoch()
            await queue.put("r", ["a"])
            runs = Runs(free=False)
            async with consuming(queue, runs):
                await until(lambda: runs.calls)
                broker.kill()
                with pytest.raises((OSError, queue_module.ValkeyError)):
                    await queue.put("r", ["b"])
                await broker.start()
                assert await bus.epoch() != epoch
                assert await queue.unknown("r", ["a", "b"]) == ["a", "b"]
                await queue.put("r", ["a", "b"])
                await until(lambda: len(runs.calls) == 3)
                runs.free.set()
                await until(lambda: len(runs.ended) == 3)
            assert sorted(runs.calls) == [("a", 1), ("a", 1), ("b", 1)]
            assert await queue.unknown("r", ["a", "b"]) == ["a", "b"]

    asyncio.run(test())


def test_events_and_states_reach_the_other_side(tmp_path):
    async def test():
        async with brokered(tmp_path) as (broker, _), EventBus(broker.url) as bus:
            received = []

            async def listen():
                async for event in bus.events():
                    received.append(event)

            listening = asyncio.create_task(listen())
            for number in range(2):
                async with asyncio.timeout(20):
                    while {"n": number} not in received:
                        with contextlib.suppress(OSError, queue_module.ValkeyError):
                            await bus.publish([{"n": number}, {"ü": None}])
                        await asyncio.sleep(0.02)
                broker.kill()
                await broker.start()
            await bus.set_status("h", {"r": {"state": "ready"}})
            assert await bus.statuses() == {"h": {"r": {"state": "ready"}}}
            assert await bus.epoch() == await bus.epoch()
            listening.cancel()

    asyncio.run(test())
