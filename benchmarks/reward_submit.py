"""How long a request to a slow reward service holds up the trainer: the call of `submit` alongside a computation."""

import os
import statistics
import subprocess
import sys
import time

import torch

from cosmos_rl.policy.config import RemoteRewardConfig, RewardFnConfig
from cosmos_rl.reward.remote import RemoteScorer
from cosmos_rl.reward.table import ScoringRequest
from tests.support.reward_server import RewardServer, result

REQUESTS, SAMPLES, SIDE, SLOW_S = 30, 24, 512, 1.0


def serve() -> None:
    """A service that takes a second for everything, until its standard input ends."""

    def take(number: int, headers: object) -> None:
        time.sleep(SLOW_S)

    def pull(job, reward, tries):  # type: ignore[no-untyped-def]
        time.sleep(SLOW_S)
        return 200, result(job, reward)

    print(RewardServer(take=take, pull=pull).url, flush=True)
    sys.stdin.read()


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.reward_submit"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    assert server.stdout is not None
    assert server.stdin is not None
    url = server.stdout.readline().strip()
    os.environ |= {"REMOTE_REWARD_ENQUEUE_URL": f"{url}/enqueue", "REMOTE_REWARD_FETCH_URL": f"{url}/pull"}
    table = RemoteRewardConfig(reward_fns=(RewardFnConfig(name="hpsv2"),), batch_size=SAMPLES, timeout_s=120.0)
    scorer = RemoteScorer(table)
    media = torch.randint(0, 256, (SAMPLES, SIDE, SIDE, 3), dtype=torch.uint8)
    ids, weights = list(range(SAMPLES)), torch.rand(256, 256)
    blocked, futures = [], []
    try:
        for _ in range(REQUESTS):
            request = ScoringRequest(media, ["a cat"] * SAMPLES, [{}] * SAMPLES, ids)
            began = time.perf_counter()
            futures.append(scorer.submit(request))
            blocked.append(1000 * (time.perf_counter() - began))
            until = time.perf_counter() + 0.1
            while time.perf_counter() < until:  # what a trainer does meanwhile
                torch.mm(weights, weights)
        scores = [future.result(timeout=300).values["hpsv2"] for future in futures]
        if not all(bool(score.isfinite().all()) for score in scores):
            raise RuntimeError("scores are missing")
    finally:
        scorer.close()
        server.stdin.close()
        server.wait(timeout=30)
    size = media.numel() / 2**20
    what = f"trainer held up by a request of {size:.0f} MiB to a service that takes {2 * SLOW_S:.0f} s"
    ninth = statistics.quantiles(blocked, n=10)[-1]
    return [(what, f"median {statistics.median(blocked):.2f} ms, 90 % within {ninth:.2f} ms", "< 5 ms")]


if __name__ == "__main__":
    serve()
