"""The live display of a run on a terminal: steps, what the run is doing, newest numbers, alarms. Rank 0 draws it."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cosmos_rl.distributed.phase import Phase, current_phase
from cosmos_rl.tracking.durations import format_duration
from cosmos_rl.tracking.screen import Screen, find_terminal, write_above
from cosmos_rl.utils.logging import logger

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_EVERY_S = 0.5
"""Between two drawings at most; one takes 1 to 2 ms."""
_LOOK_S = 0.2
"""Between two looks whether the run is in another phase or step, which is drawn at once.

A phase that is shorter may never be shown: nobody could read it.
"""
_ALARMS = 3
"""So many are shown, the newest."""
_BAR = (8, 24)
"""Columns of the bar, at least and at most."""


@dataclass(frozen=True)
class Status:
    """How far a run is."""

    step: int
    """Steps that are done."""
    total: int
    ends_at: float | None = None
    """When the last step is expected to be done, on the clock of ``time.monotonic``."""
    step_s: float | None = None
    """Seconds of the newest step."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Name -> newest value, as text."""
    alarms: Sequence[str] = ()


class LiveDisplay:
    """What a run reports of itself; drawn by a thread of its own where there is a ``screen``."""

    def __init__(self, screen: Screen | None = None) -> None:
        self._screen = screen
        self.status: Status | None = None
        self._alarms: list[str] = []

    def show_step(
        self, step: int, total: int, *, left_s: float | None, step_s: float | None, numbers: Mapping[str, str]
    ) -> None:
        """``step`` of ``total`` is done, and the rest will take about ``left_s`` seconds; numbers stay until newer."""
        ends_at = None if left_s is None else time.monotonic() + left_s
        known = self.status.numbers if self.status is not None else {}
        self.status = Status(step, total, ends_at, step_s, {**known, **numbers}, tuple(self._alarms))

    def show_alarm(self, text: str) -> None:
        """An alarm of the guard, as one line; before ``show_step`` of its step."""
        self._alarms = [*self._alarms, f"Alarm at {text.splitlines()[0]}"][-_ALARMS:]

    @contextlib.contextmanager
    def draw(self) -> Iterator[None]:
        """Draw within the block."""
        screen, ended = self._screen, threading.Event()
        if screen is None:
            yield
            return
        thread = threading.Thread(target=self._keep_drawing, args=(screen, ended), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            screen.close()

    def _keep_drawing(self, screen: Screen, ended: threading.Event) -> None:
        try:
            from rich.console import ConsoleDimensions

            console = make_console(screen.stream)
            drawn, due = None, 0.0
            while not ended.wait(_LOOK_S):
                seen, now = (self.status, current_phase()), time.monotonic()
                if seen == drawn and now < due:
                    continue
                if size := screen.size:
                    console.size = ConsoleDimensions(*size)
                if not screen.draw(draw_text(console, render(*seen, now, console.width))):
                    return
                drawn, due = seen, now + _EVERY_S
        except Exception:  # what is shown must not end what is done
            screen.close()
            logger.exception("the live display has failed and is off; training continues")


@contextlib.contextmanager
def show_progress(*, wanted: bool, is_main: bool) -> Iterator[LiveDisplay]:
    """The display of a run around the block; without a terminal, or where it is not ``wanted``, nothing is drawn."""
    stream = find_terminal() if wanted else None
    if stream is None:
        yield LiveDisplay()
        return
    screen = Screen(stream)
    with write_above(screen):  # on every rank, since all write to one terminal
        display = LiveDisplay(screen if is_main else None)
        with display.draw():
            yield display


def render(status: Status | None, phase: Phase | None, now: float, width: int) -> "RenderableType":
    """The lines of the display at the time ``now`` in a terminal of ``width`` columns."""
    from rich.console import Group
    from rich.text import Text

    rows: list[Any] = [Text("")]  # a line that another program writes here does no harm
    if status is not None:
        rows.append(_render_steps(status, now, width))
    rows.append(Text(_describe_phase(phase, now, width), style="cyan"))
    if status is not None and status.numbers:
        rows.append(_render_numbers(status.numbers, width))
    if status is not None:
        rows += [Text(alarm, style="bold red") for alarm in status.alarms]
    for row in rows:
        if isinstance(row, Text):
            row.no_wrap, row.overflow = True, "ellipsis"
    return Group(*rows)


def draw_text(console: "Console", renderable: "RenderableType") -> str:
    """The lines as the terminal takes them; fewer where it is too low."""
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(captured.get().rstrip("\n").split("\n")[: max(console.height - 1, 1)])


def make_console(stream: Any) -> "Console":
    """Writes for a terminal, and honours NO_COLOR."""
    from rich.console import Console  # only on a terminal

    return Console(file=stream, force_terminal=True, highlight=False, soft_wrap=False)


def choose_fitting(parts: Sequence[tuple[int, str]], width: int, gap: int = 2) -> list[str]:
    """Of the (rank, text) of one line those that fit into ``width`` columns, in their order.

    Texts stay whole: those of the highest rank are left out first, and that of the lowest never.
    """
    kept = list(parts)
    while len(kept) > 1 and sum(len(text) for _, text in kept) + gap * (len(kept) - 1) > width:
        kept.remove(max(kept, key=lambda part: part[0]))
    return [text for _, text in kept]


def _render_steps(status: Status, now: float, width: int) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts = [(0, f"Step {status.step}/{status.total}"), (2, f"{100 * status.step // max(status.total, 1)} %")]
    if status.step_s is not None:
        parts.append((3, f"{format_duration(status.step_s)}/step"))
    if status.ends_at is not None:
        parts.append((1, f"ETA {format_duration(max(status.ends_at - now, 0.0), whole=True)}"))
    steps, *others = choose_fitting(parts, width)
    rest = "  ".join(others)
    least, most = _BAR
    bar = min(width - len(steps) - len(rest) - 2, most)
    if bar < least:
        return Text.assemble((steps, "bold"), *(f"  {other}" for other in others))
    grid = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    grid.add_row(Text(steps, style="bold"), ProgressBar(status.total, status.step, width=bar), Text(rest))
    return grid


def _describe_phase(phase: Phase | None, now: float, width: int) -> str:
    if phase is None:
        return "…"
    counted = f" {phase.done}/{phase.total}" if phase.total else ""
    since = f", {format_duration(now - phase.began, whole=True)}"
    return "".join(choose_fitting([(0, phase.name), (1, counted), (2, since)], width, gap=0))


def _render_numbers(numbers: Mapping[str, str], width: int) -> "RenderableType":
    from rich.text import Text

    names = {f"{name} {value}": name for name, value in numbers.items()}
    text = Text()
    for part in choose_fitting(list(enumerate(names)), width):
        name = names[part]
        text.append(name, style="dim").append(f"{part.removeprefix(name)}  ", style="bold")
    text.rstrip()
    return text
