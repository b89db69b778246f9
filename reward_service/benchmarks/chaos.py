"""Kill the service's processes at random while jobs pour in, and check from outside that none is lost.

``python -m benchmarks.chaos --jobs 2000 --kills 60``

Three parts. The *service* runs as a process tree that is started again, as systemd would. The *checker* is a process of
its own that knows only HTTP and its own log on disk; it is killed and started again, too. The *killer* (this process)
kills front, workers, scorer, broker, root or checker with SIGKILL; once, the broker's folder is wiped as well.

Every accepted job has to end once: a second pull has to show the same bytes. The log proves it.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.service import MOODY, Service, body, image

_ROLES = ("front", "workers", "scorer", "broker", "root", "checker")


def _log(file: Any, **entry: Any) -> None:
    file.write(json.dumps(entry) + "\n")
    file.flush()
    os.fsync(file.fileno())


def read_log(path: Path) -> list[dict[str, Any]]:
    """Whole lines of the checker's log; the last one may have been cut by a kill."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def check(url: str, path: Path, jobs: int, seed: int) -> None:
    """The checker: submit what is not accepted, pull what has not ended, pull again what has."""
    entries = read_log(path)
    keys = {e["n"]: e["key"] for e in entries if e["do"] == "send"}
    accepted = {e["n"]: e["job"] for e in entries if e["do"] == "accepted"}
    ended = {e["n"] for e in entries if e["do"] == "ended"}
    random_ = random.Random(seed + len(entries))
    with open(path, "a") as log, httpx.Client(base_url=url, timeout=30) as client:
        log.write("\n")  # after a line that was cut
        while len(ended) < jobs:
            progress = False
            for n in range(jobs):
                if n in ended or (len(accepted) - len(ended) > 200 and n not in accepted):
                    continue
                with contextlib.suppress(httpx.HTTPError):
                    if n not in accepted:
                        if n not in keys:
                            keys[n] = str(uuid.uuid4())
                            _log(log, do="send", n=n, key=keys[n])
                        prompt = [f"sleep {random_.random() * 0.05:.3f}" if n % 7 else "raise no"]
                        content = body(image(n % 200), "moody", prompts=["x"] if n % 3 else prompt)
                        headers = {"Idempotency-Key": keys[n]}
                        answer = client.post("/api/reward/enqueue", content=content, headers=headers)
                        if answer.status_code == 200:
                            accepted[n] = answer.json()["uuid"]
                            _log(log, do="accepted", n=n, job=accepted[n], t=time.time())
                            progress = True
                        elif answer.status_code == 409:  # the random prompt of an earlier life
                            keys[n] = str(uuid.uuid4())
                            _log(log, do="send", n=n, key=keys[n])
                    elif n % 5 == random_.randrange(5):
                        progress |= _pull(client, log, n, accepted[n], ended)
            if not progress:
                time.sleep(0.05)
                with contextlib.suppress(httpx.HTTPError):
                    for n, job in accepted.items():
                        if n not in ended:
                            _pull(client, log, n, job, ended)
        for n, job in accepted.items():  # all are over: look once more
            for _ in range(100):
                with contextlib.suppress(httpx.HTTPError):
                    if _pull(client, log, n, job, set()):
                        break
                time.sleep(0.1)
        _log(log, do="done")


def _pull(client: httpx.Client, log: Any, n: int, job: str, ended: set[int]) -> bool:
    answer = client.post("/api/reward/pull", data={"uuid": job, "type": "moody"})
    if answer.status_code != 200:
        if answer.json().get("state") == "unknown":
            _log(log, do="lost", n=n, job=job)
        return False
    data = answer.json()
    digest = hashlib.sha256(answer.content).hexdigest()
    mean = data["scores"]["mean"][0] if data["scores"] else None
    _log(
        log, do="ended", n=n, state=data["state"], error=data.get("error", ""), mean=mean, digest=digest, t=time.time()
    )
    ended.add(n)
    return True


