"""Ages that no step of the wall clock changes. Only the standard library: workers in other environments import it."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from pathlib import Path


def uptime() -> float:
    """Seconds since this machine was started, time asleep included; it only grows."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def boot() -> str:
    """A name for this machine since it was started; where the system has none, one of this process."""
    return _BOOT


def _read_boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return uuid.uuid4().hex


_BOOT = _read_boot()


class SteadyClock:
    """Unix time as it was when the file was made, and from then on only what ``uptime`` counted.

    The file holds the time of the last ``save``. On the machine and boot that wrote it the clock continues exactly;
    after a reboot, or on another machine, it continues from that time, so time when no machine ran does not count.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = time.time() - uptime()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(path.read_text(encoding="utf-8"))
            self._offset = float(stored["time"]) - (float(stored["uptime"]) if stored["boot"] == boot() else uptime())

    def now(self) -> float:
        """Seconds."""
        return self._offset + uptime()

    def save(self) -> None:
        """Store the present time; the clocks of others that share the file are never set back."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            if stored["boot"] != boot():
                self._offset = max(self._offset, float(stored["time"]) - uptime())
        aside = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        try:
            aside.write_text(json.dumps({"time": self.now(), "uptime": uptime(), "boot": boot()}), encoding="utf-8")
            os.replace(aside, self._path)
        finally:
            aside.unlink(missing_ok=True)
