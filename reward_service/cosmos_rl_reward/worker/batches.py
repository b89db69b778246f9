"""Jobs that wait for a replica, and how they are put together for one call of the reward."""

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

from cosmos_rl_reward.spool import Files, Job

_YIELD_S = 3.0


@dataclass
class Item:
    """A job on this host; ``done`` completes with it, or is cancelled when the job is returned to its queue."""

    job: Job
    queued: float
    done: asyncio.Future[None]
    attempts: int = 0
    files: Files | None = None

    def __lt__(self, other: "Item") -> bool:
        """Oldest first; a job that failed yields to those queued soon after it, so that bad jobs cannot block."""
        return self.queued + _YIELD_S * self.attempts < other.queued + _YIELD_S * other.attempts

    def fits(self, first: "Item") -> bool:
        """Whether it may be scored in one call with ``first``: the same image shape, and not tried before."""
        return not self.attempts and self.job.array.shape[1:] == first.job.array.shape[1:]


class Batches:
    """A priority queue of jobs that several replicas take from."""

    def __init__(self) -> None:
        self._waiting: list[Item] = []
        self._changed = asyncio.Event()

    def put(self, item: Item) -> None:
        """Add a job."""
        heapq.heappush(self._waiting, item)
        self._changed.set()

    def clear(self) -> None:
        """Remove all jobs."""
        self._waiting.clear()

    def wake(self) -> None:
        """Let callers of ``take`` check ``alive`` again."""
        self._changed.set()

    async def take(self, alive: Callable[[], bool], limit: int, wait_s: float) -> list[Item]:
        """The next jobs for one call, none of which is lost when this is cancelled; empty when ``alive`` is false.

        Args:
            limit: samples in one call; 0 takes one job, whatever its size.
            wait_s: how long the first job may wait for others.
        """
        while alive() and not self._waiting:
            await self._change()
        if not alive():
            return []
        batch = [heapq.heappop(self._waiting)]
        try:
            await self._fill(batch, limit, time.monotonic() + wait_s)
        except asyncio.CancelledError:
            for item in batch:
                self.put(item)
            raise
        return batch

    async def _fill(self, batch: list[Item], limit: int, end: float) -> None:
        """Add jobs of one image shape; those that were tried before stay alone."""
        first = batch[0]
        count = first.job.count
        while not first.attempts and count < limit:
            if not self._waiting:
                try:
                    async with asyncio.timeout(end - time.monotonic()):
                        await self._change()
                except TimeoutError:
                    return
                continue
            item = self._waiting[0]
            if not item.fits(first) or count + item.job.count > limit:
                return
            batch.append(heapq.heappop(self._waiting))
            count += item.job.count

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
