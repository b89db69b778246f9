"""The unfinished jobs of one front: counted for limits, waited for, given their final state.

The state is in the spool; this is rebuilt from it at start, and ``reconciler`` keeps comparing the two.
"""

import asyncio
import collections
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from cosmos_rl_reward.broker.event_bus import EventBus
from cosmos_rl_reward.broker.queue import StreamQueue
from cosmos_rl_reward.clock import boot, uptime
from cosmos_rl_reward.config import ServiceConfig
from cosmos_rl_reward.errors import StoreUnavailable
from cosmos_rl_reward.front.metrics import Metrics
from cosmos_rl_reward.front.recent import Recent
from cosmos_rl_reward.payload.errors import Refused
from cosmos_rl_reward.progress import RewardProgress, Snapshot, Totals
from cosmos_rl_reward.results import SUCCEEDED, without_scores
from cosmos_rl_reward.spool import Job, Spool
from cosmos_rl_reward.store import call_spool
from cosmos_rl_reward.worker.spec import DECODE_QUEUE, HOST

logger = logging.getLogger(__name__)
BROKER_S = 5.0  # longest wait for an answer of the broker
_AT_ONCE = 20  # requests that are woken in one go


@dataclass
class OpenJob:
    """A job and its rewards without a result.

    Attributes:
        order: its number in each reward's queue.
        since: ``uptime`` when it was accepted, or when this front first found it if another machine accepted it.
    """

    job: Job
    missing: set[str]
    order: dict[str, int] = field(default_factory=dict)
    since: float = 0.0

    def __post_init__(self) -> None:
        self.since = self.job.uptime if self.job.boot == boot() else uptime()


