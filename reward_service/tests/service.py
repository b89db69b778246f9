"""Runs the real service as a process tree, and talks to it as a client would."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
import psutil

TESTS = Path(__file__).parent
MOODY: dict[str, Any] = {"reward_type": "moody", "reward_class": "moody_reward:Moody"}


def toml(value: Any) -> str:
    """A configuration as TOML (tables of simple values only)."""
    lines, tables = [], []
    for key, item in value.items():
        if isinstance(item, list):
            tables += [f"[[{key}]]\n" + toml_row(row) for row in item]
        elif isinstance(item, dict):
            tables.append(f"[{key}]\n" + toml_row(item))
        else:
            lines.append(f"{key} = {json.dumps(item)}")
    return "\n".join(lines + tables)


def toml_row(row: dict[str, Any]) -> str:
    def text(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{k} = {text(v)}" for k, v in item.items()) + "}"
        return json.dumps(item)

    return "\n".join(f"{k} = {text(v)}" for k, v in row.items())


def npy(array: np.ndarray) -> bytes:
    """Bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def body(array: np.ndarray, reward: str = "moody", prompts: list[str] | None = None, **metadata: Any) -> bytes:
    """A body as old clients build it."""
    data = {"media_type": "image", "prompts": prompts or ["a"] * len(array), "reward_fn": {reward: 1.0}, **metadata}
    return json.dumps(data).encode() + b"\n" + npy(array)


def image(value: int = 7, count: int = 1, side: int = 8) -> np.ndarray:
    """Flat images ``[count, side, side, 3]``."""
    return np.full((count, side, side, 3), value, np.uint8)


class Service:
    """One ``cosmos-rl-reward``; use it as a context manager."""

    def __init__(self, folder: Path, config: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.state = folder, folder / "state"
        self.config = folder / "rewards.toml"
        self.config.write_text(toml({"port": 0, "state_dir": str(self.state), "drain_s": 5, **config}))
        paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
        self.log = folder / "log"
        self.port = int(config.get("port", 0))
        self.process: subprocess.Popen[bytes] | None = None
        self.headers: dict[str, str] = {}

    def start_front_only(self) -> "Service":
        """Start it without workers, and wait for those elsewhere."""
        return self.start(extra=["--front-only"])

    def start(
        self, ready: bool = True, extra: list[str] | None = None, terminal: tuple[int, int] | None = None
    ) -> "Service":
        """Start it with its log in a file, or in a ``terminal`` of so many lines and columns, whose text gets there."""
        begin = self.log.stat().st_size if self.log.exists() else 0
        command = [sys.executable, "-m", "cosmos_rl_reward.cli", "--config", str(self.config)]
        command += ["--port", str(self.port), *(extra or [])]
        with open(self.log, "ab") if terminal is None else self._open_terminal(*terminal) as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        self.until(lambda: re.search(rb"listening on \S+:(\d+)", self._tail(begin)), 20, "the service listens")
        found = re.search(rb"listening on \S+:(\d+)", self._tail(begin))
        assert found
        self.port = int(found[1])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=70, headers=self.headers)
        if ready:
            self.until(lambda: self.get("/readyz").status_code == 200, 60, "all rewards are ready")
        return self

    def _open_terminal(self, lines: int, columns: int) -> IO[bytes]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

        def copy() -> None:
            ended = contextlib.suppress(OSError)  # all who had it open have ended
            with open(self.log, "ab", buffering=0) as log, open(ours, "rb", buffering=0) as screen, ended:
                while piece := screen.read(2**16):
                    log.write(piece)

        self.copying = threading.Thread(target=copy, daemon=True)
        self.copying.start()
        return open(theirs, "wb", buffering=0)

    def _tail(self, begin: int) -> bytes:
        with open(self.log, "rb") as file:
            file.seek(begin)
            return file.read()

    def until(self, condition: Any, seconds: float, what: str, *, killed: bool = False) -> Any:
        """Wait for a truth; on failure show the log's end. A service that has ended becomes nothing more, unless it is
        ``killed`` and its children are waited for."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if value := condition():
                    return value
            except (httpx.HTTPError, psutil.Error):
                pass
            if self.process is not None and self.process.poll() is not None and not killed:
                break
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds} s: {what}\n{self.log.read_text()[-6000:]}")

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.client.get(path, **kwargs)

    def enqueue(self, content: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post("/api/reward/enqueue", content=content, **kwargs)

    def submit(self, array: np.ndarray, *args: Any, **kwargs: Any) -> str:
        """Enqueue a job that has to be accepted; returns its id."""
        answer = self.enqueue(body(array, *args, **kwargs))
        assert answer.status_code == 200, answer.text
        return answer.json()["uuid"]

    def pull(self, job: str, reward: str = "moody", wait: float = 30) -> httpx.Response:
        return self.client.post("/api/reward/pull", data={"uuid": job, "type": reward, "wait": str(wait)})

    def result(self, job: str, reward: str = "moody", wait: float = 30) -> dict[str, Any]:
        """The final result of a job."""
        answer = self.pull(job, reward, wait)
        assert answer.status_code == 200, answer.text + self.log.read_text()[-3000:]
        return answer.json()

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The service's processes by role: front, workers, broker, scorer."""
        assert self.process is not None
        found: dict[str, list[psutil.Process]] = {"front": [], "workers": [], "broker": [], "scorer": []}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = " ".join(child.cmdline())
            except psutil.Error:
                continue
            for role, mark in (("front", "roles front"), ("workers", "roles workers"), ("scorer", "scorer.py")):
                if mark in line:
                    found[role].append(child)
            if "unixsocket" in line or "valkey-server" in line or "redis-server" in line:
                found["broker"].append(child)
        return found

    def kill(self, role: str) -> None:
        """kill -9 of one process."""
        self.until(lambda: self.processes()[role], 20, f"there is a {role} process")[0].kill()

    def kill_root(self) -> None:
        """kill -9 of the process that was started."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it and return the exit code; nothing may be left."""
        if self.process is None:
            return 0
        family = [p for group in self.processes().values() for p in group] if self.process.poll() is None else []
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=5)
        self.client.close()
        self.process = None
        assert not alive, [p.cmdline() for p in alive]
        return code

    def __enter__(self) -> "Service":
        return self if self.process else self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
