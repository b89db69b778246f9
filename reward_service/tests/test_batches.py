"""How waiting jobs are put together for one call of a reward."""

import asyncio
import time

import pytest

from cosmos_rl_reward.payload.arrays import ArrayRef
from cosmos_rl_reward.spool import Job
from cosmos_rl_reward.worker.batches import Batches, Item


def item(name, count=1, side=8, attempts=0, age=0.0):
    shape = (count, side, side, 3)
    strides = (side * side * 3, side * 3, 3, 1)
    job = Job(name, 0.0, ("mock",), (), "", 4100, "image", ArrayRef("|u1", shape, strides, 4200), 4200)
    return Item(job, time.monotonic() - age, asyncio.get_running_loop().create_future(), attempts)


def always():
    return True


def run(test):
    async def limited():
        async with asyncio.timeout(20):
            await test()

    asyncio.run(limited())


def names(batch):
    return [one.job.id for one in batch]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, [["a"], ["b"], ["large"], ["c"], ["tried"], ["d"]]),
        (4, [["a", "b"], ["large"], ["c"], ["tried"], ["d"]]),
        (3, [["a", "b"], ["large"], ["c"], ["tried"], ["d"]]),
        (1, [["a"], ["b"], ["large"], ["c"], ["tried"], ["d"]]),
    ],
)
def test_jobs_of_one_shape_share_a_call_and_those_that_failed_are_alone(limit, expected):
    async def test():
        waiting = Batches()
        waiting.put(item("d", age=10))
        waiting.put(item("tried", attempts=1, age=15))  # yields for 3 seconds: as if it were 12 seconds old
        waiting.put(item("c", age=13))
        waiting.put(item("large", side=16, age=14))
        waiting.put(item("b", age=15, count=2))
        waiting.put(item("a", age=16))
        found = [names(await waiting.take(always, limit, 0.0)) for _ in expected]
        assert found == expected

    run(test)


def test_the_first_job_waits_for_others_until_the_call_is_full():
    async def test():
        waiting = Batches()
        taking = asyncio.create_task(waiting.take(always, 3, 15.0))
        for name in "abc":
            await asyncio.sleep(0.02)
            waiting.put(item(name))
        assert names(await taking) == ["a", "b", "c"]  # and not after 15 seconds
        waiting.put(item("d"))
        assert names(await waiting.take(always, 3, 0.01)) == ["d"]

    run(test)


def test_what_is_cancelled_or_over_loses_no_job():
    async def test():
        waiting, up = Batches(), [True]
        waiting.put(item("a"))
        taking = asyncio.create_task(waiting.take(always, 9, 60.0))
        await asyncio.sleep(0.02)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        up[0] = False
        assert await waiting.take(lambda: up[0], 9, 0.0) == []
        assert names(await waiting.take(always, 9, 0.0)) == ["a"]
        up[0] = True
        idle = asyncio.create_task(waiting.take(lambda: up[0], 9, 0.0))
        await asyncio.sleep(0.02)
        up[0] = False
        waiting.wake()
        assert await idle == []

    run(test)


def test_several_takers_share_what_comes():
    async def test():
        waiting = Batches()
        takers = [asyncio.create_task(waiting.take(always, 1, 0.0)) for _ in range(3)]
        await asyncio.sleep(0.02)
        for name in "abc":
            waiting.put(item(name))
        batches = [await taker for taker in takers]
        assert sorted(name for batch in batches for name in names(batch)) == ["a", "b", "c"]

    run(test)
