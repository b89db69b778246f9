"""Compares the front's view with the spool, the broker and the workers, and repairs the differences."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from cosmos_rl_reward.clock import uptime
from cosmos_rl_reward.errors import StoreUnavailable
from cosmos_rl_reward.front.job_tracker import BROKER_S, JobTracker, OpenJob
from cosmos_rl_reward.results import EXPIRED, FAILED
from cosmos_rl_reward.spool import Job
from cosmos_rl_reward.store import call_spool
from cosmos_rl_reward.worker.spec import DECODE_QUEUE

logger = logging.getLogger(__name__)
_REQUEUE_AFTER_S = 5.0  # an older job that the broker does not know is queued again
_AT_ONCE = 500  # jobs per message to the broker
_GATHER_S = 0.05  # a finished job may keep its body so long, until there are more of them


class Reconciler:
    """``run`` it together with a tracker."""

    def __init__(self, tracker: JobTracker) -> None:
        self.tracker = tracker
        self._epoch = ""
        self._unhealthy_since: dict[tuple[str, str], float] = {}
        self._completed_before: dict[str, int] = {}
        self._answered: asyncio.Queue[Job] = asyncio.Queue()
        self._open_before: set[str] = set()  # open jobs that ``recover`` found last time

    async def run(self) -> None:
        """Process events and compare with the spool until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._consume_events())
            group.create_task(self._finish())
            group.create_task(_every(0.5, self.refresh))
            group.create_task(_every(1.0, self.reconcile))
            group.create_task(_every(2.5, self.requeue_unknown))
            group.create_task(_every(30.0, self.recover))
            group.create_task(_every(self.tracker.spool.sweep_s, self.sweep))

    async def _consume_events(self) -> None:
        tracker = self.tracker
        async for event in tracker.bus.events():
            name = event.get("reward", DECODE_QUEUE)
            if name == DECODE_QUEUE:
                continue
            with contextlib.suppress(StoreUnavailable):  # ``reconcile`` will see it
                # check the file, so that no request is woken for a result that does not exist
                there = await call_spool(tracker.spool, tracker.spool.has_result, event["id"], name)
                if there and (job := tracker.record(event)) is not None:
                    self._answered.put_nowait(job)

    async def _finish(self) -> None:
        """Remove bodies of finished jobs, several at a time."""
        while True:
            jobs = [await self._answered.get()]
            await asyncio.sleep(_GATHER_S)
            while not self._answered.empty():
                jobs.append(self._answered.get_nowait())
            await self.tracker.finish(jobs)

    async def refresh(self) -> None:
        """Fetch the health of the workers, and check whether the broker has lost its contents."""
        tracker = self.tracker
        async with asyncio.timeout(BROKER_S):
            tracker.statuses = await tracker.bus.statuses()
            epoch = await tracker.bus.epoch()
        if epoch == self._epoch:
            return
        jobs = [entry.job for entry in tracker.open.values()]
        if self._epoch:
            logger.warning("the broker restarted empty: %d jobs are queued again", len(jobs))
            tracker.metrics.requeued.labels("broker").inc(len(jobs))
        for i in range(0, len(jobs), _AT_ONCE):
            await tracker.enqueue_jobs(jobs[i : i + _AT_ONCE])
        self._epoch = epoch

    async def reconcile(self) -> None:
        """Complete jobs whose results had no event, and end jobs that expired or that no worker can score."""
        tracker, now = self.tracker, uptime()
        entries = list(tracker.open.values())
        for event in await asyncio.to_thread(self._find_results, entries):
            await tracker.complete(event)
        self._record_health(now)
        stuck: set[str] = set()  # latents, while no worker decodes them
        if (DECODE_QUEUE, "absent") in self._unhealthy_since:
            stuck = await call_spool(tracker.spool, tracker.spool.find_undecoded, [entry.job for entry in entries])
        for entry in entries:
            for reward in list(entry.missing):
                if end := self._final_state(entry, reward, now, entry.job.id in stuck):
                    await tracker.end(entry.job.id, reward, *end)
        self._update_metrics(now)

    def _find_results(self, entries: list[OpenJob]) -> list[dict[str, Any]]:
        found = []
        wanted = {(entry.job.id, reward) for entry in entries for reward in list(entry.missing)}
        wanted |= self.tracker.awaited_results()
        for job_id, reward, data in self.tracker.spool.find_results(wanted):
            result = json.loads(data)
            known = {key: result[key] for key in ("state", "error") if key in result}
            found.append({"id": job_id, "reward": reward, "failed": len(result.get("item_errors", ())), **known})
        return found

    def _record_health(self, now: float) -> None:
        for reward in (*self.tracker.rewards, DECODE_QUEUE):
            state, _ = self.tracker.state(reward)
            for bad in ("failed", "absent"):
                if bad == state:
                    self._unhealthy_since.setdefault((reward, bad), now)
                else:
                    self._unhealthy_since.pop((reward, bad), None)

    def _final_state(self, entry: OpenJob, reward: str, now: float, stuck: bool) -> tuple[str, str] | None:
        """Final state and reason of a job that will not be scored any more."""
        config, age = self.tracker.config, now - entry.since
        if age > config.job_ttl_s:
            return EXPIRED, f"no result within {config.job_ttl_s:g} s (job_ttl_s)"
        if reward not in self.tracker.rewards:
            if age <= config.fail_after_s:
                return None
            return FAILED, f"reward {reward} is no longer enabled"
        if stuck and now - max(self._unhealthy_since[DECODE_QUEUE, "absent"], entry.since) > config.no_worker_after_s:
            return FAILED, "latents cannot be decoded: no worker of this service runs the VAE"
        state, reason = self.tracker.state(reward)
        since = max(self._unhealthy_since.get((reward, state), now), entry.since)
        limits = {"failed": config.fail_after_s, "absent": config.no_worker_after_s}
        if state in limits and now - since > limits[state]:
            return FAILED, f"reward {reward} is not available: {reason}"
        return None

    def _update_metrics(self, now: float) -> None:
        tracker, metrics = self.tracker, self.tracker.metrics
        oldest: dict[str, float] = {}
        for entry in tracker.open.values():
            for reward in entry.missing:
                oldest[reward] = min(oldest.get(reward, now), entry.since)
        metrics.spool.set(tracker.bytes)
        metrics.host_restarts.set(sum(host["restarts"] for host in tracker.hosts().values()))
        for reward in tracker.rewards:
            metrics.depth.labels(reward).set(tracker.depth(reward))
            metrics.age.labels(reward).set(now - oldest.get(reward, now))
            mine = tracker.find_statuses(reward)
            metrics.up.labels(reward).set(sum(status["replicas"] for status in mine))
            metrics.restarts.labels(reward).set(sum(status["restarts"] for status in mine))
            left = tracker.completed[reward]
            rate = left - self._completed_before.get(reward, left)
            tracker.rates[reward] = 0.8 * tracker.rates.get(reward, 0.0) + 0.2 * rate
            self._completed_before[reward] = left

    async def requeue_unknown(self) -> None:
        """Queue jobs again that the broker has lost."""
        tracker, old = self.tracker, uptime() - _REQUEUE_AFTER_S
        jobs = [entry.job for entry in tracker.open.values() if entry.since < old]
        for i in range(0, len(jobs), _AT_ONCE):
            part, lost = jobs[i : i + _AT_ONCE], set()
            undecoded = await call_spool(tracker.spool, tracker.spool.find_undecoded, part)
            for name in (*tracker.rewards, DECODE_QUEUE):
                if ids := [job.id for job in part if tracker.belongs_in_queue(job, name, undecoded)]:
                    async with asyncio.timeout(BROKER_S):
                        lost.update(await tracker.queue.unknown(name, ids))
            if again := [job for job in part if job.id in lost and job.id in tracker.open]:
                tracker.metrics.requeued.labels("unknown").inc(len(again))
                await tracker.enqueue_jobs(again)

    async def recover(self) -> None:
        """Take over jobs in a shared spool whose front has stopped."""
        tracker, before = self.tracker, self._open_before
        jobs = await asyncio.to_thread(lambda: list(tracker.spool.open_jobs()))
        self._open_before = {job.id for job in jobs}
        for job in jobs:
            if job.id in before and job.id not in tracker.open:
                missing = await asyncio.to_thread(tracker.spool.missing_rewards, job)
                if not missing:
                    await asyncio.to_thread(tracker.spool.finish, job)
                elif tracker.track(job, set(missing)):
                    await tracker.enqueue_jobs([job])

    async def sweep(self) -> None:
        """Remove results that have expired."""
        config = self.tracker.config
        await asyncio.to_thread(self.tracker.spool.sweep, config.result_ttl_s, config.max_finished_jobs)


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
