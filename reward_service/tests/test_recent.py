"""Means, percentiles and curves of a reward's last jobs."""

import numpy as np
import pytest

from cosmos_rl_reward.front.recent import Recent
from cosmos_rl_reward.worker.outcome import mean_scores


def test_means_count_samples_and_percentiles_are_those_of_numpy():
    recent = Recent()
    latencies = np.random.default_rng(0).random(301)
    for k, latency in enumerate(latencies):
        recent.add(float(latency), 1 + k % 2, {"a": float(k)})
    found = recent.summary()
    weights = 1 + np.arange(301) % 2
    assert found["scores"]["a"]["mean"] == pytest.approx(np.average(np.arange(301), weights=weights))
    assert found["scores"]["a"]["last"] == [float(k) for k in range(241, 301)]
    for name, share in (("p50", 50), ("p95", 95)):
        assert found["latency_s"][name] == np.percentile(latencies, share, method="lower")


def test_only_the_last_jobs_count():
    recent = Recent()
    for k in range(2000):
        recent.add(1.0 if k < 1500 else 3.0, 1, {"a": 1.0 if k < 1500 else 3.0})
    assert recent.summary()["latency_s"] == {"p50": 3.0, "p95": 3.0}
    assert recent.summary()["scores"]["a"]["mean"] == 3.0
    assert Recent().summary() == {"latency_s": {}, "scores": {}}


def test_a_mean_is_taken_over_the_numbers_of_a_column():
    table = {"a": [1.0, None, 3], "text": ["x", "y", None], "none": [None], "deep": {"b": [1]}, "flag": [True, False]}
    assert mean_scores(table) == {"a": 2.0, "flag": 0.5}
    assert len(mean_scores({str(k): [1.0] for k in range(20)})) == 8