class Reservation:
    """Room for a job that is being received, so that many at once do not exceed a limit together."""

    def __init__(self, tracker: "JobTracker") -> None:
        self._tracker = tracker
        self._rewards: tuple[str, ...] = ()
        self._size = self._written = 0

    def extend(self, size: int, rewards: tuple[str, ...] | None = None, written: int = 0) -> None:
        """Reserve at least ``size`` bytes, for ``rewards``, of which ``written`` are on the disk already.

        Raises:
            Refused: there is no room.
        """
        size, written = max(size, self._size), max(written, self._written)
        if rewards is None:
            rewards = self._rewards
        self.release()
        self._tracker.admit(rewards, size, size - written)
        self._rewards, self._size, self._written = rewards, size, written
        self._tracker.reserved.update(rewards)
        self._tracker.reserved_bytes += size
        self._tracker.unwritten += size - written

    def release(self) -> None:
        """Free the room."""
        self._tracker.reserved.subtract(self._rewards)
        self._tracker.reserved_bytes -= self._size
        self._tracker.unwritten -= self._size - self._written
        self._rewards, self._size, self._written = (), 0, 0

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class JobTracker:
    """Open jobs of this service. One per front."""

    def __init__(
        self, config: ServiceConfig, spool: Spool, queue: StreamQueue, bus: EventBus, metrics: Metrics
    ) -> None:
        self.config, self.spool, self.queue, self.bus, self.metrics = config, spool, queue, bus, metrics
        self.rewards = tuple(args.reward_type for args in config.enabled)
        self.statuses: dict[str, dict[str, Any]] = {}
        self.errors: collections.deque[dict[str, Any]] = collections.deque(maxlen=50)
        self.bytes = 0
        self.reserved: collections.Counter[str] = collections.Counter()
        self.reserved_bytes = self.unwritten = 0
        self.open: dict[str, OpenJob] = {}
        self._depth: collections.Counter[str] = collections.Counter()
        self._numbered: collections.Counter[str] = collections.Counter()
        self.completed: collections.Counter[str] = collections.Counter()
        self._waiters: dict[tuple[str, str], list[asyncio.Future[None]]] = {}
        self.rates: dict[str, float] = {}  # jobs per second, about
        self.recent: dict[str, Recent] = collections.defaultdict(Recent)
        self.totals: dict[str, Totals] = collections.defaultdict(Totals)

    def reserve(self) -> "Reservation":
        """Room for one job that is being received; use as a context manager."""
        return Reservation(self)

    def admit(self, rewards: tuple[str, ...], size: int, unwritten: int) -> None:
        """Raise ``Refused`` (429, 503 or 507) when a job of ``size`` bytes cannot be taken now."""
        for reward in rewards:
            state, reason = self.state(reward)
            if state == "failed":
                raise Refused(f"reward {reward} is not available: {reason}", 503)
            if self._depth[reward] + self.reserved[reward] >= self.config.max_queued_jobs:
                limit = self.config.max_queued_jobs
                raise Refused(f"reward {reward} has {limit} jobs waiting (max_queued_jobs); try again later", 429)
        taken = self.bytes + self.reserved_bytes
        if taken + size > self.config.max_spool_bytes:
            raise Refused(f"{taken} bytes are waiting (max_spool_bytes); try again later", 429)
        if self.spool.free_bytes() - self.unwritten - unwritten < self.config.min_free_bytes:
            raise Refused("the disk of the service is full", 507)

    def retry_after(self, rewards: tuple[str, ...] = ()) -> int:
        """Seconds after which a refused job has a chance: a tenth of the queue's time."""
        waits = [self._depth[r] / 10 / self.rates[r] for r in rewards or self.rewards if self.rates.get(r)]
        return max(1, min(60, round(max(waits, default=1))))

    def state(self, reward: str) -> tuple[str, str]:
        """``ready``, ``idle``, ``loading``, ``failed`` or ``absent`` (not served), and why; the best of all hosts."""
        for state in ("ready", "idle", "loading", "failed"):
            for status in self.find_statuses(reward):
                if status["state"] == state:
                    return state, status["reason"]
        return "absent", "no worker serves it yet"

    def look(self) -> Snapshot:
        """How far the rewards are."""
        found = {}
        for name in self.rewards:
            found[name] = RewardProgress(*self.state(name), self.depth(name), self.totals[name])
        return Snapshot(uptime(), found)

    def find_statuses(self, name: str) -> list[dict[str, Any]]:
        """What each host last published about a reward."""
        return [status[name] for status in self.statuses.values() if name in status]

    def hosts(self) -> dict[str, dict[str, Any]]:
        """The worker hosts by machine, with their restarts; one that just crashed may still be listed."""
        found: dict[str, dict[str, Any]] = {}
        for host in self.find_statuses(HOST):
            known = found.setdefault(host["machine"], {"restarts": 0})
            known["restarts"] = max(known["restarts"], host["restarts"])
        return found

    async def add(self, job: Job) -> None:
        """Track an accepted job and queue it; if the broker is unavailable, it is queued later."""
        if not self.track(job, set(job.rewards)):
            return
        for reward in job.rewards:
            self.metrics.accepted.labels(reward).inc()
        try:
            await self.enqueue_jobs([job])
        except Exception as error:
            logger.warning("job %s waits in the spool, the broker does not answer: %r", job.id, error)

    def track(self, job: Job, missing: set[str]) -> bool:
        if job.id in self.open:
            return False
        entry = self.open[job.id] = OpenJob(job, missing)
        self.bytes += job.disk_bytes
        for reward in missing:
            self._depth[reward] += 1
            self._numbered[reward] += 1
            entry.order[reward] = self._numbered[reward]
        return True

    async def enqueue_jobs(self, jobs: list[Job]) -> None:
        """Queue jobs for the decoder, or for their rewards without a result."""
        wanted: dict[str, list[str]] = {}
        undecoded = await call_spool(self.spool, self.spool.find_undecoded, jobs)
        for job in jobs:
            names: set[str] = set()
            if job.id in undecoded:
                names = {DECODE_QUEUE}
            elif (entry := self.open.get(job.id)) is not None:
                names = entry.missing
            for name in names & {*self.rewards, DECODE_QUEUE}:
                wanted.setdefault(name, []).append(job.id)
        async with asyncio.timeout(BROKER_S):
            for name, ids in wanted.items():
                await self.queue.put(name, ids)

    def position(self, job_id: str, reward: str) -> int | None:
        """How many earlier jobs of the reward are not finished (about)."""
        entry = self.open.get(job_id)
        if entry is None or reward not in entry.order:
            return None
        return max(0, entry.order[reward] - self.completed[reward] - 1)

    def depth(self, reward: str) -> int:
        """Jobs of the reward without a result."""
        return self._depth[reward]

    async def wait(self, job_id: str, reward: str, timeout_s: float) -> None:
        """Return when there is a result, or after ``timeout_s``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        key = (job_id, reward)
        self._waiters.setdefault(key, []).append(future)
        end = time.monotonic() + timeout_s
        try:
            while not await call_spool(self.spool, self.spool.has_result, job_id, reward):
                left = end - time.monotonic()
                if left <= 0 or (await asyncio.wait({future}, timeout=min(left, self.spool.poll_s)))[0]:
                    return
        finally:
            self._waiters[key].remove(future)
            if not self._waiters[key]:
                del self._waiters[key]

    def awaited_results(self) -> set[tuple[str, str]]:
        """Results, as (job, reward), that requests wait for; ``Reconciler.reconcile`` looks for them."""
        return set(self._waiters)

    def _wake(self, futures: list[asyncio.Future[None]]) -> None:
        """Wake some at a time, so that other requests are served in between."""
        for future in futures[:_AT_ONCE]:
            if not future.done():
                future.set_result(None)
        if rest := futures[_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._wake, rest)

    async def end(self, job_id: str, reward: str, state: str, error: str) -> bool:
        """Give a job a final state without scores, unless it has one. Returns whether it got this one."""
        data = without_scores(reward, state, error)
        written = await asyncio.to_thread(self.spool.write_result, job_id, reward, data)
        event = {"id": job_id, "reward": reward, "state": state, "error": error}
        await self.complete(event)
        if written:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(BROKER_S):  # ``wait_for`` of Python 3.11 can lose a cancellation
                    await self.bus.publish([event])
        return written

    async def complete(self, event: dict[str, Any]) -> None:
        """Record a result; the job's body is removed when it was the last one."""
        if (job := self.record(event)) is not None:
            await self.finish([job])

    def record(self, event: dict[str, Any]) -> Job | None:
        """Record a result and wake requests that wait for it. Returns the job when it was the last one."""
        job_id, reward = event["id"], event["reward"]
        self._wake(list(self._waiters.get((job_id, reward), ())))
        entry = self.open.get(job_id)
        if entry is None or reward not in entry.missing:
            return None
        entry.missing.discard(reward)
        self._depth[reward] -= 1
        self.completed[reward] += 1
        if event["state"] == SUCCEEDED:  # without these numbers when it was found in the spool
            event = {"items": entry.job.count, "failed": 0, **event}
        self.metrics.count_finished(event)
        self.totals[reward] = self.totals[reward].count(event)
        if "score_s" in event:
            self.recent[reward].add(uptime() - entry.since, event["items"], event.get("means", {}))
        if event.get("error"):
            self.errors.appendleft({"time": time.time(), **event})
        if entry.missing:
            return None
        del self.open[job_id]
        self.bytes -= entry.job.disk_bytes
        return entry.job

    async def finish(self, jobs: list[Job]) -> None:
        """Remove the bodies of finished jobs. After an interruption ``load`` and ``recover`` do it."""
        await asyncio.to_thread(self._finish, jobs)

    def _finish(self, jobs: list[Job]) -> None:
        for job in jobs:
            try:
                self.spool.finish(job)
            except StoreUnavailable as error:
                logger.warning("job %s is finished, but its body is not removed yet: %s", job.id, error)

    def load(self) -> None:
        """Read the spool: all jobs that were accepted and are not finished, oldest first."""
        jobs = sorted(self.spool.open_jobs(), key=lambda job: job.accepted)
        wanted = [(job.id, reward) for job in jobs for reward in job.rewards]
        there = {(job_id, reward) for job_id, reward, _ in self.spool.find_results(wanted)}
        for job in jobs:
            missing = {reward for reward in job.rewards if (job.id, reward) not in there}
            if missing:
                self.track(job, missing)
            else:
                self.spool.finish(job)

    def belongs_in_queue(self, job: Job, name: str, undecoded: set[str]) -> bool:
        """Whether the open job has to be in the queue ``name`` now; ``undecoded``: jobs without decoded latents."""
        entry = self.open.get(job.id)
        if entry is None:
            return False
        if job.id in undecoded:
            return name == DECODE_QUEUE
        return name in entry.missing
