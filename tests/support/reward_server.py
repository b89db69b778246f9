"""A reward service that misbehaves as a test asks, for tests of the client."""

import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import numpy as np

Answer = tuple[int, Any] | tuple[int, Any, Mapping[str, str]] | None
"""Status, JSON or bytes, and headers; None hangs up without an answer."""


@dataclass
class Job:
    """A request that has come in."""

    number: int
    line: dict[str, Any]
    array: np.ndarray
    body: bytes
    headers: Mapping[str, str]


@dataclass
class RewardServer:
    """`scores` answers pulls, `take` answers requests before they are looked at; both can be replaced by a test."""

    take: Callable[[int, Mapping[str, str]], Answer] = lambda number, headers: None
    """(number of the try, headers) -> what to answer instead of taking it, or None to take it."""
    pull: Callable[[Job, str, int], Answer] = lambda job, reward, tries: (200, result(job, reward))
    """(job, reward, which pull of it, from 1) -> the answer."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the answer to a request."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every answer."""
    bytes_per_s: float | None = None
    jobs: list[Job] = field(default_factory=list)
    pulls: list[tuple[dict[str, str], Mapping[str, str]]] = field(default_factory=list)
    enqueued: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self._tries: Counter[tuple[str, str]] = Counter()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                owner.serve(self)

            def log_message(self, format: str, *args: object) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.05), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/api/reward"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        body = self._read(request, int(request.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in request.headers.items()}
        answer = self._enqueue(body, headers) if request.path.endswith("/enqueue") else self._pull(body, headers)
        if answer is None:
            request.close_connection = True
            return
        status, content, more = (*answer, {}) if len(answer) == 2 else answer
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        request.send_response(status)
        for name, value in {**self.headers, **more, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

    def _read(self, request: BaseHTTPRequestHandler, size: int) -> bytes:
        if self.bytes_per_s is None:
            return request.rfile.read(size)
        parts = []
        while size:
            parts.append(request.rfile.read(min(size, 2**18)))
            size -= len(parts[-1])
            time.sleep(len(parts[-1]) / self.bytes_per_s)
        return b"".join(parts)

    def _enqueue(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        with self.lock:
            self.enqueued += 1
            number = self.enqueued
        if (refused := self.take(number, headers)) is not None:
            return None if refused == DROP else refused
        line, _, payload = body.partition(b"\n")
        array = np.load(io.BytesIO(payload), allow_pickle=False)
        with self.lock:
            self.jobs.append(Job(len(self.jobs) + 1, json.loads(line), array, body, headers))
            job = self.jobs[-1]
        return 200, {"uuid": f"u{job.number}", **self.extra}

    def _pull(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        key = (form["uuid"], form["type"])
        with self.lock:
            self.pulls.append((form, headers))
            self._tries[key] += 1
            job = self.jobs[int(form["uuid"][1:]) - 1]
        return self.pull(job, form["type"], self._tries[key])


DROP: Answer = (0, "drop")
"""In place of an answer to a request: hang up."""
NOT_READY: Answer = (400, {"message": "Not found scores for u"})


def result(job: Job, reward: str, **changed: Any) -> dict[str, Any]:
    """A result whose scores are the mean of each sample / 255, under the reward's name and `x_reward`."""
    means = (job.array.reshape(len(job.array), -1).mean(1) / 255).tolist()
    scores = {reward: means, f"{reward}_reward": [2 * mean for mean in means]}
    return {"scores": scores, "duration": "0.01", "decoded_duration": "0.00", "type": reward, **changed}
