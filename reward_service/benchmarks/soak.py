"""Memory over many mixed jobs: ``python -m benchmarks.soak --jobs 20000``.

Images, videos, torch files, several rewards, samples without a score, jobs that fail and requests that are refused. The
resident memory of all processes is looked at after the first fifth and at the end; it may grow by 10 MB in between.
"""

import argparse
import asyncio
import collections
import io
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.service import MOODY, Service, body, image, npy

CONFIG = {
    "max_queued_jobs": 100_000,
    "result_ttl_s": 120.0,
    "reward_args": [
        MOODY,
        {"reward_type": "mock"},
        {"reward_type": "brightness", "function": "moody_reward:brightness"},
    ],
}


def _kinds() -> list[tuple[bytes, str, int]]:
    """Body, reward to pull, status of the enqueue."""
    video = np.random.default_rng(0).integers(0, 255, (1, 3, 4, 16, 16), np.uint8)
    both = {"media_type": "image", "prompts": ["x"] * 4, "reward_fn": {"moody": 1, "mock": 1, "brightness": 1}}
    kinds = [
        (body(image(7), "moody"), "moody", 200),
        (body(image(7, 3, 64), "mock"), "mock", 200),
        (json.dumps(both).encode() + b"\n" + npy(image(9, 4, 48)), "brightness", 200),
        (body(video, "mock", media_type="video"), "mock", 200),
        (body(image(7, 2), "moody", prompts=["nan", "x"]), "moody", 200),
        (body(image(), "moody", prompts=["bad"]), "moody", 200),
        (body(image(), "moody", prompts=["raise out of memory"]), "moody", 200),
        (body(image(), "nobody"), "", 400),
        (body(image())[:-5], "", 400),
        (body(image(side=300)), "moody", 200),
    ]
    try:
        import torch
    except ImportError:
        return kinds
    file = io.BytesIO()
    torch.save(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), file)
    metadata = {"media_type": "image", "prompts": ["a", "b"], "reward_fn": {"mock": 1}}
    return [*kinds, (json.dumps(metadata).encode() + b"\n" + file.getvalue(), "mock", 200)]


async def _run(service: Service, jobs: int, numbers: Any) -> collections.Counter[str]:
    kinds, gate, seen = _kinds(), asyncio.Semaphore(16), collections.Counter()
    choose = random.Random(0)

    async def one(client: httpx.AsyncClient, kind: tuple[bytes, str, int]) -> None:
        content, reward, status = kind
        try:
            answer = await client.post("/api/reward/enqueue", content=content)
            assert answer.status_code == status, answer.text
            if status != 200:
                seen["refused"] += 1
                return
            fields = {"uuid": answer.json()["uuid"], "type": reward, "wait": "60"}
            result = await client.post("/api/reward/pull", data=fields)
            seen[result.json()["state"]] += 1
        finally:
            gate.release()

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.port}", timeout=120) as client:
        running: set[asyncio.Task[None]] = set()
        for number in range(jobs):
            await gate.acquire()
            task = asyncio.create_task(one(client, choose.choice(kinds)))
            running.add(task)
            task.add_done_callback(running.discard)
            numbers(number)
        await asyncio.gather(*running)
    return seen


def soak(folder: Path, jobs: int) -> dict[str, Any]:
    """Run it; returns the report."""
    with Service(folder, CONFIG) as service:
        processes = {
            f"{role}{i}": process for role, group in service.processes().items() for i, process in enumerate(group)
        }
        samples: list[dict[str, float]] = []

        def numbers(number: int) -> None:
            if number % max(1, jobs // 20) == 0:
                samples.append({name: process.memory_info().rss / 2**20 for name, process in processes.items()})

        began = time.monotonic()
        seen = asyncio.run(_run(service, jobs, numbers))
        seconds = time.monotonic() - began
        samples.append({name: process.memory_info().rss / 2**20 for name, process in processes.items()})
        early, late = samples[len(samples) // 5], samples[-1]
        return {
            "jobs": jobs,
            "ends": dict(seen),
            "jobs_per_second": round(jobs / seconds, 1),
            "growth_mib": {name: round(late[name] - early[name], 2) for name in late},
            "total_growth_mib": round(sum(late.values()) - sum(early.values()), 2),
            "curve_mib": [round(sum(sample.values()), 1) for sample in samples],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(Path(folder), options.jobs)
    print(json.dumps(report, indent=2))
    raise SystemExit(report["total_growth_mib"] * 2**20 / 1e6 > 10)


if __name__ == "__main__":
    main()
