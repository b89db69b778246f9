"""A few lines at the end of a terminal that are drawn again and again, while other lines are written above them.

The cursor rests where the drawn lines begin. Whoever writes, in this process or in that of another rank, first clears
what is below the cursor, so nobody needs to know how many lines there are or who drew them; the next drawing puts them
back under what was written. A process that is killed leaves nothing that the next writer does not clear.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

_CLEAR_BELOW = "\x1b[J"
SWITCH = "COSMOS_PROGRESS"
"""Environment variable; 0 turns drawing off."""


def find_terminal(environment: Mapping[str, str] = os.environ) -> TextIO | None:
    """Standard output where it is a terminal that can be drawn on and nobody has turned that off, else None."""
    stream: Any = sys.stdout
    if environment.get(SWITCH) == "0" or environment.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    try:
        return stream if stream.isatty() else None
    except (AttributeError, ValueError):  # replaced by something that is no file, or closed
        return None


def is_in_background() -> bool:
    """Whether a shell has another job in the foreground or has stopped this one; on Linux, elsewhere it is never so.

    A rank has a session of its own and no controlling terminal: its parent, the launcher, is the job.
    """
    for pid in (os.getpid(), os.getppid()):
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        state, _, group, _, _, foreground = text.rpartition(")")[2].split()[:6]
        if foreground != "-1":
            return state == "T" or foreground != group
    return False


class Screen:
    """A terminal, for the threads of one process; others may write to it too."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._lock, self._owner = threading.RLock(), os.getpid()
        self._closed = False
        """Nothing is drawn any more: the display has ended, or the terminal is gone."""
        self._drawn = False

    @property
    def size(self) -> tuple[int, int] | None:
        """Columns and lines of the terminal, whatever COLUMNS and LINES say; None where it does not know."""
        try:
            columns, lines = os.get_terminal_size(self.stream.fileno())
        except (OSError, ValueError):
            return None
        return (columns, lines) if columns and lines else None

    def draw(self, text: str) -> bool:
        """Show these lines at the end, none of which may be wider than the terminal; False: it is gone.

        Nothing is shown while the terminal belongs to another job of the shell.
        """
        rows = text.count("\n")
        back = f"\x1b[{rows}A" if rows else ""
        with self._lock:
            if self._closed:
                return False
            hidden = is_in_background()
            try:
                if not hidden:
                    _put(self.stream, f"\r{_CLEAR_BELOW}{text}\r{back}")
                elif self._drawn:  # the shell's prompt stands where the lines began
                    _put(self.stream, _CLEAR_BELOW)
            except (OSError, ValueError):
                self._closed = True
                return False
            self._drawn = not hidden
        return True

    def close(self) -> None:
        """Clear what was drawn."""
        self.draw("")
        with self._lock:
            self._closed = True

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps the other threads from writing within the block."""
        # a process that was forked from this one has the lock as it was, perhaps held for ever
        return self._lock if os.getpid() == self._owner else contextlib.nullcontext()

    def write_above(self, stream: TextIO, lines: str) -> None:
        """Write whole lines to a stream of the terminal; errors as the stream raises them."""
        with self.guard():
            _put(stream, _CLEAR_BELOW + lines)


class _Above:
    """Takes the place of ``sys.stdout`` or ``sys.stderr``: whole lines go above what is drawn."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self._screen, self._stream = screen, stream
        self._rest = ""

    def write(self, text: str) -> int:
        """Keep what has no end of line yet; of a line that is overwritten by ``\\r`` the newest text."""
        with self._screen.guard():
            whole, newline, rest = (self._rest + text).rpartition("\n")
            self._rest = rest.rpartition("\r")[2]
            if newline:
                self._screen.write_above(self._stream, f"{whole}\n")
        return len(text)

    def flush(self) -> None:
        """Nothing waits but a line that is not whole yet."""

    def finish(self) -> None:
        """Write that line as it is."""
        with self._screen.guard():
            if self._rest:
                self._screen.write_above(self._stream, self._rest)
            self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def write_above(screen: Screen) -> Iterator[None]:
    """Within the block everything that Python prints on the terminal stands above what is drawn there."""
    kept = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    placed: list[_Above] = []
    for name, stream in kept.items():
        if stream is not None and stream.isatty():
            placed.append(_Above(screen, stream))
            setattr(sys, name, placed[-1])
    try:
        yield
    finally:
        for name, stream in kept.items():
            setattr(sys, name, stream)
        for one in placed:
            with contextlib.suppress(OSError):  # the terminal is gone
                one.finish()


def clear_leftovers() -> None:
    """Clear what a rank that was killed has left on this terminal."""
    stream = find_terminal()
    if stream is not None:
        with contextlib.suppress(OSError):  # the terminal is gone
            _put(stream, _CLEAR_BELOW)


def _put(stream: TextIO, text: str) -> None:
    """In one piece, or the lines of several processes would be mixed."""
    stream.write(text)
    stream.flush()
