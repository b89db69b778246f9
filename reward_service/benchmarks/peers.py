"""Jobs a second and latency against other servers: ``python -m benchmarks.peers [--seconds S] [--rounds N]``.

8 clients, each sending its next job (2 random images of 512 x 512, JPEG size as the reward) when it has the scores
of the one before; the contenders take turns within one run. Rates and latencies depend on what else the machine does,
and so does ``to_bare`` (jobs a second over those of the bare scorer in the same round): of a busy machine several
processes get a larger share than one. ``cpu_to_bare`` (CPU time per job of all the contender's processes, over that of
the bare scorer in the same round) hardly does. ``v1`` is enqueue and pull, ``v2`` the one call ``/v2/score``; both keep
jobs on the disk.
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
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.peer_servers import DESIGNS, requests
from tests.service import Service

CLIENTS = 8
REWARD = "jpeg_compressibility"
CONFIG = {"reward_args": [{"reward_type": REWARD, "device": "cpu"}]}
Call = Callable[[httpx.AsyncClient, bytes], Awaitable[None]]


@dataclass
class Contender:
    """A running server: where it is, its processes, how it is asked, and the bodies of the jobs."""

    url: str
    processes: list[psutil.Process]
    call: Call
    jobs: list[bytes]


async def _plain(client: httpx.AsyncClient, content: bytes) -> None:
    kind = "application/json" if content[:9] == b'{"images"' else "application/octet-stream"
    (await client.post("/score", content=content, headers={"Content-Type": kind})).raise_for_status()


async def _v1(client: httpx.AsyncClient, content: bytes) -> None:
    answer = await client.post("/api/reward/enqueue", content=content)
    answer.raise_for_status()
    fields = {"uuid": answer.json()["uuid"], "type": REWARD, "wait": "60"}
    result = await client.post("/api/reward/pull", data=fields)
    assert result.json()["state"] == "succeeded", result.text


async def _v2(client: httpx.AsyncClient, content: bytes) -> None:
    result = await client.post("/v2/score", content=content)
    assert result.json()["state"] == "succeeded", result.text


@contextlib.contextmanager
def running(design: str) -> Iterator[tuple[str, list[psutil.Process]]]:
    """One of the other designs as a process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.peer_servers", design, str(port)])
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", [psutil.Process(process.pid)]
    finally:
        process.kill()
        process.wait()


async def load(contender: Contender, seconds: float, clients: int = CLIENTS) -> dict[str, float]:
    """Closed-loop clients for about ``seconds``: rate, latencies, CPU time per job."""
    times: list[float] = []
    async with httpx.AsyncClient(base_url=contender.url, timeout=120) as client:
        await contender.call(client, contender.jobs[0])
        before, began = _cpu(contender.processes), time.perf_counter()

        async def loop(number: int) -> None:
            while time.perf_counter() - began < seconds:
                start = time.perf_counter()
                await contender.call(client, contender.jobs[(number + len(times)) % len(contender.jobs)])
                times.append(time.perf_counter() - start)

        await asyncio.gather(*(loop(number) for number in range(clients)))
        took = time.perf_counter() - began
    p50, p95 = (float(np.percentile(times, p)) * 1000 for p in (50, 95))
    cpu = (_cpu(contender.processes) - before) / len(times) * 1000
    return {"rate": len(times) / took, "p50_ms": p50, "p95_ms": p95, "cpu_ms": cpu}


def _cpu(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(folder: Path, seconds: float, rounds: int, names: list[str]) -> dict[str, Any]:
    """All contenders, round by round."""
    random = np.random.default_rng(0)
    forms = [requests(random.integers(0, 256, (2, 512, 512, 3), dtype=np.uint8)) for _ in range(8)]
    with contextlib.ExitStack() as stack:
        contenders = {}
        for design in DESIGNS:
            url, processes = stack.enter_context(running(design))
            contenders[design] = Contender(url, processes, _plain, [form[design] for form in forms])
        service = stack.enter_context(Service(folder, CONFIG, {"OMP_NUM_THREADS": "1"}))
        family = [process for group in service.processes().values() for process in group]
        jobs = [form["bare"] for form in forms]
        for name, call in (("v1", _v1), ("v2", _v2)):
            contenders[name] = Contender(f"http://127.0.0.1:{service.port}", family, call, jobs)
        contenders = {name: contenders[name] for name in names}
        found = [{name: asyncio.run(load(one, seconds)) for name, one in contenders.items()} for _ in range(rounds)]
    return {name: _summary(name, found) for name in names}


def _summary(name: str, found: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    mine = [one[name] for one in found]
    ratios = [one[name]["rate"] / one["bare"]["rate"] for one in found]
    return {
        "jobs_per_second": [round(one["rate"], 1) for one in mine],
        "to_bare": [round(ratio, 2) for ratio in ratios],
        "median_to_bare": round(statistics.median(ratios), 3),
        "cpu_to_bare": [round(one[name]["cpu_ms"] / one["bare"]["cpu_ms"], 2) for one in found],
        **{key: round(statistics.median(one[key] for one in mine), 1) for key in ("p50_ms", "p95_ms", "cpu_ms")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15, help="per contender and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["bare", "sync", "json", "v1", "v2"], help="'bare' among them")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), options.seconds, options.rounds, options.only)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
