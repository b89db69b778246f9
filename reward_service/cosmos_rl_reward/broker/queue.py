"""The job queue: leases on Redis streams, behind the three calls that the service needs.

A reward's queue is a stream with one consumer group, and the set of the ids that are queued or running. An entry stays
pending while its job runs, and its consumer renews it every second; what was not renewed for ``LEASE_S`` is claimed by
another consumer. What was done is acknowledged in batches. While the broker is unavailable, running jobs continue:
what cannot be acknowledged then is delivered again, and its result is found in the spool.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from valkey.asyncio import Valkey
from valkey.exceptions import ResponseError, ValkeyError

logger = logging.getLogger(__name__)
LEASE_S = 4.0  # a job whose host crashed is delivered to another after this long
ANSWER_S = 10.0  # longest wait for an answer of the broker, connecting included
_RENEW_S = 1.0
_BLOCK_MS = 300  # longest wait for jobs in one call; ``stop`` is checked after it
_GATHER_S = 0.03  # finished jobs are acknowledged after this long, together with those finished meanwhile
_RETRY_S = 1.0  # a job whose run raised is delivered again after this long
_LOG_S = 10.0  # between two log lines about an unavailable broker
_GROUP = "workers"

Run = Callable[[str, int], Awaitable[None]]

_PUT = """
for _, id in ipairs(ARGV) do
  if redis.call('sadd', KEYS[2], id) == 1 then redis.call('xadd', KEYS[1], '*', 'job', id, 'tries', 1) end
end
"""
_FINISH = """
for i = 2, #ARGV, 3 do
  local entry, id, tries = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if redis.call('xack', KEYS[1], ARGV[1], entry) == 1 then
    redis.call('xdel', KEYS[1], entry)
    if tries == '0' then redis.call('srem', KEYS[2], id)
    else redis.call('xadd', KEYS[1], '*', 'job', id, 'tries', tries) end
  end
