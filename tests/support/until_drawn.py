"""Runs the script that the first argument names, and stays in each phase until the live display has drawn it: a test
then sees phases of any length."""

import os
import runpy
import sys
import time
from typing import Any

from cosmos_rl.distributed import phase
from cosmos_rl.distributed.phase import Phase

_LIMIT_S = 120.0


class Drawn:
    """Standard output, with the newest drawing of the display."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.newest = stream, ""

    def write(self, text: str) -> int:
        if text.startswith("\r\x1b[J"):
            self.newest = text
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Waiting(list[Phase]):
    """The phases that the process is in."""

    def __init__(self, screen: Drawn) -> None:
        super().__init__()
        self._screen = screen

    def append(self, entered: Phase) -> None:
        super().append(entered)
        self._screen.newest, deadline = "", time.monotonic() + _LIMIT_S
        while entered.name not in self._screen.newest:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{entered.name}: not drawn within {_LIMIT_S:g} s")
            time.sleep(0.01)


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0":  # it draws
        drawn: Any = Drawn(sys.stdout)
        sys.stdout, phase._entered = drawn, Waiting(drawn)
    runpy.run_module(sys.argv[1], run_name="__main__")
