"""What the live display shows, and that nothing which is written while it is drawn is lost or torn."""

import io
import os
import re
import sys
import threading
import time

import pytest

from cosmos_rl.distributed.memory import memory_phase
from cosmos_rl.distributed.phase import Phase, count_parts, current_phase, enter_phase
from cosmos_rl.tracking.console import Console
from cosmos_rl.tracking.live import LiveDisplay, Status, draw_text, make_console, render, show_progress
from cosmos_rl.tracking.screen import Screen, find_terminal, write_above
from tests.support.paths import ROOT
from tests.support.terminal import Emulator

NOW = 1000.0


class Terminal(io.StringIO):
    """Takes the place of a terminal."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        emulator = Emulator()
        emulator.feed(self.getvalue())
        return emulator.lines


def shown(status: Status | None, phase: Phase | None, width: int = 80, height: int = 24) -> list[str]:
    """The lines of the display, without colours."""
    console = make_console(Terminal())
    console.size = (width, height)
    emulator = Emulator()
    emulator.feed(draw_text(console, render(status, phase, NOW, width)))
    return [line.rstrip() for line in emulator.lines]


def test_before_the_first_step_it_shows_what_is_being_loaded_and_for_how_long() -> None:
    assert shown(None, Phase("loading", NOW - 14.2)) == ["", "loading, 14s"]


def test_in_a_step_it_shows_steps_time_left_the_phase_with_its_parts_and_the_newest_numbers() -> None:
    status = Status(12, 300, NOW + 11000, 38.2, {"Loss": "0.12345", "Reward": "0.4121"})
    first, steps, phase, numbers = shown(status, Phase("sampling", NOW - 7, 24, 64))
    assert first == ""
    assert steps.startswith("Step 12/300 ╸━")
    assert steps.endswith(" 4 %  38.2s/step  ETA 3h03m")
    assert phase == "sampling 24/64, 7s"
    assert numbers == "Loss 0.12345  Reward 0.4121"


def test_an_alarm_is_one_line_and_the_newest_three_stay() -> None:
    display = LiveDisplay()
    for step in range(1, 5):
        display.show_alarm(f"step {step}: held-out loss 2.1 times\n  more of it")
    display.show_step(4, 9, left_s=10.0, step_s=2.0, numbers={})
    assert display.status is not None
    lines = shown(display.status, None)
    assert lines[-3:] == [f"Alarm at step {step}: held-out loss 2.1 times" for step in (2, 3, 4)]


NUMBERS = {"Loss": "0.12345", "Reward": "0.4121", "KL": "0.0003", "Accuracy": "0.51", "Val reward": "0.3866"}
ALARM = "Alarm at step 10: held-out loss is 3.1 times that at the start"


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (30, ["Step 12/300  4 %  ETA 3h03m", "Loss 0.12345  Reward 0.4121", "Alarm at step 10: held-out lo…"]),
        (34, ["Step 12/300  4 %  ETA 3h03m", "Loss 0.12345  Reward 0.4121", "Alarm at step 10: held-out loss i…"]),
        (
            60,
            [
                "Step 12/300 ╸━━━━━━━━━━━━━━━━━━━━ 4 %  38.2s/step  ETA 3h03m",
                "Loss 0.12345  Reward 0.4121  KL 0.0003  Accuracy 0.51",
                "Alarm at step 10: held-out loss is 3.1 times that at the st…",
            ],
        ),
        (
            100,
            [
                "Step 12/300 ╸━━━━━━━━━━━━━━━━━━━━━━━ 4 %  38.2s/step  ETA 3h03m",
                "Loss 0.12345  Reward 0.4121  KL 0.0003  Accuracy 0.51  Val reward 0.3866",
                ALARM,
            ],
        ),
    ],
)
def test_what_does_not_fit_into_a_narrow_terminal_is_left_out_whole(width: int, expected: list[str]) -> None:
    status = Status(12, 300, NOW + 11000, 38.2, NUMBERS, [ALARM])
    steps, *rest = expected
    assert shown(status, Phase("sampling", NOW - 7, 24, 64), width) == ["", steps, "sampling 24/64, 7s", *rest]


@pytest.mark.parametrize("width", range(18, 110))
def test_step_loss_and_phase_are_whole_at_every_width_and_no_line_is_wider(width: int) -> None:
    status = Status(12345, 300000, NOW + 11000, 38.2, NUMBERS)
    lines = shown(status, Phase("reading data", NOW - 7, 1024, 4096), width)
    assert len(lines) == 4
    assert max(map(len, lines)) <= width
    for line, first in zip(lines[1:], ("Step 12345/300000", "reading data", "Loss 0.12345"), strict=True):
        assert line.startswith(first)
        assert "…" not in line


def test_lines_are_left_out_from_the_last_where_the_terminal_is_low() -> None:
    status = Status(12, 300, NOW + 11000, 38.2, NUMBERS, [ALARM])
    assert len(shown(status, Phase("sampling", NOW), height=3)) == 2


def test_numbers_stay_until_there_are_newer_ones() -> None:
    display = LiveDisplay()
    console = Console(10, 0, display)
    console.show(1, {"time/iteration": 2.0, "train/loss_mean": 0.5, "val/reward/mean": 0.25, "optim/grad_norm": 1.0})
    console.show(2, {"time/iteration": 3.0, "train/loss_mean": 0.25})
    assert display.status is not None
    assert display.status.numbers == {"Loss": "0.25000", "Val reward": "0.2500"}
    assert (display.status.step, display.status.total, display.status.step_s) == (2, 10, 3.0)


def test_the_innermost_phase_is_shown_and_it_counts_its_own_parts() -> None:
    assert current_phase() is None
    with memory_phase("training"):
        count_parts(1, 4)
        with enter_phase("encoding"):
            inner = current_phase()
            assert inner is not None
            assert (inner.name, inner.done, inner.total) == ("encoding", 0, 0)
        outer = current_phase()
        assert outer is not None
        assert (outer.name, outer.done, outer.total) == ("training", 1, 4)
    with pytest.raises(ZeroDivisionError), enter_phase("saving"):
        raise ZeroDivisionError
    assert current_phase() is None


def test_the_page_lists_every_phase_that_a_run_enters() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "cosmos_rl").rglob("*.py"))
    entered = set(re.findall(r"\b(?:enter|memory)_phase\(\"([^\"]+)\"\)", sources))
    (row,) = re.findall(r"^\| 2 \|(.*)$", (ROOT / "docs" / "watching.md").read_text(), re.M)
    assert "sampling" in entered
    assert set(re.findall("`(.*?)`", row)) == entered


def test_lines_of_several_writers_stand_above_the_drawing_and_the_last_screen_is_clean() -> None:
    terminal = Terminal()
    here, other = Screen(terminal), Screen(terminal)  # of two ranks
    here.draw("\nStep 1/9\nsampling, 3s")
    here.write_above(terminal, "a line of this rank\n")
    other.write_above(terminal, "a warning of another rank\n")
    here.draw("\nStep 2/9\nsampling, 1s")
    assert terminal.screen == ["a line of this rank", "a warning of another rank", "", "Step 2/9", "sampling, 1s"]
    other.write_above(terminal, "two\nlines\n")
    here.draw("\nStep 3/9")
    here.close()
    assert not here.draw("\nStep 4/9")
    assert terminal.screen == ["a line of this rank", "a warning of another rank", "two", "lines", ""]


def place_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard output and standard error, on which drawing is possible."""
    made = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COSMOS_PROGRESS", raising=False)
    monkeypatch.setattr("cosmos_rl.tracking.screen.is_in_background", lambda: False)  # these tests may be
    return made


