"""What unauthenticated clients can do to a running service: ``python -m benchmarks.attacks [--only NAME ...]``.

Each attack runs against the same service while jobs come in one after the other and ``/healthz`` is asked all the
time. Printed for each: the time of ``/healthz`` in ms, how far the front's memory grew at its peak in MiB, what the
attacker got, and how many of the jobs accepted meanwhile were lost. Ends with 1 when memory grew by more than 64 MiB, a
job was lost, or one answer of ``/healthz`` took more than 50 ms and more than twice the longest without any attack.

Latencies are those of a busy machine when it is one: run it on an idle one, or compare them with the row ``nothing``.
"""

import argparse
import asyncio
import collections
import contextlib
import io
import json
import os
import resource
import sys
import tempfile
import time
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tests.service import MOODY, Service, body, image

MIB = 1 << 20
CONFIG = {"reward_args": [MOODY], "max_spool_bytes": 300 * MIB, "no_latent_decoder": True}
HEAD = b"POST /api/reward/enqueue HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
Attack = Callable[[int, httpx.AsyncClient, float], Awaitable[Any]]


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 30)


async def _pour(port: int, start: bytes, piece: bytes, seconds: float) -> str:
    """Send ``piece`` again and again, on a new connection whenever one is closed."""
    end, sent = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionError, TimeoutError):
            _, writer = await _connect(port)
            writer.write(start)
            while time.monotonic() < end:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 5)
                sent += len(piece)
    return f"{sent / MIB:.0f} MiB sent"


