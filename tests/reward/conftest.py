"""The misbehaving reward service, and clients of it that are closed after the test."""

from collections.abc import Callable, Iterator

import pytest

from cosmos_rl.reward.remote import RemoteScorer
from tests.support.reward_requests import table
from tests.support.reward_server import RewardServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    for name in ("TOKEN", "ENQUEUE_URL", "FETCH_URL"):
        for generation in ("REMOTE_REWARD", "WFM_REWARD", "DIFFUSION_REWARD"):
            monkeypatch.delenv(f"{generation}_{name}", raising=False)
    made = RewardServer()
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", f"{made.url}/enqueue")
    monkeypatch.setenv("REMOTE_REWARD_FETCH_URL", f"{made.url}/pull")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", "s3cret")
    yield made
    made.close()


@pytest.fixture
def start(server: RewardServer) -> Iterator[Callable[..., RemoteScorer]]:
    started: list[RemoteScorer] = []

    def make(*names: str, **keys: object) -> RemoteScorer:
        started.append(RemoteScorer(table(*names, **keys)))
        return started[-1]

    yield make
    for scorer in started:
        scorer.close()
