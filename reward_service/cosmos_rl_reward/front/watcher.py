"""Compares the front's view with the spool, the broker and the workers, so that nothing that gets lost stays lost."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from cosmos_rl_reward.clock import uptime
from cosmos_rl_reward.errors import StoreAway
from cosmos_rl_reward.front.ledger import BROKER_S, Ledger, OpenJob
from cosmos_rl_reward.results import EXPIRED, FAILED
from cosmos_rl_reward.spool import Job
from cosmos_rl_reward.store import ask
from cosmos_rl_reward.worker.spec import DECODE_QUEUE

logger = logging.getLogger(__name__)
_KNOWN_AFTER_S = 5.0  # an older job that the broker does not know is queued again
_AT_ONCE = 500  # jobs per message to the broker
_GATHER_S = 0.05  # a job that is answered may keep its body so long, until there are more of them


class Watcher:
    """``run`` it beside a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._epoch = ""
        self._unwell: dict[tuple[str, str], float] = {}
        self._left: dict[str, int] = {}
        self._answered: asyncio.Queue[Job] = asyncio.Queue()
        self._seen: set[str] = set()  # open jobs that ``adopt`` found last time

    async def run(self) -> None:
        """Follow events and the spool until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._finish())
            group.create_task(_every(0.5, self.refresh))
            group.create_task(_every(1.0, self.compare))
            group.create_task(_every(2.5, self.requeue_unknown))
            group.create_task(_every(30.0, self.adopt))
            group.create_task(_every(self.ledger.spool.sweep_s, self.sweep))

    async def _follow(self) -> None:
        ledger = self.ledger
        async for event in ledger.board.events():
            name = event.get("reward", DECODE_QUEUE)
            if name == DECODE_QUEUE:
                continue
            with contextlib.suppress(StoreAway):  # ``compare`` will see it
                # an event is word of a file: look, so that nobody is told of a result that is not there
                there = await ask(ledger.spool, ledger.spool.has_result, event["id"], name)
                if there and (job := ledger.note(event)) is not None:
                    self._answered.put_nowait(job)

    async def _finish(self) -> None:
        """Drop bodies beside the events, those that came together in one go."""
        while True:
            jobs = [await self._answered.get()]
            await asyncio.sleep(_GATHER_S)
            while not self._answered.empty():
                jobs.append(self._answered.get_nowait())
            await self.ledger.finish(jobs)

    async def refresh(self) -> None:
        """Ask how the workers are, and whether the broker still knows what it knew."""
        ledger = self.ledger
        async with asyncio.timeout(BROKER_S):
            ledger.statuses = await ledger.board.statuses()
            epoch = await ledger.board.epoch()
        if epoch == self._epoch:
            return
        jobs = [entry.job for entry in ledger.open.values()]
        if self._epoch:
            logger.warning("the broker came back empty: %d jobs are queued again", len(jobs))
            ledger.metrics.requeued.labels("broker").inc(len(jobs))
        for i in range(0, len(jobs), _AT_ONCE):
            await ledger.queue_jobs(jobs[i : i + _AT_ONCE])
        self._epoch = epoch

    async def compare(self) -> None:
        """End what is over: results without word of them, jobs that expired or that nobody can score."""
        ledger, now = self.ledger, uptime()
        entries = list(ledger.open.values())
        for event in await asyncio.to_thread(self._results_of, entries):
            await ledger.settled(event)
        self._note_states(now)
        stuck: set[str] = set()  # latents, while nobody is there to decode them
        if (DECODE_QUEUE, "absent") in self._unwell:
            stuck = await ask(ledger.spool, ledger.spool.undecoded, [entry.job for entry in entries])
        for entry in entries:
            for reward in list(entry.missing):
                if end := self._end_of(entry, reward, now, entry.job.id in stuck):
                    await ledger.end(entry.job.id, reward, *end)
        self._measure(now)

    def _results_of(self, entries: list[OpenJob]) -> list[dict[str, Any]]:
        found = []
        wanted = {(entry.job.id, reward) for entry in entries for reward in list(entry.missing)}
        wanted |= self.ledger.waited_for()
        for job_id, reward, data in self.ledger.spool.answered(wanted):
            result = json.loads(data)
            known = {key: result[key] for key in ("state", "error") if key in result}
            found.append({"id": job_id, "reward": reward, **known})
        return found

    def _note_states(self, now: float) -> None:
        for reward in (*self.ledger.rewards, DECODE_QUEUE):
            state, _ = self.ledger.state(reward)
            for bad in ("failed", "absent"):
                if bad == state:
                    self._unwell.setdefault((reward, bad), now)
                else:
                    self._unwell.pop((reward, bad), None)

    def _end_of(self, entry: OpenJob, reward: str, now: float, stuck: bool) -> tuple[str, str] | None:
        """Final state and reason for a job that will not be scored any more."""
        config, age = self.ledger.config, now - entry.since
        if age > config.job_ttl_s:
            return EXPIRED, f"no result within {config.job_ttl_s:g} s (job_ttl_s)"
        if reward not in self.ledger.rewards:
            if age <= config.fail_after_s:
                return None
            return FAILED, f"reward {reward} is no longer enabled"
        if stuck and now - max(self._unwell[DECODE_QUEUE, "absent"], entry.since) > config.no_worker_after_s:
            return FAILED, "nobody decodes latents: no worker of this service runs the VAE"
        state, reason = self.ledger.state(reward)
        since = max(self._unwell.get((reward, state), now), entry.since)
        limits = {"failed": config.fail_after_s, "absent": config.no_worker_after_s}
        if state in limits and now - since > limits[state]:
            return FAILED, f"reward {reward} is not available: {reason}"
        return None

    def _measure(self, now: float) -> None:
        ledger, metrics = self.ledger, self.ledger.metrics
        oldest: dict[str, float] = {}
        for entry in ledger.open.values():
            for reward in entry.missing:
                oldest[reward] = min(oldest.get(reward, now), entry.since)
        metrics.spool.set(ledger.bytes)
        metrics.host_restarts.set(sum(host["restarts"] for host in ledger.hosts().values()))
        for reward in ledger.rewards:
            metrics.depth.labels(reward).set(ledger.depth(reward))
            metrics.age.labels(reward).set(now - oldest.get(reward, now))
            mine = [status[reward] for status in ledger.statuses.values() if reward in status]
            metrics.up.labels(reward).set(sum(status["replicas"] for status in mine))
            metrics.restarts.labels(reward).set(sum(status["restarts"] for status in mine))
            left = ledger.left[reward]
            ledger.rates[reward] = 0.8 * ledger.rates.get(reward, 0.0) + 0.2 * (left - self._left.get(reward, left))
            self._left[reward] = left

    async def requeue_unknown(self) -> None:
        """Queue jobs again that the broker ought to know and does not."""
        ledger, old = self.ledger, uptime() - _KNOWN_AFTER_S
        jobs = [entry.job for entry in ledger.open.values() if entry.since < old]
        for i in range(0, len(jobs), _AT_ONCE):
            part, lost = jobs[i : i + _AT_ONCE], set()
            undecoded = await ask(ledger.spool, ledger.spool.undecoded, part)
            for name in (*ledger.rewards, DECODE_QUEUE):
                if ids := [job.id for job in part if ledger.next_queue(job, name, undecoded)]:
                    async with asyncio.timeout(BROKER_S):
                        lost.update(await ledger.queue.unknown(name, ids))
            if again := [job for job in part if job.id in lost and job.id in ledger.open]:
                ledger.metrics.requeued.labels("unknown").inc(len(again))
                await ledger.queue_jobs(again)

    async def adopt(self) -> None:
        """Take over jobs in a shared spool whose front is gone."""
        ledger, before = self.ledger, self._seen
        jobs = await asyncio.to_thread(lambda: list(ledger.spool.open_jobs()))
        self._seen = {job.id for job in jobs}
        for job in jobs:
            if job.id in before and job.id not in ledger.open:
                missing = await asyncio.to_thread(ledger.spool.missing_rewards, job)
                if not missing:
                    await asyncio.to_thread(ledger.spool.finish, job)
                elif ledger.enter(job, set(missing)):
                    await ledger.queue_jobs([job])

    async def sweep(self) -> None:
        """Forget results whose time is over."""
        config = self.ledger.config
        await asyncio.to_thread(self.ledger.spool.sweep, config.result_ttl_s, config.max_finished_jobs)


async def _every(seconds: float, action: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await action()
        except Exception as error:
            level = logging.ERROR
            if isinstance(error, (OSError, TimeoutError)) or "onnection" in type(error).__name__:  # of the broker
                level = logging.DEBUG
            logger.log(level, "%s: %r", action.__name__, error)
        await asyncio.sleep(seconds)
