"""All replicas of one reward on this host: collects jobs into batches, retries, restarts, and writes results."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cosmos_rl_reward.results import FAILED, SUCCEEDED, printable, without_scores
from cosmos_rl_reward.spool import Files, Job, Spool
from cosmos_rl_reward.worker.replica import Died, Failed, Replica

logger = logging.getLogger(__name__)
DECODE_QUEUE = "_decode"
HOST = "_host"  # key of a host's own state among those of its rewards; no reward can have either name
_MAX_TRIES = 20  # times a job is handed out by the broker; its hosts may die for other reasons than the job
_YIELD_S = 3.0
_LAST_S = 16.0  # for writing the last results when the host ends
_WRITE_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between tries to read or write jobs and results; the last one repeats
_BREAKER = 5  # deaths in a row without a result in between, after which the reward counts as failed
_MAX_DEATH_BACK_OFF = 3  # index into the next line: while jobs wait, a worker that died is started again soon
_BACK_OFF_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)

Announce = Callable[[dict[str, Any]], Awaitable[None]]
Requeue = Callable[[str, str], Awaitable[None]]


@dataclass(frozen=True)
class PoolSpec:
    """How a reward is run. ``message`` is the first thing a scorer is told."""

    name: str
    message: dict[str, Any]
    venv_python: str
    environment: dict[str, str]
    replicas: int
    max_batch: int
    max_wait_s: float
    deadline_s: float
    start_timeout_s: float
    max_attempts: int
    lazy: bool = False


@dataclass
class _Item:
    job: Job
    queued: float
    done: asyncio.Future[None]
    attempts: int = 0
    files: Files | None = None

    def __lt__(self, other: "_Item") -> bool:
        """Oldest first; a job that failed lets those pass that came soon after it, so that bad jobs cannot block."""
        return self.queued + _YIELD_S * self.attempts < other.queued + _YIELD_S * other.attempts


@dataclass
class Health:
    """State of a reward on this host, as shown to clients."""

    state: str = "loading"
    reason: str = ""
    since: float = field(default_factory=time.time)
    about: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    last_success: float = 0.0


class Pool:
    """Scores jobs of one reward. ``run`` is what the queue calls; ``serve`` keeps the replicas going."""

    def __init__(self, spec: PoolSpec, spool: Spool, announce: Announce, requeue: Requeue) -> None:
        self.spec = spec
        self.health = Health(state="idle" if spec.lazy else "loading")
        self.wanted = asyncio.Event()
        self.available = asyncio.Event()
        self._spool, self._announce, self._requeue = spool, announce, requeue
        self._waiting: asyncio.PriorityQueue[_Item] = asyncio.PriorityQueue()
        self._tried: dict[str, int] = {}  # attempts of jobs, also of those that were handed back
        self._items: dict[str, _Item] = {}
        self._up: set[int] = set()
        self._deaths = 0
        self._failures: dict[int, int] = {}  # of each replica, in a row: what its back-off depends on
        if spec.lazy:
            self.available.set()  # jobs may come; the first one starts the process
        else:
            self.wanted.set()

    @property
    def concurrency(self) -> int:
        """Jobs to hold at a time: enough to fill the next batch while one is scored."""
        batch = self.spec.max_batch or self.health.about.get("max_batch", 1)
        return self.spec.replicas * max(2, 2 * batch)

    def status(self) -> dict[str, Any]:
        """Health for the board."""
        health = self.health
        return {
            "state": health.state,
            "reason": health.reason,
            "since": health.since,
            "replicas": len(self._up),
            "restarts": health.restarts,
            "last_success": health.last_success,
            "about": health.about,
        }

    async def run(self, job_id: str, tries: int) -> None:
        """Score one job; returns when its result is written (by whomever)."""
        self.wanted.set()
        if (item := self._items.get(job_id)) is None:
            item = await self._take_in(job_id, tries)
            if item is None:
                return
        try:
            await asyncio.shield(item.done)
        except asyncio.CancelledError:
            if item.done.cancelled():
                raise RuntimeError("the job was let go") from None
            raise

    async def _take_in(self, job_id: str, tries: int) -> _Item | None:
        """Let a job wait for a replica, its files at hand; None when nothing is to be done for it here."""
        job = await self._ask(self._spool.job, job_id)
        if job is None or not await self._ask(self._unfinished, [job]):
            return None
        if job.media == "latent" and not self._decoding and not await self._ask(self._spool.has_decoded, job_id):
            await self._requeue(DECODE_QUEUE, job_id)
            return None
        done = asyncio.get_running_loop().create_future()
        item = _Item(job, time.monotonic(), done, self._tried.get(job_id, 0))
        if tries > _MAX_TRIES:
            await self._give_up(item, f"handed out {tries - 1} times without a result")
            return None
        item.files = await self._borrow(job)
        if (twin := self._items.get(job_id)) is not None:  # handed out once more while the files came
            self._spool.give_back(item.files)
            return twin
        self._items[job_id] = item
        self._waiting.put_nowait(item)
        return item

    async def _borrow(self, job: Job) -> Files:
        if not self._spool.remote:
            return await self._ask(self._spool.borrow, job, not self._decoding)
        borrowing = asyncio.ensure_future(self._ask(self._spool.borrow, job, not self._decoding))
        try:
            return await asyncio.shield(borrowing)
        except asyncio.CancelledError:
            borrowing.add_done_callback(self._not_needed)
            raise

    def _not_needed(self, borrowing: asyncio.Future[Files]) -> None:
        if not borrowing.cancelled() and borrowing.exception() is None:
            self._spool.give_back(borrowing.result())

    async def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Look into the spool, until it answers. A job that is not there (any more) is an answer."""
        try:
            if not self._spool.remote:
                return function(*arguments)
        except FileNotFoundError:
            raise
        except OSError as error:  # a full disk has no room for a folder either
            logger.debug("%s: %s", self.spec.name, error)
        return await self._patiently(function, *arguments, missing_is_final=True)

    async def _patiently(self, function: Callable[..., Any], *arguments: Any, missing_is_final: bool = False) -> Any:
        """Call the spool in a thread, again without end when it fails: a full disk is emptied, a store comes back."""
        for number in itertools.count():
            try:
                return await asyncio.to_thread(function, *arguments)
            except OSError as error:
                if missing_is_final and isinstance(error, FileNotFoundError):
                    raise
                logger.error("%s: jobs or results cannot be read or written: %s", self.spec.name, error)
            await asyncio.sleep(_WRITE_PAUSES_S[min(number, len(_WRITE_PAUSES_S) - 1)])

    @property
    def _decoding(self) -> bool:
        return self.spec.name == DECODE_QUEUE

    def _unfinished(self, jobs: list[Job]) -> set[str]:
        """Ids of those jobs for which there still is something to do."""
        if self._decoding:
            return {job.id for job in jobs if self._spool.missing_rewards(job) and not self._spool.has_decoded(job.id)}
        return self._spool.without_result([job.id for job in jobs], self.spec.name)

    async def serve(self) -> None:
        """Keep all replicas running until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.spec.replicas):
                group.create_task(self._keep(number))

    async def _keep(self, number: int) -> None:
        while True:
            await self.wanted.wait()
            replica = Replica(self.spec.name, self.spec.venv_python, self.spec.environment)
            writing: list[asyncio.Task[None]] = []
            failures = self._failures.get(number, 0)
            try:
                await self._work(replica, number, writing)
            except asyncio.CancelledError:
                if writing:  # the store may stay away; what is not written then is scored elsewhere
                    await asyncio.wait(writing, timeout=_LAST_S)
                    writing.pop().cancel()
                raise
            except Failed as error:
                failures += 1
                await self._fail(number, f"{error} (interpreter {replica.python})")
            except Died as error:
                self._deaths += not error.repeated
                failures = min(max(0, self._deaths - 1), _MAX_DEATH_BACK_OFF)
                self.health.restarts += 1
                logger.error("%s: %s; starting it again", self.spec.name, error)
                self._up.discard(number)
                if self._deaths >= _BREAKER:
                    await self._fail(number, f"{self._deaths} times in a row: {error}")
            except Exception:  # an error of ours: the other rewards of this host have nothing to do with it
                failures = self._failures.get(number, 0) + 1
                self.health.restarts += 1
                logger.exception("%s: replica %d is started again", self.spec.name, number)
            finally:
                self._up.discard(number)
                await replica.kill()
                if writing:
                    await writing.pop()
            self._failures[number] = failures
            await asyncio.sleep(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])

    async def _work(self, replica: Replica, number: int, writing: list[asyncio.Task[None]]) -> None:
        """Start a replica and have batches scored until it ends. ``writing`` has the task that writes the last one."""
        self._set("loading" if not self.health.reason else self.health.state, self.health.reason)
        self.health.about = await replica.start(self.spec.message, self.spec.start_timeout_s)
        self._up.add(number)
        self._set("ready", "")
        if self.health.about["warning"]:
            logger.warning("%s: %s", self.spec.name, self.health.about["warning"])
        while True:
            task = await self._score(replica, await self._take_or_die(replica))
            self._failures[number] = self._deaths = 0
            if writing:
                await writing.pop()
            if task is not None:
                writing.append(task)

    def _set(self, state: str, reason: str) -> None:
        if (state, reason) != (self.health.state, self.health.reason):
            self.health.state, self.health.reason, self.health.since = state, reason, time.time()
            logger.info("%s: %s%s", self.spec.name, state, f": {reason}" if reason else "")
        if state == "ready":
            self.available.set()

    async def _fail(self, number: int, reason: str) -> None:
        self._up.discard(number)
        if self._up:
            logger.error("%s: replica %d: %s", self.spec.name, number, reason)
            return
        self._set("failed", reason)
        if self.spec.lazy:  # the jobs that asked for it get the reason; the next one starts it again
            self.wanted.clear()
            for item in list(self._items.values()):
                await self._give_up(item, reason)
            while not self._waiting.empty():
                self._waiting.get_nowait()
        else:
            self.available.clear()
            self.let_go()

    def let_go(self) -> None:
        """Hand all jobs that wait back to the queue."""
        while not self._waiting.empty():
            self._waiting.get_nowait()
        for item in list(self._items.values()):
            self._hand_back(item)

    def _hand_back(self, item: _Item) -> None:
        """The queue hands the job out again, here or elsewhere."""
        self._items.pop(item.job.id, None)
        self._give_back(item)
        item.done.cancel()

    async def _take_or_die(self, replica: Replica) -> list[_Item]:
        """The next batch, unless the replica ends while it waits for one: then raises ``Died``."""
        taking, dying = asyncio.create_task(self._take()), asyncio.create_task(replica.ended())
        try:
            await asyncio.wait({taking, dying}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                return taking.result()
            raise Died(await replica.obituary())
        finally:
            late = not taking.done()
            taking.cancel()
            dying.cancel()
            await asyncio.wait({taking, dying})
            if late and not taking.cancelled():
                for item in taking.result():
                    self._waiting.put_nowait(item)

    async def _take(self) -> list[_Item]:
        """The next batch; nothing of it is lost when this is cancelled."""
        batch: list[_Item] = []
        try:
            await self._fill(batch)
        except asyncio.CancelledError:
            for item in batch:
                self._waiting.put_nowait(item)
            raise
        return batch

    async def _fill(self, batch: list[_Item]) -> None:
        """Collect jobs of one picture shape; those that were tried before stay alone."""
        first = await self._waiting.get()
        batch.append(first)
        about = self.health.about
        limit = self.spec.max_batch or about.get("max_batch", 1)
        count = first.job.count
        if not about.get("mergeable") or first.attempts or count >= limit:
            return
        end = time.monotonic() + self.spec.max_wait_s
        while count < limit:
            try:
                wait = end - time.monotonic()
                item = self._waiting.get_nowait() if wait <= 0 else await asyncio.wait_for(self._waiting.get(), wait)
            except (TimeoutError, asyncio.QueueEmpty):
                break
            if item.attempts or item.job.array.shape[1:] != first.job.array.shape[1:] or count + item.job.count > limit:
                self._waiting.put_nowait(item)
                break
            batch.append(item)
            count += item.job.count

    async def _score(self, replica: Replica, batch: list[_Item]) -> asyncio.Task[None] | None:
        """Have a batch scored; the returned task writes its results, while the next one is scored."""
        try:
            return await self._score_unfinished(replica, batch)
        except Died:
            raise
        except Exception:
            for item in batch:
                self._hand_back(item)
            raise

    async def _score_unfinished(self, replica: Replica, batch: list[_Item]) -> asyncio.Task[None] | None:
        unfinished = await self._ask(self._unfinished, [item.job for item in batch])
        batch = [item for item in batch if item.job.id in unfinished or self._done(item)]
        if not batch:
            return None
        began = time.monotonic()
        jobs = [asdict(item.files) for item in batch if item.files is not None]
        try:
            replies = await replica.score(jobs, self.spec.deadline_s)
        except Died as error:
            error.repeated = all(item.attempts for item in batch)
            for item in batch:
                await self._again(item, str(error), count=len(batch) == 1)
            raise
        return asyncio.create_task(self._deliver_safely(list(zip(batch, replies, strict=True)), began))

    async def _deliver_safely(self, answers: list[tuple[_Item, dict[str, Any]]], began: float) -> None:
        """Deliver; an error of ours costs these jobs another round through the queue, and nothing else."""
        try:
            await self._deliver(answers, began)
        except Exception:
            logger.exception("%s: results cannot be written", self.spec.name)
            for item, _ in answers:
                self._hand_back(item)

    async def _deliver(self, answers: list[tuple[_Item, dict[str, Any]]], began: float) -> None:
        """Write what was scored; what was not is tried again or fails."""
        scored = [(item, reply) for item, reply in answers if "body" in reply]
        if self._decoding:
            for item, _ in scored:
                await self._patiently(self._spool.share_decoded, item.job)
                for reward in await self._patiently(self._spool.missing_rewards, item.job):
                    await self._queue(reward, item.job.id)
        elif scored:
            results = [
                (item.job.id, self.spec.name, reply["body"].encode(errors="backslashreplace")) for item, reply in scored
            ]
            await self._patiently(self._spool.write_results, results)
        for item, reply in scored:
            self.health.last_success = time.time()
            self._done(item)
            await self._tell(
                {
                    "id": item.job.id,
                    "reward": self.spec.name,
                    "state": SUCCEEDED,
                    "wait_s": began - item.queued,
                    "score_s": reply["s"],
                    "batch": reply["batch"],
                    "items": item.job.count,
                    "failed": reply["failed"],
                    "means": reply.get("means", {}),
                }
            )
        for item, reply in answers:
            if "body" not in reply and reply["again"]:
                await self._again(item, reply["error"], count=True)
            elif "body" not in reply:
                await self._give_up(item, reply["error"])

    async def _queue(self, reward: str, job_id: str) -> None:
        """Queue a job; while the broker is away that is left to the fronts, which queue what the broker lost."""
        try:
            await self._requeue(reward, job_id)
        except Exception as error:
            logger.warning("job %s waits in the spool, the broker does not answer: %r", job_id, error)

    def _done(self, item: _Item) -> bool:
        """Somebody else finished it. Always false, so that it can end a filter."""
        self._items.pop(item.job.id, None)
        self._tried.pop(item.job.id, None)
        self._give_back(item)
        if not item.done.done():
            item.done.set_result(None)
        return False

    def _give_back(self, item: _Item) -> None:
        if item.files is not None:
            self._spool.give_back(item.files)

    async def _again(self, item: _Item, error: str, count: bool) -> None:
        # from now on it is scored alone, so that a bad job harms nobody else
        item.attempts = self._tried[item.job.id] = item.attempts + 1
        if item.done.cancelled():  # it was let go meanwhile, with its files: the queue hands it out again
            return
        if count and item.attempts >= self.spec.max_attempts:
            await self._give_up(item, f"gave up after {item.attempts} attempts: {error}")
            return
        self._waiting.put_nowait(item)

    async def _give_up(self, item: _Item, error: str) -> None:
        """The job has failed for good."""
        error = printable(error)
        logger.error("%s: job %s failed: %s", self.spec.name, item.job.id, error)
        names = await self._patiently(self._spool.missing_rewards, item.job) if self._decoding else [self.spec.name]
        prefix = "decoding latents: " if self._decoding else ""
        for name in names:
            result = (item.job.id, name, without_scores(name, FAILED, prefix + error))
            await self._patiently(self._spool.write_results, [result])
            await self._tell({"id": item.job.id, "reward": name, "state": FAILED, "error": error[:500]})
        self._done(item)

    async def _tell(self, event: dict[str, Any]) -> None:
        await self._announce(event)