async def nothing(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """The machine as it is."""
    await asyncio.sleep(seconds)
    return "-"


async def endless_header(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """S3."""
    return await _pour(port, b"GET / HTTP/1.1\r\nX-A: ", b"a" * 65536, seconds)


async def many_headers(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """S3: small ones."""
    return await _pour(port, b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 8192, seconds)


async def long_url(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """S3: in the request line."""
    return await _pour(port, b"GET /", b"a" * 65536, seconds)


async def piled_up(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """Requests without waiting for answers."""
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return await _pour(port, b"", request * 4000, seconds)


async def half_open(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """S3: 2000 connections with half a head."""
    held = []
    for number in range(2000):
        with contextlib.suppress(ConnectionError, TimeoutError):
            _, writer = await _connect(port)
            writer.write(b"GET / HTTP/1.1\r\nX-A: " + b"a" * (number % 7))
            held.append(writer)
    await asyncio.sleep(seconds)
    for writer in held:
        writer.transport.abort()
    return f"{len(held)} connections"


async def slow_bodies(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """400 bodies of 0.9 MB that do not end."""
    held, line = [], body(image())[:120].split(b"\n")[0] + b"\n"
    for _ in range(400):
        with contextlib.suppress(ConnectionError, TimeoutError):
            _, writer = await _connect(port)
            part = line + bytes(900_000)
            writer.write(HEAD + b"%x\r\n" % (len(part) + 1) + part)
            await asyncio.wait_for(writer.drain(), 10)
            held.append(writer)
    await asyncio.sleep(seconds)
    for writer in held:
        writer.transport.abort()
    return f"{len(held)} bodies"


async def chunked(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """S5: four bodies of 240 MB at once, without a length; max_spool_bytes is 300 MiB."""

    async def parts() -> AsyncIterator[bytes]:
        yield body(image(count=0))
        for _ in range(240):
            yield bytes(MIB)

    async def one() -> int:
        try:
            return (await client.post("/api/reward/enqueue", content=parts(), timeout=120)).status_code
        except httpx.HTTPError:
            return 0  # refused while it still sent

    return str(sorted(await asyncio.gather(*(one() for _ in range(4)))))


def _torch_file(entry: str, size: int) -> bytes:
    import torch

    good, out = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(1, 4, 4, 3, dtype=torch.uint8), good)
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for info in old.infolist():
            if not info.filename.endswith(entry):
                new.writestr(info.filename, old.read(info), zipfile.ZIP_STORED)
        with new.open("archive/" + entry, "w", force_zip64=True) as file:
            for _ in range(size // MIB):
                file.write(bytes(MIB))
    return out.getvalue()


async def zip_bomb(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """S1: 1 MB that would be 1 GB."""
    line = b'{"prompts": ["a"], "reward_fn": {"moody": 1}, "media_type": "image"}\n'
    content = line + await asyncio.to_thread(_torch_file, "byteorder", 1024 * MIB)
    answers = [await client.post("/api/reward/enqueue", content=content, timeout=120) for _ in range(3)]
    return f"{len(content) / MIB:.1f} MiB: {answers[0].status_code} {answers[0].json()['message'][:50]}"


async def expanded(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """S2: one byte as 763 MB of pixels."""
    import torch

    file = io.BytesIO()
    torch.save(torch.zeros(1, dtype=torch.uint8).expand(1, 16000, 15900, 3), file)
    line = b'{"prompts": ["a"], "reward_fn": {"moody": 1}, "media_type": "image"}\n'
    answer = await client.post("/api/reward/enqueue", content=line + file.getvalue())
    return f"{answer.status_code} {answer.json()['message'][:60]}"


async def long_polls(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """S7: 2000 at once."""
    job = (await client.post("/api/reward/enqueue", content=body(image(), prompts=[f"sleep {seconds}"]))).json()
    form = f"uuid={job['uuid']}&type=moody&wait=60".encode()
    head = b"POST /api/reward/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(form)

    async def poll() -> str:
        reader, writer = await _connect(port)
        writer.write(head + form)
        status = (await asyncio.wait_for(reader.readline(), 90)).split()[1].decode()
        writer.close()
        return status

    return str(dict(collections.Counter(await asyncio.gather(*(poll() for _ in range(2000))))))


async def bad_metadata(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """C7, C8 and half a surrogate pair."""
    statuses = []
    for text in (
        '{"moody": 1%s}' % ("0" * 400),
        '{"moody": 1}, "video_infos": [{"fps": "fast"}]',
        '{"moody": 1}, "x": 1e999',
    ):
        line = b'{"prompts": ["a"], "media_type": "image", "reward_fn": %s}\n' % text.encode()
        statuses.append((await client.post("/api/reward/enqueue", content=line)).status_code)
    line = b'{"prompts": ["\\ud800"], "media_type": "image", "reward_fn": {"moody": 1}}\n'
    statuses.append((await client.post("/api/reward/enqueue", content=line)).status_code)
    return str(statuses)


async def other_names(port: int, client: httpx.AsyncClient, seconds: float) -> str:
    """S9: names that are not this machine's, pages of other servers."""
    headers = [{"Host": "evil.example"}, {"Origin": "http://evil.example", "Content-Type": "text/plain"}]
    content = body(image())
    return str([(await client.post("/api/reward/enqueue", content=content, headers=h)).status_code for h in headers])


ATTACKS: dict[str, Attack] = {
    call.__name__: call
    for call in (
        *(nothing, endless_header, many_headers, long_url, piled_up, half_open, slow_bodies, chunked),
        *(zip_bomb, expanded, long_polls, bad_metadata, other_names),
    )
}


class _Watch:
    """Asks ``/healthz``, hands jobs in and looks at the front's memory until it is stopped."""

    def __init__(self, client: httpx.AsyncClient, front: psutil.Process) -> None:
        self._client, self._front = client, front
        self.times: list[float] = []
        self.jobs: list[str] = []
        self.before = self.peak = front.memory_info().rss
        self.spool = 0

    async def health(self) -> None:
        while True:
            began = time.perf_counter()
            (await self._client.get("/healthz")).raise_for_status()
            self.times.append(time.perf_counter() - began)
            self.peak = max(self.peak, self._front.memory_info().rss)
            await asyncio.sleep(0.02)

    async def work(self) -> None:
        while True:
            answer = await self._client.post("/api/reward/enqueue", content=body(image(len(self.jobs) % 200)))
            if answer.status_code == 200:
                self.jobs.append(answer.json()["uuid"])
            await asyncio.sleep(0.1)


async def _attack(name: str, port: int, seconds: float) -> str:
    """What a process of its own does, so that its work does not count as the service's."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        return await ATTACKS[name](port, client, seconds)


async def _under(service: Service, name: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.attacks", "--attack", name, str(service.port), str(seconds)]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.port}", timeout=60) as client:
        await client.get("/healthz")  # connected, and its own set-up done, before anything is measured
        watch = _Watch(client, service.processes()["front"][0])
        attacker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        watching = [asyncio.create_task(watch.health()), asyncio.create_task(watch.work())]
        got = (await attacker.communicate())[0].decode().strip()
        await asyncio.sleep(0.5)
        for task in watching:
            task.cancel()
        failures = [e for e in await asyncio.gather(*watching, return_exceptions=True) if isinstance(e, Exception)]
        lost = 0
        for number, job in enumerate(watch.jobs):
            fields = {"uuid": job, "type": "moody", "wait": "60"}
            result = (await client.post("/api/reward/pull", data=fields, timeout=90)).json()
            lost += not result.get("scores") or result["scores"]["mean"] != [number % 200]
    return {
        "healthz_ms": {f"p{p}": round(float(np.percentile(watch.times, p)) * 1000, 1) for p in (50, 95, 100)},
        "memory_mib": round((watch.peak - watch.before) / MIB, 1),
        "jobs": len(watch.jobs),
        "lost": lost,
        "failed_requests": [repr(error) for error in failures],
        "attacker_got": got,
    }


def _held(one: dict[str, Any], usual: float) -> bool:
    quick = one["healthz_ms"]["p100"] <= max(50, 2 * usual)
    return quick and one["memory_mib"] <= 64 and not one["lost"] and not one["failed_requests"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="of those attacks that last")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.attack:
        os.nice(10)  # it would be on another machine: the service does not wait for a core because of it
        name, port, seconds = options.attack
        print(asyncio.run(_attack(name, int(port), float(seconds))))
        return
    report = {}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), CONFIG) as service:
        for name in dict.fromkeys(["nothing", *options.only]):
            report[name] = asyncio.run(_under(service, name, options.seconds))
            print(json.dumps({name: report[name]}), flush=True)
    usual = report["nothing"]["healthz_ms"]["p100"]
    bad = [name for name, one in report.items() if not _held(one, usual)]
    print(json.dumps({"bad": bad}))
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