def test_what_is_printed_in_pieces_comes_out_as_whole_lines_and_of_a_bar_the_last_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = place_terminal(monkeypatch)
    with show_progress(wanted=True, is_main=False):
        print("one", end=" ")
        sys.stderr.write("bar 1 %\rbar 50 %\r")
        print("line")
        sys.stderr.write("bar 100 %\n")
        print("no end of line", end="")
    assert terminal.screen == ["one line", "bar 100 %", "no end of line"]
    assert sys.stdout is sys.stderr is terminal


def test_a_failing_block_leaves_a_clean_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = place_terminal(monkeypatch)
    with pytest.raises(RuntimeError), show_progress(wanted=True, is_main=True), enter_phase("loading"):
        deadline = time.monotonic() + 20
        while "loading" not in terminal.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise RuntimeError
    assert terminal.screen == [""]
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_another_phase_or_step_is_drawn_at_once_and_what_does_not_change_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = place_terminal(monkeypatch)
    monkeypatch.setattr("cosmos_rl.tracking.live._EVERY_S", 3600.0)
    monkeypatch.setattr("cosmos_rl.tracking.live._LOOK_S", 0.001)

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in terminal.getvalue():
            assert time.monotonic() < deadline, text
            time.sleep(0.005)

    with enter_phase("loading"), show_progress(wanted=True, is_main=True) as display:
        wait_for("loading")
        with enter_phase("encoding"):
            wait_for("encoding")
            display.show_step(3, 9, left_s=None, step_s=None, numbers={})
            wait_for("3/9")
            time.sleep(0.05)  # fifty looks
            drawings = [text for text in terminal.getvalue().split("\r\x1b[J") if text.strip()]
    assert [text.count("encoding") for text in drawings] == [0, 1, 1]


