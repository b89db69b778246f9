"""Measure a reward service: ``python -m benchmarks.latency --host http://localhost:8080``.

Latency counts from the start of the enqueue to the last reward's result.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from examples.client import headers, make_body

_DEFAULT_REWARD = {"image": "hpsv2", "video": "cosmos_reason1"}


@dataclass
class Sample:
    """One request: seconds of its parts, or the kind of its error."""

    number: int
    enqueue_s: float = 0.0
    total_s: float = 0.0
    score_s: float = 0.0
    error: str = ""
    answers: list[Any] = field(default_factory=list)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", help="address of the service, without a slash at the end")
    parser.add_argument("--token", default="")
    parser.add_argument("--num-requests", type=int, default=10)
    parser.add_argument("--media-type", choices=("image", "video"), default="image")
    parser.add_argument("--shape", default="", help="default 2,512,512,3, or latents 1,16,24,54,96")
    parser.add_argument("--video-dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--reward-fn", action="append", help="NAME or NAME=WEIGHT; may be repeated")
    parser.add_argument("--poll-interval", type=float, default=0.5, help="longest wait inside one pull")
    parser.add_argument("--max-wait", type=float, default=120)
    parser.add_argument("--enqueue-timeout", type=float, default=60)
    parser.add_argument("--assume-upload-mbps", type=float, default=20, help="MB/s, for the time-out of large bodies")
    parser.add_argument("--pull-timeout", type=float, default=10)
    parser.add_argument("--no-ping", action="store_true")
    parser.add_argument("--print-response", choices=("none", "last", "all"), default="none")
    parser.add_argument("--print-max-chars", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=1, help="requests in flight")
    parser.add_argument("--rate", type=float, default=0, help="start this many a second, whatever is in flight")
    parser.add_argument("--duration", type=float, default=0, help="seconds, instead of --num-requests")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--self-test", action="store_true", help="start a service with the mock reward and measure it")
    options = parser.parse_args(argv)
    if not options.host and not options.self_test:
        parser.error("--host is needed (or --self-test)")
    return options


def default_reward(host: str, options: argparse.Namespace) -> str:
    """The usual reward for this kind of media where it is served, else the first that is."""
    answer = httpx.get(f"{host}/api/reward/rewards", headers=headers(options.token), timeout=options.pull_timeout)
    served = answer.raise_for_status().json()["rewards"]
    fitting = [name for name, about in served.items() if options.media_type in about.get("media_types", ())]
    usual = _DEFAULT_REWARD[options.media_type]
    if usual not in fitting and not fitting:
        raise SystemExit(f"{host} has no reward for {options.media_type}s that is ready; it has: {', '.join(served)}")
    return usual if usual in fitting else fitting[0]


def rewards_of(options: argparse.Namespace) -> dict[str, float]:
    """Name and weight of the rewards."""
    pairs = (text.partition("=") for text in options.reward_fn)
    return {name: float(weight or 1) for name, _, weight in pairs}


def payload(options: argparse.Namespace, rewards: dict[str, float]) -> bytes:
    """A body of random pixels or latents."""
    video = options.media_type == "video"
    text = options.shape or ("1,16,24,54,96" if video else "2,512,512,3")
    shape = tuple(int(n) for n in text.strip("[]()").split(","))
    random = np.random.default_rng(0)
    prompts = ['a sign that says "hello"'] * shape[0]
    if not video:
        return make_body(random.integers(0, 256, shape, dtype=np.uint8), prompts, rewards, "image")
    latents = random.standard_normal(shape).astype(np.float32)
    if options.video_dtype == "bfloat16":  # as uint8: the last axis counts bytes
        latents = (latents.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    else:
        latents = latents.astype(options.video_dtype)
    return make_body(latents, prompts, rewards, "latent", video_infos=[{"video_fps": 16.0}] * shape[0])


async def one(client: httpx.AsyncClient, number: int, body: bytes, options: argparse.Namespace) -> Sample:
    """Enqueue and wait for all rewards."""
    sample, began = Sample(number), time.perf_counter()
    size_s = 2 * len(body) / 1e6 / options.assume_upload_mbps + 30
    try:
        timeout = max(options.enqueue_timeout, 30, size_s)
        answer = await client.post("/api/reward/enqueue", content=body, timeout=timeout)
        if answer.is_error:
            raise RuntimeError(f"enqueue {answer.status_code}: {answer.text[:200]}")
        sample.enqueue_s = time.perf_counter() - began
        extra = {}
        if replica := answer.json().get("replica_id"):
            extra["X-Lepton-Replica-Target"] = replica
        for reward in rewards_of(options):
            result = await _result(client, answer.json()["uuid"], reward, extra, began, options)
            sample.answers.append(result)
            sample.score_s += float(result["duration"])
            if result["scores"] is None:
                raise RuntimeError(f"{reward}: {result['error'][:200]}")
    except (httpx.HTTPError, RuntimeError, TimeoutError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.total_s = time.perf_counter() - began
    return sample


async def _result(
    client: httpx.AsyncClient, job: str, reward: str, extra: dict[str, str], began: float, options: argparse.Namespace
) -> Any:
    while time.perf_counter() - began < options.max_wait:
        fields = {"uuid": job, "type": reward, "wait": str(options.poll_interval)}
        timeout = options.pull_timeout + options.poll_interval
        answer = await client.post("/api/reward/pull", data=fields, headers=extra, timeout=timeout)
        if answer.status_code == 200:
            return answer.json()
        if answer.json().get("state") == "unknown" or answer.status_code != 400:
            raise RuntimeError(f"pull {answer.status_code}: {answer.text[:200]}")
        if "state" not in answer.json():  # a service without long-poll
            await asyncio.sleep(options.poll_interval)
    raise TimeoutError(f"no {reward} within {options.max_wait:g} s")


async def measure(host: str, options: argparse.Namespace) -> list[Sample]:
    """All requests, in the order in which they began."""
    body, samples = payload(options, rewards_of(options)), []
    gate = asyncio.Semaphore(options.concurrency if not options.rate else 1_000_000)
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=1000)
    async with httpx.AsyncClient(base_url=host, headers=headers(options.token), limits=limits) as client:
        if not options.no_ping:
            (await client.post("/api/reward/ping", data={"info_data": "{}"})).raise_for_status()
        began = time.perf_counter()

        async def guarded(number: int) -> Sample:
            try:
                sample = await one(client, number, body, options)
            finally:
                gate.release()
            words = (
                sample.error or f"{sample.total_s:.3f} s (enqueue {sample.enqueue_s:.3f}, score {sample.score_s:.2f})"
            )
            _say(f"request {number}: {words}")
            if options.print_response == "all":
                _say(json.dumps(sample.answers)[: options.print_max_chars])
            return sample

        tasks: list[asyncio.Task[Sample]] = []
        while time.perf_counter() - began < options.duration if options.duration else len(tasks) < options.num_requests:
            await gate.acquire()
            tasks.append(asyncio.create_task(guarded(len(tasks))))
            if options.rate:
                await asyncio.sleep(max(0.0, began + len(tasks) / options.rate - time.perf_counter()))
        samples = list(await asyncio.gather(*tasks))
        if options.print_response == "last" and samples:
            _say(json.dumps(samples[-1].answers)[: options.print_max_chars])
    return samples


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def summarize(samples: list[Sample], seconds: float) -> dict[str, Any]:
    """Counts, and percentiles with linear interpolation."""
    good = [sample for sample in samples if not sample.error]
    report: dict[str, Any] = {
        "n": len(good),
        "errors": dict(collections.Counter(sample.error.split(":")[0] for sample in samples if sample.error)),
        "jobs_per_second": round(len(good) / seconds, 3),
    }
    for name in ("total_s", "enqueue_s", "score_s"):
        values = [getattr(sample, name) for sample in good]
        if values:
            points = {f"p{p}": round(float(np.percentile(values, p)), 4) for p in (50, 90, 95, 99)}
            report[name] = {"mean": round(float(np.mean(values)), 4), "min": min(values), "max": max(values), **points}
    return report


@contextlib.contextmanager
def own_service() -> Iterator[str]:
    """A service with the mock reward for the time of the measurement."""
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, "-m", "cosmos_rl_reward.cli", "--rewards", "mock", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--state-dir", state], stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
        )
        assert process.stderr is not None
        try:
            host = next(line.split()[-1] for line in process.stderr if "listening on" in line)
            _wait_until_ready(host)
            yield host
        finally:
            process.terminate()
            process.communicate()


def _wait_until_ready(host: str) -> None:
    """For half a minute at most; a service that is not ready then fails the requests."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{host}/readyz").status_code == 200:
                return
        time.sleep(0.1)


def main(argv: list[str] | None = None) -> int:
    """Run the measurement; 1 when a request failed."""
    options = parse(argv)
    with own_service() if options.self_test else contextlib.nullcontext(options.host) as host:
        options.reward_fn = options.reward_fn or [default_reward(host, options)]
        began = time.perf_counter()
        samples = asyncio.run(measure(host, options))
        report = summarize(samples, time.perf_counter() - began)
    if report["n"]:
        total = report["total_s"]
        _say(f"n {report['n']} mean {total['mean']:.3f} min {total['min']:.3f} max {total['max']:.3f}")
        _say(f"p50 {total['p50']:.3f} p90 {total['p90']:.3f} p95 {total['p95']:.3f} p99 {total['p99']:.3f}")
    _say(f"{report['jobs_per_second']:.2f} jobs a second, errors: {report['errors'] or 'none'}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return int(bool(report["errors"]))


if __name__ == "__main__":
    raise SystemExit(main())
