"""The job queue, behind the three calls the service needs. The one in use is streaQ: leases on Redis streams."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from anyio import CancelScope
from streaq import StreaqRetry, Worker
from streaq.constants import REDIS_GROUP

logger = logging.getLogger(__name__)
LEASE_S = 4.0  # a job whose host died is handed to another after this long
_RENEW_S = 1.0
_TELL_S = 10.0  # between two lines of the log about a broker that is away
_TASK = "score"

Run = Callable[[str, int], Awaitable[None]]


@dataclass(frozen=True)
class Control:
    """How a consumer is ended: ``stop`` takes no more jobs, ``let_go`` also hands back those that run."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """Both."""
        self.let_go.set()
        self.stop.set()


class JobQueue(Protocol):
    """One queue per reward, of job ids. At least once: a job may be handed out again, with a higher ``tries``."""

    async def put(self, queue: str, job_ids: Sequence[str]) -> None:
        """Queue jobs; those that are queued or running already stay as they are."""
        ...

    async def unknown(self, queue: str, job_ids: Sequence[str]) -> list[str]:
        """Those of the jobs that are neither queued nor running."""
        ...

    async def consume(self, queue: str, run: Run, concurrency: int, control: "Control") -> None:
        """Call ``run(job_id, tries)`` for jobs, up to ``concurrency`` at a time, until told to stop. A job is done when
        ``run`` returns; it comes back when ``run`` raises, or when this process dies."""
        ...


class _Worker(Worker[Any]):
    """Renews leases well before they end, so that a busy machine does not lose them; lets go of them on request."""

    def __init__(self, url: str, queue: str, concurrency: int = 1) -> None:
        super().__init__(
            url,
            redis_kwargs={"connect_timeout": 5},
            queue_name=f"cosmos_rl_reward:{queue}",
            serializer=_encode,
            deserializer=msgspec.json.decode,
            handle_signals=False,
            concurrency=concurrency,
            prefetch=1,
            idle_timeout=LEASE_S,
        )
        self.let_go = asyncio.Event()

    async def signal_handler(self, scope: CancelScope) -> None:
        """Signals are the host's business."""

    async def renew_idle_timeouts(self, scope: CancelScope) -> None:
        try:
            with scope:
                while True:
                    async with self.redis.pipeline(transaction=False) as pipe:
                        for priority, running in self._running_tasks.items():
                            if running:
                                stream = self.stream_key + priority
                                pipe.xclaim(stream, REDIS_GROUP, self.id, 0, running, justid=True)
                    await asyncio.sleep(_RENEW_S)
        except Exception:
            self.let_go.set()  # the library waits for running jobs before it reports a lost connection
            raise


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


class StreaqQueue:
    """Queues on a Redis or Valkey server. Use as an async context manager, entered and left by one task."""

    def __init__(self, url: str, queues: Iterable[str]) -> None:
        self.url = url
        self._clients = {queue: _Worker(url, queue) for queue in queues}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "StreaqQueue":
        for client in self._clients.values():
            await self._stack.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def put(self, queue: str, job_ids: Sequence[str]) -> None:
        """See ``JobQueue``."""
        client = self._clients[queue]
        tasks = []
        for job_id in job_ids:
            task = client.enqueue_unsafe(_TASK, job_id)
            task.id = job_id  # the library refuses a second task of the same id
            tasks.append(task)
        await client.enqueue_many(tasks)

    async def unknown(self, queue: str, job_ids: Sequence[str]) -> list[str]:
        """See ``JobQueue``."""
        client = self._clients[queue]
        async with client.redis.pipeline(transaction=False) as pipe:
            known = [pipe.exists([client.task_key + job_id]) for job_id in job_ids]
        return [job_id for job_id, found in zip(job_ids, known, strict=True) if not await found]

    async def consume(self, queue: str, run: Run, concurrency: int, control: Control) -> None:
        """See ``JobQueue``. Connects again for ever when the broker goes away."""
        told = -_TELL_S
        while not control.stop.is_set():
            worker = _Worker(self.url, queue, concurrency)
            self._register(worker, run, control)
            serving = asyncio.create_task(worker.run_async())
            stopping = asyncio.create_task(control.stop.wait())
            try:
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
                serving.cancel()  # no new jobs; waits for those that run
                await serving
            except asyncio.CancelledError:
                if not serving.done() or not control.stop.is_set():
                    raise
            except Exception as error:
                if time.monotonic() - told > _TELL_S:
                    logger.warning("queue %s: the broker went away (%s), connecting again", queue, _first(error))
                    told = time.monotonic()
            finally:
                stopping.cancel()
                serving.cancel()
            await asyncio.sleep(0.2)

    @staticmethod
    def _register(worker: _Worker, run: Run, control: Control) -> None:
        async def task(job_id: str) -> None:
            running = asyncio.ensure_future(run(job_id, registered.context.tries))
            waits = [asyncio.ensure_future(event.wait()) for event in (worker.let_go, control.let_go)]
            await asyncio.wait({running, *waits}, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if not running.done():
                running.cancel()
                raise StreaqRetry(delay=0)
            if running.exception() is not None:
                logger.error("job %s goes back to its queue: %r", job_id, running.exception())
                raise StreaqRetry(delay=1)

        registered = worker.task(name=_TASK, max_tries=None, ttl=0, silent=True)(task)


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
