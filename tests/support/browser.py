"""A headless Chromium that a test drives over a pipe, with nothing else installed."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.patience import wait_until

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """The program; None: there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """One page, by the Chrome DevTools Protocol: messages of JSON that end with a zero byte."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._count = send, receive, b"", 0
        os.set_blocking(receive, False)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        answers: list[dict[str, Any]] = []

        def answered() -> bool:
            answers.extend(one for one in self._read() if one.get("id") == self._count)
            return bool(answers)

        wait_until(answered, f"the answer of the browser to {method}")
        assert "result" in answers[0], answers[0]
        return answers[0]["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of its promise, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, place: Path | str) -> None:
        """Show a file or an address, once it is loaded."""
        url = place.absolute().as_uri() if isinstance(place, Path) else place
        self.call("Page.navigate", url=url)
        wait_until(
            lambda: self.evaluate(f"location.href == {json.dumps(url)} && document.readyState == 'complete'"),
            f"{url} loading",
        )

    def _read(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._receive, 2**16):
                self._rest += chunk
        *whole, self._rest = self._rest.split(b"\0")
        yield from map(json.loads, whole)


@contextlib.contextmanager
def browse(program: str, profile: Path, options: Sequence[str] = OPTIONS) -> Iterator[Page]:
    """A page of a browser of its own, which ends with the block; ``profile``: an empty folder."""
    (to_browser, send), (receive, from_browser) = os.pipe(), os.pipe()
    # it reads from descriptor 3 and writes to descriptor 4
    script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    command = ["bash", "-c", script, "bash", program, *options, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for descriptor in (to_browser, from_browser):
        os.close(descriptor)
    try:
        yield Page(send, receive)
    finally:
        for descriptor in (send, receive):
            os.close(descriptor)
        process.kill()
        process.wait()
