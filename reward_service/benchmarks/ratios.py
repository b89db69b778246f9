"""Ratios within one run: ``python -m benchmarks.ratios [--jobs N] [--side PIXELS]``.

* jobs a second of the service over those of a bare synchronous scorer (target: at least 0.4), same reward, same client;
* time from a result's file to the client that waits for it (target: at most 50 ms, 95th percentile);
* 64 single-image jobs of a CLIP-sized model, merged over one at a time (target: at least 1.5 times as fast).
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

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


async def bare(contents: list[bytes], jobs: int) -> float:
    """Jobs a second of the bare scorer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bare_scorer", str(port)])
    try:
        async with _client(f"http://127.0.0.1:{port}") as client:

            async def one(i: int) -> None:
                (await client.post("/score", content=contents[i % len(contents)])).raise_for_status()

            for _ in range(200):
                try:
                    await one(0)
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.1)
            seconds, _ = await _each(jobs, 16, one)
            return jobs / seconds
    finally:
        process.kill()


async def served(service: Service, contents: list[bytes], jobs: int) -> tuple[float, list[float]]:
    """Jobs a second of the service, and seconds from a result's file to its client."""
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
        seconds, _ = await _each(jobs, 16, one)
        spaced = []
        for i in range(40):  # an idle service, one job at a time
            spaced.append(await one(i))
        return jobs / seconds, spaced


async def scored(service: Service, reward: str, count: int) -> float:
    """Seconds for ``count`` single-image jobs."""
    picture = np.random.default_rng(0).integers(0, 255, (1, 224, 224, 3), np.uint8)
    content = body(picture, reward)
    async with _client(f"http://127.0.0.1:{service.port}") as client:
        jobs = []
        began = time.perf_counter()
        for _ in range(count):
            jobs.append((await client.post("/api/reward/enqueue", content=content)).json()["uuid"])
        for job in jobs:
            fields = {"uuid": job, "type": reward, "wait": "60"}
            assert (await client.post("/api/reward/pull", data=fields)).json()["state"] == "succeeded"
        return time.perf_counter() - began


async def measure(folder: Path, jobs: int, side: int) -> dict[str, Any]:
    """All ratios."""
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (1, side, side, 3), dtype=np.uint8) for _ in range(8)]
    contents = [body(picture, "jpeg_compressibility") for picture in pictures]
    first = await bare(contents, jobs)
    with Service(folder, CONFIG, {"OMP_NUM_THREADS": "1"}) as service:
        rate, delays = await served(service, contents, jobs)
        single, merged = await scored(service, "single", 64), await scored(service, "merged", 64)
    second = await bare(contents, jobs)
    base = (first + second) / 2  # before and after, because the machine is not ours alone
    return {
        "jobs": jobs,
        "picture": [side, side, 3],
        "bare_jobs_per_second": round(base, 1),
        "service_jobs_per_second": round(rate, 1),
        "ratio": round(rate / base, 3),
        "seen_after_ms": {f"p{p}": round(float(np.percentile(delays, p)) * 1000, 1) for p in (50, 95, 100)},
        "one_at_a_time_s": round(single, 2),
        "merged_s": round(merged, 2),
        "merged_is_faster": round(single / merged, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--side", type=int, default=512)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), options.jobs, options.side)), indent=2))


if __name__ == "__main__":
    main()
