"""One reward on this host: its replicas are started, given batches of jobs, and restarted when they crash."""

import asyncio
import logging
import time
from dataclasses import asdict
from typing import Any

from cosmos_rl_reward.progress import Totals
from cosmos_rl_reward.spool import Spool
from cosmos_rl_reward.worker.batches import Item
from cosmos_rl_reward.worker.delivery import Delivery
from cosmos_rl_reward.worker.jobs import Announce, Jobs, Requeue
from cosmos_rl_reward.worker.replica import Failed, Replica, ReplicaExited
from cosmos_rl_reward.worker.spec import Health, PoolSpec

logger = logging.getLogger(__name__)
_LAST_S = 16.0  # for writing the last results when the host stops
_BREAKER = 5  # crashes in a row without a result in between, after which the reward counts as failed
_MAX_CRASH_BACK_OFF = 3  # index into the next line: while jobs wait, a replica that crashed is restarted soon
_BACK_OFF_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)


class Pool:
    """Scores jobs of one reward. ``run`` is what the queue calls; ``serve`` keeps the replicas running.

    Attributes:
        wanted: set when a process is to run.
        available: set while jobs may come.
    """

    def __init__(self, spec: PoolSpec, spool: Spool, announce: Announce, requeue: Requeue) -> None:
        self.spec = spec
        self._jobs = jobs = Jobs(spec, spool, announce, requeue)
        self.health = Health()
        self.wanted, self.available = asyncio.Event(), asyncio.Event()
        self._delivery = Delivery(jobs, self.health)
        self._up: set[int] = set()
        self._crashes = 0
        self._failures: dict[int, int] = {}  # of each replica, in a row: what its back-off depends on
        if spec.lazy:
            self.health.state = "idle"
            self.available.set()  # jobs may come; the first one starts the process
        else:
            self.wanted.set()

    def status(self) -> dict[str, Any]:
        """Health for the fronts."""
        return {**vars(self.health), "replicas": len(self._up)}

    @property
    def totals(self) -> Totals:
        """What was done of its jobs here."""
        return self._jobs.totals

    async def run(self, job_id: str, tries: int) -> None:
        """Score one job; returns when its result is written (by whomever). See ``Jobs.run``."""
        self.wanted.set()
        await self._jobs.run(job_id, tries)

    @property
    def limit(self) -> int:
        """Samples in one call; 0 when jobs are not merged."""
        if not self.health.about.get("mergeable"):
            return 0
        return self._max_batch

    @property
    def concurrency(self) -> int:
        """Jobs to take at a time: enough to fill the next batch while one is scored."""
        return self.spec.workers.replicas * max(2, 2 * self._max_batch)

    @property
    def _max_batch(self) -> int:
        return self.spec.max_batch or self.health.about.get("max_batch", 1)

    async def serve(self) -> None:
        """Keep all replicas running until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.spec.workers.replicas):
                group.create_task(self._run_replica(number))

    async def _run_replica(self, number: int) -> None:
        while True:
            await self.wanted.wait()
            replica = Replica(self.spec.name, self.spec.workers.venv_python, self.spec.workers.environment)
            writing: list[asyncio.Task[None]] = []
            failures = self._failures.get(number, 0)
            try:
                await self._serve_batches(replica, number, writing)
            except asyncio.CancelledError:
                if writing:  # the store may stay unavailable; what is not written then is scored elsewhere
                    await asyncio.wait(writing, timeout=_LAST_S)
                    writing.pop().cancel()
                raise
            except Failed as error:
                failures += 1
                await self._fail(number, f"{error} (interpreter {replica.python})")
            except ReplicaExited as error:
                self._crashes += not error.repeated
                failures = min(max(0, self._crashes - 1), _MAX_CRASH_BACK_OFF)
                self.health.restarts += 1
                logger.error("%s: %s; restarting it", self.spec.name, error)
                self._up.discard(number)
                if self._crashes >= _BREAKER:
                    await self._fail(number, f"{self._crashes} times in a row: {error}")
            except Exception:  # an internal error, which must not affect the other rewards of this host
                failures = self._failures.get(number, 0) + 1
                self.health.restarts += 1
                logger.exception("%s: replica %d is restarted", self.spec.name, number)
            finally:
                self._up.discard(number)
                await replica.kill()
                if writing:
                    await writing.pop()
            self._failures[number] = failures
            await asyncio.sleep(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])

    async def _serve_batches(self, replica: Replica, number: int, writing: list[asyncio.Task[None]]) -> None:
        """Start a replica and have batches scored until it ends. ``writing`` has the task that writes the last one."""
        if not self.health.reason:
            self._set_state("loading", "")
        self.health.about = await replica.start(self.spec.message, self.spec.workers.start_timeout_s)
        self._up.add(number)
        self._set_state("ready", "")
        if self.health.about["warning"]:
            logger.warning("%s: %s", self.spec.name, self.health.about["warning"])
        waiting = self._jobs.waiting
        ending = asyncio.create_task(replica.wait_until_ended())
        ending.add_done_callback(lambda _: waiting.wake())
        try:
            while batch := await waiting.take(lambda: not ending.done(), self.limit, self.spec.max_wait_s):
                task = await self._score(replica, batch)
                self._failures[number] = self._crashes = 0
                if writing:
                    await writing.pop()
                if task is not None:
                    writing.append(task)
            raise ReplicaExited(await replica.exit_reason())
        finally:
            ending.cancel()

    def _set_state(self, state: str, reason: str) -> None:
        if (state, reason) != (self.health.state, self.health.reason):
            self.health.state, self.health.reason, self.health.since = state, reason, time.time()
            logger.info("%s: %s", self.spec.name, ": ".join(filter(None, (state, reason))))
        if state == "ready":
            self.available.set()

    async def _fail(self, number: int, reason: str) -> None:
        self._up.discard(number)
        if self._up:
            logger.error("%s: replica %d: %s", self.spec.name, number, reason)
            return
        self._set_state("failed", reason)
        if self.spec.lazy:  # the jobs that need it get the reason; the next one restarts it
            self.wanted.clear()
            await self._jobs.fail_all(reason)
        else:
            self.available.clear()
            self._jobs.return_all_to_queue()

    async def _score(self, replica: Replica, batch: list[Item]) -> asyncio.Task[None] | None:
        """Have a batch scored; the returned task writes its results, while the next one is scored."""
        try:
            return await self._score_unfinished(replica, batch)
        except ReplicaExited:
            raise
        except Exception:
            for item in batch:
                self._jobs.return_to_queue(item)
            raise

    async def _score_unfinished(self, replica: Replica, batch: list[Item]) -> asyncio.Task[None] | None:
        unfinished = await self._jobs.find_unfinished([item.job for item in batch])
        for item in batch:
            if item.job.id not in unfinished:
                self._jobs.finish(item)
        batch = [item for item in batch if item.job.id in unfinished]
        if not batch:
            return None
        began = time.monotonic()
        files = [asdict(item.files) for item in batch if item.files is not None]
        try:
            replies = await replica.score(files, self.spec.workers.deadline_s)
        except ReplicaExited as error:
            error.repeated = all(item.attempts for item in batch)
            for item in batch:
                await self._jobs.retry(item, str(error), count=len(batch) == 1)
            raise
        return asyncio.create_task(self._delivery.deliver(list(zip(batch, replies, strict=True)), began))
