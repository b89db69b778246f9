"""The jobs of one reward on this host, from their delivery until each is finished, failed, or back in its queue."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from cosmos_rl_reward.progress import Totals
from cosmos_rl_reward.results import FAILED, printable, without_scores
from cosmos_rl_reward.spool import Files, Job, Spool
from cosmos_rl_reward.worker.batches import Batches, Item
from cosmos_rl_reward.worker.spec import DECODE_QUEUE, PoolSpec

logger = logging.getLogger(__name__)
_MAX_TRIES = 20  # times a job is delivered by the broker; its hosts may crash for other reasons than the job
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between tries to read or write jobs and results; the last one repeats

Announce = Callable[[dict[str, Any]], Awaitable[None]]
Requeue = Callable[[str, str], Awaitable[None]]


class RetryingSpool:
    """Calls functions of a spool until they succeed: a full disk is emptied, and a store becomes available again.

    ``name`` is for the log.
    """

    def __init__(self, spool: Spool, name: str) -> None:
        self.spool, self._name = spool, name

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Read from the spool; a folder is read at once. That a job does not exist (any more) is a valid answer."""
        try:
            if not self.spool.remote:
                return function(*arguments)
        except FileNotFoundError:
            raise
        except OSError as error:  # a full disk has no room for a folder either
            logger.debug("%s: %s", self._name, error)
        return await self.retry(function, *arguments, missing_is_final=True)

    async def retry(self, function: Callable[..., Any], *arguments: Any, missing_is_final: bool = False) -> Any:
        """Call the spool in a thread, until it succeeds."""
        for number in itertools.count():
            try:
                return await asyncio.to_thread(function, *arguments)
            except OSError as error:
                if missing_is_final and isinstance(error, FileNotFoundError):
                    raise
                logger.error("%s: jobs or results cannot be read or written: %s", self._name, error)
            await asyncio.sleep(_PAUSES_S[min(number, len(_PAUSES_S) - 1)])


class Jobs:
    """The jobs on this host, and how often each was tried."""

    def __init__(self, spec: PoolSpec, spool: Spool, announce: Announce, requeue: Requeue) -> None:
        self.spec, self.spool, self.announce, self.requeue = spec, spool, announce, requeue
        self.retrying = RetryingSpool(spool, spec.name)
        self.waiting = Batches()
        self.totals = Totals()
        self._items: dict[str, Item] = {}
        self._attempts: dict[str, int] = {}  # also of jobs that were returned to the queue

    async def run(self, job_id: str, tries: int) -> None:
        """Have one job scored; returns when its result is written, here or elsewhere.

        Raises:
            RuntimeError: it is returned to the queue.
        """
        if (item := self._items.get(job_id)) is None:
            item = await self._admit(job_id, tries)
            if item is None:
                return
        try:
            await asyncio.shield(item.done)
        except asyncio.CancelledError:
            if item.done.cancelled():
                raise RuntimeError("this host cannot score it now") from None
            raise

    async def _admit(self, job_id: str, tries: int) -> Item | None:
        """Add a job, with its files, to those that wait for a replica; None when there is nothing to do for it here."""
        job = await self.retrying.call(self.spool.job, job_id)
        if job is None or not await self.find_unfinished([job]):
            return None
        needs_pixels = job.media == "latent" and not self.spec.decoding
        if needs_pixels and not await self.retrying.call(self.spool.has_decoded, job_id):
            await self.requeue(DECODE_QUEUE, job_id)
            return None
        done = asyncio.get_running_loop().create_future()
        item = Item(job, time.monotonic(), done, self._attempts.get(job_id, 0))
        if tries > _MAX_TRIES:
            await self.fail(item, f"delivered {tries - 1} times without a result")
            return None
        item.files = await self._acquire(job)
        if (known := self._items.get(job_id)) is not None:  # delivered once more while the files were fetched
            self.spool.release(item.files)
            return known
        self._items[job_id] = item
        self.waiting.put(item)
        return item

    async def _acquire(self, job: Job) -> Files:
        if not self.spool.remote:
            return await self.retrying.call(self.spool.acquire, job, not self.spec.decoding)
        coming = asyncio.ensure_future(self.retrying.call(self.spool.acquire, job, not self.spec.decoding))
        try:
            return await asyncio.shield(coming)
        except asyncio.CancelledError:
            coming.add_done_callback(self._release_late)
            raise

    def _release_late(self, coming: asyncio.Future[Files]) -> None:
        if not coming.cancelled() and coming.exception() is None:
            self.spool.release(coming.result())

    async def find_unfinished(self, jobs: list[Job]) -> set[str]:
        """Ids of those jobs that are not finished."""
        return await self.retrying.call(self._find_unfinished, jobs)

    def _find_unfinished(self, jobs: list[Job]) -> set[str]:
        if self.spec.decoding:
            return {job.id for job in jobs if self.spool.missing_rewards(job) and not self.spool.has_decoded(job.id)}
        return self.spool.without_result([job.id for job in jobs], self.spec.name)

    def finish(self, item: Item) -> None:
        """The job has its result, written here or elsewhere."""
        self._items.pop(item.job.id, None)
        self._attempts.pop(item.job.id, None)
        self._release(item)
        if not item.done.done():
            item.done.set_result(None)

    def return_to_queue(self, item: Item) -> None:
        """Let the queue deliver the job again, here or elsewhere."""
        self._items.pop(item.job.id, None)
        self._release(item)
        item.done.cancel()

    def return_all_to_queue(self) -> None:
        """``return_to_queue`` for all jobs."""
        self.waiting.clear()
        for item in list(self._items.values()):
            self.return_to_queue(item)

    def _release(self, item: Item) -> None:
        if item.files is not None:
            self.spool.release(item.files)

    async def retry(self, item: Item, error: str, count: bool) -> None:
        """Let the job wait again; it is scored alone from now on, so that a bad job affects no other.

        Args:
            count: whether the job may be the cause, so that it fails after ``max_attempts``.
        """
        item.attempts = self._attempts[item.job.id] = item.attempts + 1
        if item.done.cancelled():  # it was returned meanwhile, with its files: the queue delivers it again
            return
        if count and item.attempts >= self.spec.max_attempts:
            await self.fail(item, f"gave up after {item.attempts} attempts: {error}")
            return
        self.waiting.put(item)

    async def fail(self, item: Item, error: str) -> None:
        """The job has failed for good."""
        error, name = printable(error), self.spec.name
        logger.error("%s: job %s failed: %s", name, item.job.id, error)
        names, prefix = [name], ""
        if self.spec.decoding:
            names, prefix = await self.retrying.retry(self.spool.missing_rewards, item.job), "decoding latents: "
        for name in names:
            result = (item.job.id, name, without_scores(name, FAILED, prefix + error))
            await self.retrying.retry(self.spool.write_results, [result])
            await self.announce({"id": item.job.id, "reward": name, "state": FAILED, "error": error[:500]})
        self.totals = self.totals.count({"state": FAILED})
        self.finish(item)

    async def fail_all(self, error: str) -> None:
        """``fail`` for all jobs."""
        for item in list(self._items.values()):
            await self.fail(item, error)
        self.waiting.clear()
