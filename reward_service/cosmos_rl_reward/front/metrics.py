"""Numbers for Prometheus."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300)


class Metrics:
    """All metrics of one front."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self.jobs = counter("reward_jobs", "Jobs that reached a final state", "reward", "state")
        self.accepted = counter("reward_jobs_accepted", "Jobs accepted", "reward")
        self.items = counter("reward_items", "Samples", "reward", "result")
        self.rejected = counter("reward_rejected", "Requests refused", "reason")
        self.denied = counter("reward_auth_failures", "Requests without a valid token")
        self.requeued = counter("reward_requeued", "Jobs put into the queue again", "reason")
        self.depth = gauge("reward_queue_depth", "Jobs without a result", "reward")
        self.age = gauge("reward_queue_age_seconds", "Age of the oldest job without a result", "reward")
        self.spool = gauge("reward_spool_bytes", "Bytes of unfinished jobs")
        self.up = gauge("reward_worker_up", "Replicas that are ready", "reward")
        self.restarts = gauge("reward_worker_restarts", "Restarts of replicas that crashed", "reward")
        self.host_restarts = gauge("reward_host_restarts", "Restarts of worker hosts that crashed")
        stages = ("stage", "reward")
        self.stage = Histogram("reward_stage_seconds", "Time per stage", stages, registry=registry, buckets=_SECONDS)
        batches = (1, 2, 4, 8, 16, 32, 64)
        self.batch = Histogram("reward_batch_size", "Samples per call", ["reward"], registry=registry, buckets=batches)

    def count_finished(self, event: dict[str, Any]) -> None:
        """Count a job's end."""
        reward = event["reward"]
        self.jobs.labels(reward, event["state"]).inc()
        if "score_s" in event:
            self.stage.labels("wait", reward).observe(event["wait_s"])
            self.stage.labels("score", reward).observe(event["score_s"])
            self.batch.labels(reward).observe(event["batch"])
        if "items" in event:
            self.items.labels(reward, "scored").inc(event["items"] - event["failed"])
            self.items.labels(reward, "failed").inc(event["failed"])

    def render(self) -> bytes:
        """Text format."""
        return generate_latest(self.registry)
