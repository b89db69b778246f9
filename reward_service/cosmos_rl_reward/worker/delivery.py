"""From a scorer's replies to results in the spool."""

import logging
import time
from typing import Any

from cosmos_rl_reward.results import SUCCEEDED
from cosmos_rl_reward.worker.batches import Item
from cosmos_rl_reward.worker.jobs import Jobs
from cosmos_rl_reward.worker.spec import Health

logger = logging.getLogger(__name__)
Answers = list[tuple[Item, dict[str, Any]]]


class Delivery:
    """Writes results; jobs without one are retried or fail."""

    def __init__(self, jobs: Jobs, health: Health) -> None:
        self._jobs, self._health = jobs, health

    async def deliver(self, answers: Answers, began: float) -> None:
        """Deliver; an internal error returns these jobs to the queue and has no other effect.

        Args:
            began: ``time.monotonic`` when the call to the scorer began.
        """
        try:
            await self._deliver(answers, began)
        except Exception:
            logger.exception("%s: results cannot be written", self._jobs.spec.name)
            for item, _ in answers:
                self._jobs.return_to_queue(item)

    async def _deliver(self, answers: Answers, began: float) -> None:
        scored = [(item, reply) for item, reply in answers if "body" in reply]
        if self._jobs.spec.decoding:
            await self._publish_decoded([item for item, _ in scored])
        elif scored:
            await self._write(scored)
        for item, reply in scored:
            self._health.last_success = time.time()
            self._jobs.finish(item)
            await self._announce(item, reply, began)
        for item, reply in answers:
            if "body" not in reply and reply["again"]:
                await self._jobs.retry(item, reply["error"], count=True)
            elif "body" not in reply:
                await self._jobs.fail(item, reply["error"])

    async def _publish_decoded(self, items: list[Item]) -> None:
        retrying, spool = self._jobs.retrying, self._jobs.spool
        for item in items:
            await retrying.retry(spool.publish_decoded, item.job)
            for reward in await retrying.retry(spool.missing_rewards, item.job):
                await self._queue(reward, item.job.id)

    async def _queue(self, reward: str, job_id: str) -> None:
        """Queue a job; while the broker is unavailable that is left to the fronts, which queue what the broker lost."""
        try:
            await self._jobs.requeue(reward, job_id)
        except Exception as error:
            logger.warning("job %s waits in the spool, the broker does not answer: %r", job_id, error)

    async def _write(self, scored: Answers) -> None:
        name = self._jobs.spec.name
        results = [(item.job.id, name, reply["body"].encode(errors="backslashreplace")) for item, reply in scored]
        await self._jobs.retrying.retry(self._jobs.spool.write_results, results)

    async def _announce(self, item: Item, reply: dict[str, Any], began: float) -> None:
        event = {
            "id": item.job.id,
            "reward": self._jobs.spec.name,
            "state": SUCCEEDED,
            "wait_s": began - item.queued,
            "score_s": reply["s"],
            "batch": reply["batch"],
            "items": item.job.count,
            "failed": reply["failed"],
            "means": reply.get("means", {}),
        }
        self._jobs.totals = self._jobs.totals.count(event)
        await self._jobs.announce(event)