end
"""


@dataclass(frozen=True)
class Control:
    """How a consumer is stopped: ``stop`` takes no more jobs, ``release`` also returns running ones to the queue."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """Both."""
        self.release.set()
        self.stop.set()


def connect(url: str) -> Valkey:
    """A client that connects when it is asked, and again after a failure."""
    limits: dict[str, Any] = {"socket_connect_timeout": ANSWER_S / 2, "socket_timeout": ANSWER_S / 2}
    return Valkey.from_url(url, decode_responses=True, health_check_interval=10, **limits)


def _keys(queue: str) -> list[str]:
    return [f"cosmos_rl_reward:{{{queue}}}:jobs", f"cosmos_rl_reward:{{{queue}}}:known"]


class StreamQueue:
    """One queue per reward, of job ids, on a Redis or Valkey server. Use as an async context manager.

    Delivery is at least once: a job may be delivered again, with a higher ``tries``.
    """

    def __init__(self, url: str) -> None:
        self._client = connect(url)
        self._put = self._client.register_script(_PUT)

    async def __aenter__(self) -> "StreamQueue":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def put(self, queue: str, job_ids: Sequence[str]) -> None:
        """Queue jobs; those that are queued or running already stay as they are."""
        await self._put(_keys(queue), job_ids)

    async def unknown(self, queue: str, job_ids: Sequence[str]) -> list[str]:
        """Those of the jobs that are neither queued nor running."""
        known: Any = self._client.smismember(_keys(queue)[1], list(job_ids))
        return [job_id for job_id, found in zip(job_ids, await known, strict=True) if not found]

    async def consume(self, queue: str, run: Run, concurrency: int, control: Control) -> None:
        """Call ``run(job_id, tries)`` for jobs, up to ``concurrency`` at a time, until ``control`` ends it. A job is
        done when ``run`` returns; it is delivered again when ``run`` raises, or when this process exits. Reconnects
        without end while the broker is unavailable."""
        await _Consumer(self._client, queue, run, concurrency, control).serve()


class _Consumer:
    """One call of ``consume``: a loop that takes jobs, one that renews leases, one that acknowledges."""

    def __init__(self, client: Valkey, queue: str, run: Run, concurrency: int, control: Control) -> None:
        self._client, self._queue, self._run, self._control = client, queue, run, control
        self._concurrency = concurrency
        self._keys, self._name = _keys(queue), uuid.uuid4().hex
        self._finish = client.register_script(_FINISH)
        self._leases: dict[str, asyncio.Task[None]] = {}  # what runs, by the entry of the stream
        self._cursor = "0-0"  # where the search for leases that ran out is
        self._flushing = asyncio.Lock()
        self._ended: list[str | int] = []  # entry, job, and the number of its next try or 0: what ``_FINISH`` takes
        self._changed = asyncio.Event()  # a run has ended
        self._logged = -_LOG_S

    async def serve(self) -> None:
        """Take jobs and have them run, until ``control`` ends it."""
        tasks = [asyncio.create_task(self._reconnecting(part)) for part in (self._renew, self._acknowledge)]
        tasks.append(asyncio.create_task(self._release()))
        try:
            await self._reconnecting(self._take)
            while self._leases:
                self._changed.clear()
                await self._changed.wait()
            await self._flush()
        except (ValkeyError, OSError) as error:
            logger.warning("queue %s: the last jobs could not be acknowledged: %s", self._queue, error)
        finally:
            tasks += self._leases.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _reconnecting(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``part``, again after each failure of the broker."""
        while True:
            try:
                return await part()
            except (ValkeyError, OSError, TimeoutError) as error:
                if time.monotonic() - self._logged > _LOG_S:
                    logger.warning("queue %s: no broker (%s), connecting again", self._queue, error)
                    self._logged = time.monotonic()
            if self._control.stop.is_set() and part == self._take:
                return None
            await asyncio.sleep(0.2)

    async def _take(self) -> None:
        """Read new jobs, as many as there is room for, and those whose consumer has stopped."""
        stream, stop = self._keys[0], self._control.stop
        try:
            await self._client.xgroup_create(stream, _GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        claimed = -_RENEW_S
        while not stop.is_set():
            if (room := self._concurrency - len(self._leases)) <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            if time.monotonic() - claimed >= _RENEW_S:
                claimed = time.monotonic()
                await self._claim_expired(room)
                continue
            found = await self._client.xreadgroup(_GROUP, self._name, {stream: ">"}, count=room, block=_BLOCK_MS)
            for entry, fields in found[0][1] if found else ():
                self._start(entry, fields, 1)

    async def _claim_expired(self, room: int) -> None:
        """Claim jobs whose consumer has stopped."""
        stream, idle_ms = self._keys[0], int(LEASE_S * 1000)
        found = await self._client.xautoclaim(stream, _GROUP, self._name, idle_ms, self._cursor, count=room)
        self._cursor = found[0]
        for entry, fields in found[1]:
            if entry not in self._leases:
                delivered = 2
                for pending in await self._client.xpending_range(stream, _GROUP, entry, entry, 1):
                    delivered = pending["times_delivered"]
                self._start(entry, fields, delivered)

    def _start(self, entry: str, fields: dict[str, str], delivered: int) -> None:
        job_id, tries = fields["job"], int(fields["tries"]) + delivered - 1
        running = self._leases[entry] = asyncio.create_task(self._run_one(job_id, tries))
        running.add_done_callback(lambda _: self._note_end(entry, job_id, tries, running))
        if self._control.release.is_set():  # the broker had answered already
            running.cancel()

    async def _run_one(self, job_id: str, tries: int) -> None:
        try:
            await self._run(job_id, tries)
        except Exception as error:
            logger.error("job %s is returned to its queue: %r", job_id, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._control.release.wait()
            raise

    def _note_end(self, entry: str, job_id: str, tries: int, running: asyncio.Task[None]) -> None:
        next_try = 0
        if running.cancelled() or running.exception() is not None:
            next_try = tries + 1
        self._ended += [entry, job_id, next_try]
        del self._leases[entry]
        self._changed.set()

    async def _release(self) -> None:
        """Return running jobs to the queue when ``release`` is set."""
        await self._control.release.wait()
        for running in self._leases.values():
            running.cancel()

    async def _renew(self) -> None:
        """Renew the leases of running jobs."""
        while True:
            if self._leases:
                entries: list[Any] = list(self._leases)
                await self._client.xclaim(self._keys[0], _GROUP, self._name, 0, entries, justid=True)
            await asyncio.sleep(_RENEW_S)

    async def _acknowledge(self) -> None:
        """Acknowledge finished jobs, several in one message."""
        while True:
            await self._flush()
            if not self._ended:
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(_GATHER_S)

    async def _flush(self) -> None:
        async with self._flushing:
            if not self._ended:
                return
            ended, self._ended = self._ended, []
            try:
                await self._finish(self._keys, [_GROUP, *ended])
            except BaseException:
                self._ended = ended + self._ended
                raise