class _Storm:
    """Keeps service and checker running, and kills them."""

    def __init__(self, folder: Path, jobs: int, seed: int) -> None:
        config = {"reward_args": [MOODY], "max_queued_jobs": 100_000, "max_attempts": 5}
        self.service = Service(folder / "service", config).start()
        self.log, self.jobs, self.seed = folder / "checker.log", jobs, seed
        self.checker = self._check()
        self.outages: dict[str, list[float]] = collections.defaultdict(list)

    def _check(self) -> subprocess.Popen[bytes]:
        url = f"http://127.0.0.1:{self.service.port}"
        arguments = ["--check", url, "--jobs", str(self.jobs), "--seed", str(self.seed), "--log", str(self.log)]
        return subprocess.Popen([sys.executable, "-m", "benchmarks.chaos", *arguments], env=os.environ)

    def kill(self, role: str, wipe: bool) -> None:
        """One kill, and how long until a fresh job gets its result."""
        if role == "checker":
            self.checker.kill()
            self.checker.wait()
            self.checker = self._check()
            return
        began = time.monotonic()
        if role == "root":
            assert self.service.process is not None
            self.service.process.kill()
            self.service.process.wait()
            self.service.start(ready=False)
        else:
            with contextlib.suppress(psutil.Error):
                self.service.kill(role)
        if wipe:
            shutil.rmtree(self.service.state / "run", ignore_errors=True)
            (self.service.state / "run").mkdir(mode=0o700)
        self.service.until(self._probe, 60, f"a job is scored after the {role} was killed")
        self.outages[role].append(time.monotonic() - began)

    def _probe(self) -> bool:
        answer = self.service.enqueue(body(image(1), "moody"), timeout=5)
        return answer.status_code == 200 and self.service.pull(answer.json()["uuid"], wait=10).status_code == 200


def judge(path: Path, jobs: int) -> dict[str, Any]:
    """What the log proves."""
    entries = read_log(path)
    accepted = {e["job"]: e["n"] for e in entries if e["do"] == "accepted"}
    ends: dict[int, set[str]] = collections.defaultdict(set)
    states: dict[int, str] = {}
    wrong = []
    for e in entries:
        if e["do"] == "ended":
            ends[e["n"]].add(e["digest"])
            states[e["n"]] = e["state"]
            if e["mean"] is not None and e["mean"] != e["n"] % 200:
                wrong.append(e["n"])
    return {
        "accepted": len(accepted),
        "ended": len(ends),
        "states": dict(collections.Counter(states.values())),
        "lost": sorted({e["n"] for e in entries if e["do"] == "lost"}),
        "ended_twice": sorted(n for n, digests in ends.items() if len(digests) > 1),
        "wrong_score": wrong,
        "unfinished": sorted(set(range(jobs)) - set(ends)),
    }


def storm(folder: Path, jobs: int, kills: int, seed: int) -> dict[str, Any]:
    """Run it; returns the report."""
    random_ = random.Random(seed)
    chaos = _Storm(folder, jobs, seed)
    roles = [_ROLES[i % len(_ROLES)] for i in range(kills)]
    random_.shuffle(roles)
    wiped = False
    try:
        for role in roles:
            time.sleep(random_.uniform(0.2, 1.5))
            wipe = role == "broker" and not wiped
            wiped |= wipe
            chaos.kill(role, wipe)
        chaos.checker.wait(timeout=1800)
        killed = {role: roles.count(role) for role in _ROLES}
        outages = {role: round(max(times), 2) for role, times in chaos.outages.items()}
        return {"killed": killed, "longest_outage_s": outages, **judge(chaos.log, jobs)}
    finally:
        chaos.checker.kill()
        chaos.service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--max-outage", type=float, default=10, help="seconds; a busy machine needs more")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        check(options.check, options.log, options.jobs, options.seed)
        return
    with tempfile.TemporaryDirectory() as temporary:
        report = storm(options.folder or Path(temporary), options.jobs, options.kills, options.seed)
    print(json.dumps(report, indent=2))
    bad = report["lost"] or report["ended_twice"] or report["wrong_score"] or report["unfinished"]
    raise SystemExit(bool(bad) or max(report["longest_outage_s"].values()) > options.max_outage)


if __name__ == "__main__":
    main()
