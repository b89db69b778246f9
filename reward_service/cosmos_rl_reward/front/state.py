"""What the routes share."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from cosmos_rl_reward import __version__
from cosmos_rl_reward.config import ServiceConfig
from cosmos_rl_reward.front.auth import Auth
from cosmos_rl_reward.front.job_tracker import JobTracker
from cosmos_rl_reward.front.metrics import Metrics
from cosmos_rl_reward.front.uploads import UploadReceiver
from cosmos_rl_reward.payload.errors import Refused


@dataclass
class Front:
    """One front's parts. ``draining`` is set when it takes no more jobs."""

    config: ServiceConfig
    tracker: JobTracker
    receiver: UploadReceiver
    auth: Auth
    metrics: Metrics
    draining: bool = False
    polls: int = 0

    @staticmethod
    def from_request(request: Request) -> "Front":
        """The front that got the request."""
        return request.app.state.front

    def drain(self) -> None:
        """Take no more jobs."""
        self.draining = True

    @contextlib.contextmanager
    def poll(self, wait_s: float) -> Iterator[float]:
        """Seconds that a request may wait for results: none while half of the connections do."""
        if wait_s <= 0 or self.polls * 2 >= self.config.max_connections:
            yield 0.0
            return
        self.polls += 1
        try:
            yield wait_s
        finally:
            self.polls -= 1

    def allow(self, request: Request, scope: str) -> str:
        """Check the token; returns a name for it. Raises ``Refused``; 503 when new jobs are no longer taken."""
        name = self.auth.check(request.headers.get("authorization", ""), scope)
        if self.draining and scope == "submit":
            raise Refused("the service is stopping", 503)
        return name

    def describe(self) -> dict[str, Any]:
        """Rewards, their health, queues and limits, and the last errors."""
        config, rewards = self.config, {}
        for args in config.enabled:
            name = args.reward_type
            state, reason = self.tracker.state(name)
            mine = self.tracker.find_statuses(name)
            about = next((status["about"] for status in mine if status["about"]), {})
            rewards[name] = {
                "state": state,
                "reason": reason,
                "required": args.required,
                "queued": self.tracker.depth(name),
                "replicas": sum(status["replicas"] for status in mine),
                "restarts": sum(status["restarts"] for status in mine),
                "last_success": max((status["last_success"] for status in mine), default=0.0) or None,
                "per_second": round(self.tracker.rates.get(name, 0.0), 2),
                **{k: about[k] for k in ("media_types", "score_keys", "required_metadata", "warning") if k in about},
                "provenance": about.get("provenance", {}),
                "versions": about.get("versions", {}),
                **self.tracker.recent[name].summary(),
            }
        limits = ("max_body_bytes", "max_items", "max_pixels", "max_queued_jobs", "job_ttl_s", "result_ttl_s")
        return {
            "version": __version__,
            "time": time.time(),
            "rewards": rewards,
            "hosts": self.tracker.hosts(),
            "limits": {name: getattr(config, name) for name in limits},
            "spool_bytes": self.tracker.bytes,
            "errors": list(self.tracker.errors),
        }