@pytest.mark.parametrize(
    ("variable", "value"), [("TERM", "dumb"), ("TERM", None), ("COSMOS_PROGRESS", "0")], ids=["dumb", "none", "off"]
)
def test_nothing_is_drawn_where_it_is_not_possible_or_not_wanted(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None
) -> None:
    terminal = place_terminal(monkeypatch)
    assert find_terminal() is terminal
    if value is None:
        monkeypatch.delenv(variable)
    else:
        monkeypatch.setenv(variable, value)
    assert find_terminal() is None


def test_a_pipe_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert find_terminal() is None


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> str:
        status = Status(1, 4, None, None, {"Loss": "1"}, ["Alarm at step 1: x"])
        return draw_text(make_console(Terminal()), render(status, Phase("saving", NOW), NOW, 80))

    red = re.compile(r"\x1b\[[\d;]*31m")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert red.search(draw())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*[39]\d", draw())


class Gone(Terminal):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, os.strerror(5))


def test_a_terminal_that_is_gone_ends_the_drawing_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr("cosmos_rl.tracking.live._EVERY_S", 0.001)
    monkeypatch.setattr("cosmos_rl.tracking.live._LOOK_S", 0.001)
    with show_progress(wanted=True, is_main=True):
        deadline = time.monotonic() + 20
        while any(thread.name == "progress" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        from cosmos_rl.utils.logging import logger

        logger.warning("whoever read this is gone")


def test_what_two_threads_print_at_once_is_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, begun, other_is_done = Terminal(), threading.Event(), threading.Event()

    class Slow(str):
        """Takes its time to be joined with the line that waits."""

        def __radd__(self, other: str) -> str:
            begun.set()
            other_is_done.wait(0.2)
            return other + str(self)

    monkeypatch.setattr(sys, "stdout", terminal)
    with write_above(Screen(terminal)):
        thread = threading.Thread(target=sys.stdout.write, args=(Slow("one\n"),))
        thread.start()
        assert begun.wait(60)
        sys.stdout.write("two")
        other_is_done.set()
        thread.join(60)
        sys.stdout.write(" three\n")
    assert terminal.screen[:2] == ["one", "two three"]


def test_a_child_that_was_forked_while_the_screen_was_locked_can_print() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with screen._lock:
            locked.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(60)
    child = os.fork()
    if child == 0:
        screen.write_above(terminal, "a line of a child\n")
        os._exit(0 if terminal.getvalue().endswith("a line of a child\n") else 1)
    done.set()
    thread.join()
    deadline, ended = time.monotonic() + 20, (0, 0)
    while ended[0] == 0 and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)
