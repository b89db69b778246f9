"""Requests to stop, as they come from people (Ctrl-C, a closed terminal) and schedulers (SIGTERM, SIGUSR1)."""

import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
SAME_MOMENT_S = 0.1
"""Two SIGINT within so short a time are one request: `timeout` sends it to the command and to its group. Nobody presses
Ctrl-C twice as fast."""
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130
DELIBERATE = (EXIT_INTERRUPTED, EXIT_USER_ERROR, EXIT_FAILED, EXIT_STOPPED)
"""Codes that a worker chooses itself: it is not started again."""


class StopRequest:
    """Whether this process was asked to stop: `requested` is the first signal's name, or None."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self.forward: Callable[[], None] | None = None
        """Called after each signal, when set."""
        self._interrupts = 0
        self._last_interrupt = -SAME_MOMENT_S

    def note(self, name: str) -> None:
        """Record the arrival of signal `name`; the first one stays the reason."""
        self.requested = self.requested or name
        if name != "SIGINT":
            return
        now = time.monotonic()
        self._interrupts += now - self._last_interrupt >= SAME_MOMENT_S
        self._last_interrupt = now

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
def listen(stop: StopRequest) -> Iterator[None]:
    """Within the block stop signals are recorded in `stop` and handed on to `stop.forward`.

    A SIGHUP that this process ignores, as under `nohup`, stays ignored.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        stop.note(signal.Signals(number).name)
        if stop.forward:
            stop.forward()

    numbers = [getattr(signal, name) for name in STOP_SIGNALS]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `hold_interrupts`
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Processes started within the block get no SIGINT until they listen.

    One that comes while they still import would end them with a traceback; the launcher ends them in its own way.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_closed_terminal() -> None:
    """What is printed from now on goes nowhere: each write to a terminal that is gone would be an error."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)
