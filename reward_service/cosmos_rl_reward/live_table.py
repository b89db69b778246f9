"""The table of a service on a terminal: state, queue, scores per second and failures of each reward, below the log.

The cursor rests where the table begins. Every process of the service, before it logs, clears what is below the cursor
(``logs``), and the next drawing puts the table under what was written: nobody needs to know who drew it.
"""

import asyncio
import collections
import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cosmos_rl_reward.logs import CLEAR_BELOW, find_terminal
from cosmos_rl_reward.progress import Look, Snapshot, log_progress, per_second

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

logger = logging.getLogger(__name__)
_FAILED = "progress is no longer shown; the service continues"  # what is shown must not end what is done
_EVERY_S = 0.5
"""Between two drawings; one takes 1 to 2 ms."""
_RATE_S = 10.0
"""Samples per second are those of so long a time."""
_END_S = 2.0
"""A terminal that is stopped (Ctrl-S) does not hold up the end for longer."""
_ORDER = ("reward", "state", "queued", "per s", "failed", "scored", "no score")
"""Columns by importance: the last ones are left out where the terminal is narrow."""
_SHOWN = ("reward", "state", "queued", "scored", "per s", "no score", "failed")
_MIN_REASON = 12
_STYLES = {"ready": "green", "loading": "yellow", "idle": "yellow", "failed": "bold red", "absent": "bold red"}


async def report_progress(look: Look, log_every_s: float) -> None:
    """The table where standard error is a terminal, else a line in the log every ``log_every_s``, until cancelled."""
    try:
        stream = find_terminal()
        if stream is not None:
            await draw_progress(look, stream)
        else:
            await log_progress(look, log_every_s)
    except Exception:
        logger.exception(_FAILED)


async def draw_progress(look: Look, stream: TextIO) -> None:
    """Draw until cancelled."""
    recent = collections.deque([look()])
    with LiveTable(stream) as table:
        while True:
            table.shown = recent[0], recent[-1]
            await asyncio.sleep(_EVERY_S)
            recent.append(look())
            while len(recent) > 2 and recent[-1].time - recent[1].time >= _RATE_S:
                recent.popleft()


class LiveTable:
    """Draws within its block, in a thread of its own: a terminal that is stopped must not stop the service.

    Attributes:
        shown: two snapshots; the numbers are those of the second one, the rates those between them.
    """

    def __init__(self, stream: TextIO) -> None:
        self.shown: tuple[Snapshot, Snapshot] | None = None
        self._stream = stream
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_drawing, name="table", daemon=True)

    def __enter__(self) -> "LiveTable":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_END_S)

    def _keep_drawing(self) -> None:
        from rich.console import Console, ConsoleDimensions  # only on a terminal

        drawn = False
        try:
            console = Console(file=self._stream, force_terminal=True, highlight=False)
            while not self._ended.wait(_EVERY_S):
                if is_in_background():
                    if drawn:  # the shell's prompt stands where the table began
                        _write(self._stream, CLEAR_BELOW)
                    drawn = False
                elif self.shown is not None:
                    # rich asks the terminal only where COLUMNS and LINES are not set
                    console.size = ConsoleDimensions(*_get_size(self._stream))
                    _draw(self._stream, render(*self.shown, console))
                    drawn = True
            if drawn:
                _draw(self._stream, [])
        except OSError:  # the terminal is gone
            return
        except Exception:
            logger.exception(_FAILED)


def is_in_background() -> bool:
    """Whether a shell has another job in the foreground or has stopped this one; on Linux, elsewhere it is never so.

    The front has a session of its own and no controlling terminal: its parent is the job.
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


def _get_size(stream: TextIO) -> tuple[int, int]:
    columns, lines = os.get_terminal_size(stream.fileno())
    return columns or 80, lines or 24


def render(before: Snapshot, now: Snapshot, console: "Console") -> list[str]:
    """The lines of the table as ``console`` shows them, none wider and not more than fit into its height."""
    names = list(now.rewards)
    room = max(console.height - 4, 1)  # an empty line, the heading, the line that counts the rest, and the log's last
    rows = [_describe_row(name, before, now) for name in names[:room]]
    widths = {column: max(len(row[column]) for row in (_HEADING, *rows)) for column in _SHOWN}
    columns = choose_columns(widths, console.width)
    lines = ["", *(_render_row(row, columns, widths, console) for row in (_HEADING, *rows))]
    if len(names) > room:
        lines.append(f"and {len(names) - room} more")
    return lines[: max(console.height - 1, 0)]


def choose_columns(widths: Mapping[str, int], width: int) -> list[str]:
    """Columns that fit side by side into ``width``, with two spaces between them; at least the first two."""
    kept = list(_ORDER)
    while len(kept) > 2 and sum(widths[column] for column in kept) + 2 * (len(kept) - 1) > width:
        kept.pop()
    return [column for column in _SHOWN if column in kept]


_HEADING = {**{column: column for column in _SHOWN}, "reason": ""}


def _describe_row(name: str, before: Snapshot, now: Snapshot) -> dict[str, str]:
    reward, rate = now.rewards[name], per_second(before, now, name)
    return {
        "reward": name,
        "state": reward.state,
        "queued": "-" if reward.queued is None else f"{reward.queued:,}",
        "scored": f"{reward.totals.scored:,}",
        "per s": "-" if rate is None else f"{rate:,.1f}",
        "no score": f"{reward.totals.unscored:,}",
        "failed": f"{reward.totals.failed:,}",
        "reason": "".join(c for c in " ".join(reward.reason.split()) if c.isprintable()),
    }


def _render_row(row: Mapping[str, str], columns: Sequence[str], widths: Mapping[str, int], console: "Console") -> str:
    from rich.text import Text

    text, heading = Text(), row is _HEADING
    for column in columns:
        cell = row[column].ljust(widths[column]) if column in ("reward", "state") else row[column].rjust(widths[column])
        text.append(cell, style=_choose_style(column, row, heading)).append("  ")
    left = console.width - len(text)
    if row["reason"] and left >= _MIN_REASON:
        text.append(row["reason"], style="dim")
    text.rstrip()
    return _capture(text, console)


def _choose_style(column: str, row: Mapping[str, str], heading: bool) -> str:
    if heading:
        return "dim"
    if column == "state":
        return _STYLES.get(row["state"], "")
    if column in ("no score", "failed") and row[column] != "0":
        return "bold red"
    return ""


def _capture(text: "Text", console: "Console") -> str:
    with console.capture() as captured:
        console.print(text, no_wrap=True, overflow="ellipsis")
    return captured.get().rstrip("\n")


def _draw(stream: TextIO, lines: Sequence[str]) -> None:
    """Draw the lines, and go back to the first one."""
    back = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
    _write(stream, f"\r{CLEAR_BELOW}{chr(10).join(lines)}\r{back}")


def _write(stream: TextIO, text: str) -> None:
    """In one call, or lines of other processes would come between."""
    data = text.encode()
    with contextlib.suppress(BlockingIOError):  # another program has made the terminal so; the next drawing repairs it
        while data:
            data = data[os.write(stream.fileno(), data) :]
