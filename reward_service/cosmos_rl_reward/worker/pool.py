"""All there is of one reward on this host: its jobs, and the replicas that score them."""

from typing import Any

from cosmos_rl_reward.spool import Spool
from cosmos_rl_reward.worker.jobs import Announce, Jobs, Requeue
from cosmos_rl_reward.worker.spec import PoolSpec
from cosmos_rl_reward.worker.supervision import Supervision


class Pool:
    """Scores jobs of one reward. ``run`` is what the queue calls; ``serve`` keeps the replicas going."""

    def __init__(self, spec: PoolSpec, spool: Spool, announce: Announce, requeue: Requeue) -> None:
        self.spec = spec
        self._jobs = Jobs(spec, spool, announce, requeue)
        self._replicas = Supervision(spec, self._jobs)
        self.serve = self._replicas.serve
        self.health = self._replicas.health
        self.wanted, self.available = self._replicas.wanted, self._replicas.available

    @property
    def concurrency(self) -> int:
        """Jobs to hold at a time."""
        return self._replicas.concurrency

    def status(self) -> dict[str, Any]:
        """Health for the board."""
        health = self.health
        return {
            "state": health.state,
            "reason": health.reason,
            "since": health.since,
            "replicas": self._replicas.replicas,
            "restarts": health.restarts,
            "last_success": health.last_success,
            "about": health.about,
        }

    async def run(self, job_id: str, tries: int) -> None:
        """Score one job; returns when its result is written (by whomever). See ``Jobs.run``."""
        self.wanted.set()
        await self._jobs.run(job_id, tries)
