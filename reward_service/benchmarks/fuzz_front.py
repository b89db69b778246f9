"""Hostile requests against a front in memory: ``python -m benchmarks.fuzz_front --requests 100000``.

Counts answers, and fails on anything but a stated refusal or acceptance, on a hang, and on memory that grows.
"""

import argparse
import asyncio
import collections
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.fronts import FrontInMemory, front_in_memory
from tests.service import body, image, npy

_TIMEOUT_S = 20.0
_WORDS = [
    "prompts",
    "reward_fn",
    "media_type",
    "video_infos",
    "image",
    "video",
    "latent",
    "a",
    "b",
    "c",
    "uuid",
    "wait",
]


def _value(random_: random.Random, depth: int = 0) -> Any:
    kind = random_.randrange(9 if depth < 4 else 6)
    if kind < 6:
        number = random_.random() * 10**9
        return [None, True, number, random_.randrange(-5, 5), random_.choice(_WORDS), "\0\ud7ff"][kind]
    if kind == 6:
        return [_value(random_, depth + 1) for _ in range(random_.randrange(4))]
    return {random_.choice(_WORDS): _value(random_, depth + 1) for _ in range(random_.randrange(4))}


def _mutated(random_: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(random_.randrange(1, 8)):
        at = random_.randrange(len(out) or 1)
        action = random_.randrange(4)
        if action == 0 and out:
            out[at % len(out)] = random_.randrange(256)
        elif action == 1:
            out[at:at] = random_.randbytes(random_.randrange(1, 20))
        elif action == 2:
            del out[at : at + random_.randrange(1, 200)]
        else:
            out[at:] = b""
    return bytes(out)


def bodies() -> list[bytes]:
    """Good bodies to spoil."""
    small = np.zeros((1, 3, 2, 4, 4), np.uint8)
    return [
        body(image(count=2), "a"),
        body(small, "b", media_type="video", video_infos=[{"fps": 8}]),
        body(np.zeros((1, 16, 2, 4, 4), np.float16), "a", media_type="latent"),
        b'{"prompts": ["x"], "reward_fn": {"a": 1}, "media_type": "image"}\n' + npy(image(side=40)),
    ]


async def _one(front: FrontInMemory, random_: random.Random, good: list[bytes]) -> tuple[str, int]:
    kind = random_.randrange(6)
    headers = {"Idempotency-Key": random_.choice("abc")} if random_.random() < 0.1 else {}
    if kind == 0:
        content = random_.randbytes(random_.randrange(2000))
    elif kind == 1:
        content = json.dumps(_value(random_)).encode() + b"\n" + npy(image())
    elif kind < 5:
        content = _mutated(random_, random_.choice(good))
    else:
        path = random_.choice(["/api/reward/pull", "/api/reward/ping", "/v2/jobs:batchGet", "/v2/score"])
        types = ["application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/x"]
        data = random_.choice([json.dumps(_value(random_)).encode(), random_.randbytes(200), b"--x\r\n" + good[0][:99]])
        answer = await front.client.post(path, content=data, headers={"Content-Type": random_.choice(types)})
        return path, answer.status_code
    cuts = sorted(random_.randrange(len(content) + 1) for _ in range(3))

    async def pieces() -> AsyncIterator[bytes]:
        for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            yield content[begin:end]

    answer = await front.client.post("/api/reward/enqueue", content=pieces(), headers=headers)
    return "enqueue", answer.status_code


async def fuzz(folder: Path, requests: int, seed: int) -> dict[str, Any]:
    """Send ``requests`` requests; growth of memory is measured over the last 80 %."""
    random_, process = random.Random(seed), psutil.Process()
    statuses: collections.Counter[int] = collections.Counter()
    unexpected: list[str] = []
    base, began, slowest = 0, time.monotonic(), 0.0
    front = front_in_memory(folder, max_queued_jobs=10**9, max_spool_bytes=1 << 40)
    async with front.run():
        good = bodies()
        for number in range(requests):
            if number == requests // 5:
                base = process.memory_info().rss
            start = time.monotonic()
            try:
                path, status = await asyncio.wait_for(_one(front, random_, good), _TIMEOUT_S)
                statuses[status] += 1
                if status >= 500:
                    unexpected.append(f"{number}: {path} {status}")
            except Exception as error:
                unexpected.append(f"{number}: {error!r}")
            slowest = max(slowest, time.monotonic() - start)
            if number % 200 == 199:  # what was taken is done, so that nothing but the front itself can grow
                tracker = front.front.tracker
                for job_id, entry in list(tracker.open.items()):
                    for reward in list(entry.missing):
                        await tracker.end(job_id, reward, "failed", "fuzz")
                front.queue.jobs.clear()
                front.bus.published.clear()
                await asyncio.to_thread(tracker.spool.sweep, -1.0, 0)
        growth = (process.memory_info().rss - base) / 2**20
    return {
        "requests": requests,
        "statuses": dict(statuses),
        "unexpected": unexpected[:20],
        "growth_mib": round(growth, 1),
        "slowest_s": round(slowest, 2),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(fuzz(Path(folder), options.requests, options.seed)), indent=2))


if __name__ == "__main__":
    main()
