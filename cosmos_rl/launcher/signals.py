"""Requests to stop, as they come from people (Ctrl-C) and schedulers (SIGTERM, SIGUSR1)."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130
ON_PURPOSE = (EXIT_INTERRUPTED, EXIT_USER_ERROR, EXIT_FAILED, EXIT_STOPPED)
"""Codes that a worker chooses itself: it is not started again."""


class StopRequest:
    """Whether this process was asked to stop: `requested` is the first signal's name, or None."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self.forward: Callable[[], None] | None = None
        """Called after each signal, when set."""
        self._interrupts = 0

    def note(self, name: str) -> None:
        """Record the arrival of signal `name`; the first one stays the reason."""
        self.requested = self.requested or name
        self._interrupts += name == "SIGINT"

    @property
    def insisted(self) -> bool:
        """Whether Ctrl-C came twice: stop now, unsaved."""
        return self._interrupts > 1

    @property
    def exit_code(self) -> int:
        """What the process returns when it ends because of this request."""
        if self.requested is None:
            return 0
        return EXIT_INTERRUPTED if self.requested == "SIGINT" else EXIT_STOPPED


@contextlib.contextmanager
def listening(stop: StopRequest) -> Iterator[None]:
    """Within the block stop signals are recorded in `stop` and handed on to `stop.forward`."""

    def handle(number: int, _frame: FrameType | None) -> None:
        stop.note(signal.Signals(number).name)
        if stop.forward:
            stop.forward()

    before = {name: signal.signal(getattr(signal, name), handle) for name in STOP_SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
