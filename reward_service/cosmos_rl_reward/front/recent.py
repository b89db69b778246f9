"""What the page shows of a reward's last jobs: how long they took and what they scored."""

import collections
from typing import Any

_JOBS = 500  # latencies and means are taken over so many
_POINTS = 60  # of a score's curve, one for each job


class Recent:
    """The last jobs of one reward that got scores."""

    def __init__(self) -> None:
        self._latencies: collections.deque[float] = collections.deque(maxlen=_JOBS)
        self._scores: dict[str, collections.deque[tuple[float, int]]] = {}

    def add(self, latency_s: float, items: int, means: dict[str, float]) -> None:
        """A job of ``items`` samples was answered ``latency_s`` after it was accepted."""
        self._latencies.append(latency_s)
        for key, mean in means.items():
            self._scores.setdefault(key, collections.deque(maxlen=_JOBS)).append((mean, items))

    def summary(self) -> dict[str, Any]:
        """``latency_s`` (p50, p95) and ``scores``: of each key its mean per sample and the means of the last jobs."""
        scores = {}
        for key, rows in self._scores.items():
            mean = sum(value * items for value, items in rows) / sum(items for _, items in rows)
            scores[key] = {"mean": mean, "last": [value for value, _ in rows][-_POINTS:]}
        latency = {}
        if ordered := sorted(self._latencies):
            latency = {f"p{p}": ordered[(len(ordered) - 1) * p // 100] for p in (50, 95)}
        return {"latency_s": latency, "scores": scores}
