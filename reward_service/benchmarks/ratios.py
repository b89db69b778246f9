"""Ratios within one run: ``python -m benchmarks.ratios [--jobs N] [--side PIXELS]``.

* jobs a second of the service over those of a bare synchronous scorer (target: at least 0.4), same reward, same client;
* time from a result's file to the client that waits for it (target: at most 50 ms, 95th percentile);
* 64 single-image jobs of a CLIP-sized model, merged over one at a time (target: at least 1.5 times as fast).
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tests.service import Service, body

CONFIG = {
    "max_queued_jobs": 100_000,
    "reward_args": [
        {"reward_type": "jpeg_compressibility", "device": "cpu"},
        {"reward_type": "single", "reward_class": "benchmarks.clip_like:ClipLike", "device": "cpu", "max_batch": 1},
        {"reward_type": "merged", "reward_class": "benchmarks.clip_like:ClipLike", "device": "cpu", "max_wait_ms": 20},
    ],
}


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=64))


async def _each(jobs: int, concurrency: int, one: Any) -> tuple[float, list[Any]]:
    """Run ``one(i)`` for all jobs; seconds and results."""
    gate = asyncio.Semaphore(concurrency)

    async def guarded(i: int) -> Any:
        async with gate:
            return await one(i)

    began = time.perf_counter()
    results = await asyncio.gather(*(guarded(i) for i in range(jobs)))
    return time.perf_counter() - began, results


@contextlib.contextmanager
def bare_scorer() -> Iterator[tuple[str, psutil.Process]]:
    """The bare scorer, running; its address and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bare_scorer", str(port)])
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


async def bare(url: str, contents: list[bytes], jobs: int) -> float:
    """Seconds of the bare scorer for ``jobs`` jobs."""
    async with _client(url) as client:

        async def one(i: int) -> None:
            (await client.post("/score", content=contents[i % len(contents)])).raise_for_status()

        await one(0)
        return (await _each(jobs, 16, one))[0]


async def served(
    service: Service, contents: list[bytes], jobs: int, concurrency: int = 16
) -> tuple[float, list[float]]:
    """Seconds of the service for ``jobs`` jobs, and seconds from each result's file to its client."""
    async with _client(f"http://127.0.0.1:{service.port}") as client:

        async def one(i: int) -> float:
            answer = await client.post("/api/reward/enqueue", content=contents[i % len(contents)])
            answer.raise_for_status()
            job = answer.json()["uuid"]
            fields = {"uuid": job, "type": "jpeg_compressibility", "wait": "60"}
            result = await client.post("/api/reward/pull", data=fields)
            seen = time.time()
            assert result.json()["state"] == "succeeded"
            path = service.state / "spool" / "results" / job[:2] / f"{job}.jpeg_compressibility.json"
            return seen - path.stat().st_ctime

        await one(0)
        return await _each(jobs, concurrency, one)


async def scored(service: Service, reward: str, count: int) -> float:
    """Seconds for ``count`` single-image jobs that are handed in at once."""
    image = np.random.default_rng(0).integers(0, 255, (1, 224, 224, 3), np.uint8)
    content = body(image, reward)
    async with _client(f"http://127.0.0.1:{service.port}") as client:
        jobs = []
        began = time.perf_counter()
        for _ in range(count):
            jobs.append((await client.post("/api/reward/enqueue", content=content)).json()["uuid"])
        for job in jobs:
            fields = {"uuid": job, "type": reward, "wait": "60"}
            assert (await client.post("/api/reward/pull", data=fields)).json()["state"] == "succeeded"
        return time.perf_counter() - began


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(folder: Path, jobs: int, side: int, rounds: int) -> dict[str, Any]:
    """All ratios: medians over rounds that take turns, because the machine is not ours alone."""
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (1, side, side, 3), dtype=np.uint8) for _ in range(8)]
    contents = [body(image, "jpeg_compressibility") for image in images]
    rates, bases, merges, costs = [], [], [], []
    with bare_scorer() as (url, scorer), Service(folder, CONFIG, {"OMP_NUM_THREADS": "1"}) as service:
        family = [process for group in service.processes().values() for process in group]
        for _ in range(rounds):
            before = _cpu([scorer]), _cpu(family)
            bases.append(jobs / await bare(url, contents, jobs))
            rates.append(jobs / (await served(service, contents, jobs))[0])
            costs.append((_cpu([scorer]) - before[0]) / (_cpu(family) - before[1]))
            single, merged = await scored(service, "single", 64), await scored(service, "merged", 64)
            merges.append(single / merged)
        _, delays = await served(service, contents, 60, concurrency=1)
    ratios = [rate / base for rate, base in zip(rates, bases, strict=True)]
    return {
        "image": [side, side, 3],
        "bare_jobs_per_second": [round(v, 1) for v in bases],
        "service_jobs_per_second": [round(v, 1) for v in rates],
        "ratio": round(statistics.median(ratios), 3),
        "cpu_ratio": round(statistics.median(costs), 3),
        "seen_after_ms": {f"p{p}": round(float(np.percentile(delays, p)) * 1000, 1) for p in (50, 95, 100)},
        "merged_is_faster": round(statistics.median(merges), 2),
        "merged_rounds": [round(v, 2) for v in merges],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), options.jobs, options.side, options.rounds)), indent=2))


if __name__ == "__main__":
    main()
