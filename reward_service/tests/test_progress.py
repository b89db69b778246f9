"""The numbers of progress, the line of the log, and the table on a terminal."""

import asyncio
import contextlib
import io
import logging
import os
import re
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from cosmos_rl_reward import live_table, logs
from cosmos_rl_reward.config import build
from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.live_table import LiveTable, choose_columns, draw_progress, render
from cosmos_rl_reward.progress import (
    RewardProgress,
    Snapshot,
    Totals,
    describe_interval,
    log_progress,
    per_second,
)
from tests.fronts import front_in_memory
from tests.service import body, image

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
MISSING = "not installed in this reward's environment: hpsv3; run cosmos-rl-reward-prepare"
BEFORE = Snapshot(
    100.0,
    {
        "ocr": RewardProgress("ready", "", 3, Totals(100, 1, 0)),
        "jpeg_compressibility": RewardProgress("ready", "", 0, Totals(100)),
        "hpsv3": RewardProgress("failed", MISSING, 0),
    },
)
NOW = Snapshot(
    160.0,
    {
        "ocr": RewardProgress("ready", "", 12, Totals(1304, 3, 1)),
        "jpeg_compressibility": RewardProgress("ready", "", 0, Totals(1316)),
        "hpsv3": RewardProgress("failed", MISSING, 0),
    },
)
LINE = (
    "last 60 s: ocr 1,204 samples, 20.1/s, 2 without a score, 1 job failed, 12 jobs unfinished; "
    "jpeg_compressibility 1,216 samples, 20.3/s"
)


def screen(width: int, height: int = 24) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, no_color=True)


def shown(before: Snapshot, now: Snapshot, width: int, height: int = 24) -> list[str]:
    return [re.sub(r"\x1b\[[\d;]*m", "", line) for line in render(before, now, screen(width, height))]


def test_a_job_counts_its_samples_and_whether_it_failed():
    total = Totals()
    total = total.count({"state": "succeeded", "items": 8, "failed": 3, "score_s": 0.1})
    total = total.count({"state": "succeeded", "items": 4, "failed": 0})
    for state in ("failed", "expired", "cancelled"):
        total = total.count({"state": state, "error": "x"})
    assert total == Totals(scored=9, unscored=3, failed=2)
    assert total.since(Totals(1, 1, 1)) == Totals(8, 2, 1)


def test_a_line_says_what_an_interval_brought():
    assert describe_interval(BEFORE, NOW) == LINE
    assert LINE in README
    assert per_second(BEFORE, NOW, "ocr") == pytest.approx(1204 / 60)
    assert per_second(NOW, NOW, "ocr") is None


def test_no_line_where_nothing_happened_and_one_while_jobs_wait_or_a_state_is_new():
    idle = Snapshot(0.0, {"a": RewardProgress("ready", "", 0, Totals(5)), "b": RewardProgress("ready", "", None)})
    later = Snapshot(60.0, idle.rewards)
    assert describe_interval(idle, later) == ""
    waiting = Snapshot(60.0, {"a": RewardProgress("ready", "", 1, Totals(5)), "b": idle.rewards["b"]})
    assert describe_interval(idle, waiting) == "last 60 s: a 0 samples, 1 job unfinished"
    back = Snapshot(0.0, {"a": RewardProgress("absent", "", 0, Totals(5))})
    assert describe_interval(back, Snapshot(60.0, {"a": idle.rewards["a"]})) == ""  # the worker says it
    lost = Snapshot(60.0, {"a": idle.rewards["a"], "b": RewardProgress("absent", "no worker serves it yet")})
    assert describe_interval(idle, lost) == "last 60 s: b 0 samples, absent"


def test_the_log_has_one_line_for_each_interval_with_work_and_one_for_the_rest(caplog):
    caplog.set_level(logging.INFO)
    totals = [Totals(), Totals(2), Totals(2), Totals(2), Totals(7)]
    times = iter(range(0, 500, 10))

    def look() -> Snapshot:
        total = totals.pop(0)
        if len(totals) == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        return Snapshot(float(next(times)), {"a": RewardProgress("ready", "", 0, total)})

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(log_progress(look, 0.001))
    assert caplog.messages == ["last 10 s: a 2 samples, 0.2/s", "last 10 s: a 5 samples, 0.5/s"]


def test_the_table_of_the_readme():
    lines = shown(BEFORE, NOW, 100)
    assert lines[0] == ""
    assert "\n".join(lines[1:]) in README


@pytest.mark.parametrize("width", [20, 30, 44, 52, 60, 80, 200])
def test_columns_stay_whole_and_leave_in_an_order(width):
    lines = shown(BEFORE, NOW, width)
    assert all(len(line) <= width for line in lines)
    heads = re.split(r" {2,}", lines[1].strip())
    # from the width of each column and the two spaces between them
    least = {"queued": 36, "per s": 43, "failed": 51, "scored": 59, "no score": 69}
    assert heads[:2] == ["reward", "state"] or width < 28
    assert set(heads[2:]) == {name for name, columns in least.items() if columns <= width}
    if width == 200:
        assert lines[-1].endswith(MISSING)


def test_columns_by_importance():
    widths: dict[str, int] = dict.fromkeys(("reward", "state", "queued", "scored", "per s", "no score", "failed"), 8)
    assert choose_columns(widths, 68) == ["reward", "state", "queued", "scored", "per s", "no score", "failed"]
    assert choose_columns(widths, 67) == ["reward", "state", "queued", "scored", "per s", "failed"]
    assert choose_columns(widths, 3) == ["reward", "state"]


def test_a_low_terminal_says_how_many_rewards_it_does_not_show():
    many = Snapshot(0.0, {f"reward_{k}": RewardProgress("ready", "", 0) for k in range(9)})
    lines = shown(many, many, 80, height=9)
    assert len(lines) < 9
    assert [line.split()[0] for line in lines[2:-1]] == [f"reward_{k}" for k in range(5)]
    assert lines[-1] == "and 4 more"
    assert [len(shown(many, many, 80, height)) for height in (1, 2, 3, 4, 5)] == [0, 1, 2, 3, 4]


def test_a_reason_cannot_control_the_terminal():
    hostile = Snapshot(0.0, {"a": RewardProgress("failed", "\x1b[2Jweights\nmissing", 0)})
    row = render(hostile, hostile, screen(120))[-1]
    assert "\x1b[2J" not in row
    assert row.endswith("[2Jweights missing\x1b[0m")


def test_a_front_counts_also_results_whose_event_was_lost(tmp_path):
    async def run() -> None:
        async with front_in_memory(tmp_path).run() as front:
            answer = await front.enqueue(body(image(count=4), "a"))
            job = answer.json()["uuid"]
            assert front.front.tracker.look().rewards["a"].queued == 1
            result = b'{"state": "succeeded", "scores": {"m": [1, 2, 3, null]}, "item_errors": {"3": "m: no score"}}'
            front.front.tracker.spool.write_result(job, "a", result)
            async with asyncio.timeout(30):
                while front.front.tracker.depth("a"):
                    await asyncio.sleep(0.05)
            found = front.front.tracker.look().rewards
            assert found["a"] == RewardProgress("ready", "", 0, Totals(scored=3, unscored=1))
            assert found["b"] == RewardProgress("ready", "", 0, Totals())
            text = front.front.metrics.render().decode()
            assert 'reward_items_total{result="scored",reward="a"} 3.0' in text
            assert 'reward_items_total{result="failed",reward="a"} 1.0' in text

    asyncio.run(run())


def test_a_terminal_that_takes_nothing_more_does_not_stop_the_service(monkeypatch):
    monkeypatch.setattr(live_table, "_END_S", 0.1)
    monkeypatch.setattr(live_table, "_EVERY_S", 0.01)
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(theirs, bytes(4096))
    os.set_blocking(theirs, True)
    with open(theirs, "w") as stream, LiveTable(stream) as table:
        table.shown = BEFORE, NOW
        time.sleep(0.2)  # the thread that draws waits for the terminal
    os.close(ours)


def test_a_rate_is_that_of_the_last_ten_seconds(monkeypatch):
    """Ten samples a second for 20 s, then none."""
    monkeypatch.setattr(live_table, "_EVERY_S", 0.0005)
    monkeypatch.setattr(LiveTable, "_keep_drawing", lambda self: None)
    rates, times = {}, iter(range(41))

    def look() -> Snapshot:
        time = next(times)
        now = Snapshot(float(time), {"a": RewardProgress("ready", "", 0, Totals(10 * min(time, 20)))})
        if time == 40:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        return now

    class Record(LiveTable):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "shown" and isinstance(value, tuple):
                before, now = value
                rates[now.time] = per_second(before, now, "a")

    monkeypatch.setattr(live_table, "LiveTable", Record)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(draw_progress(look, io.StringIO()))
    assert [rates[time] for time in (0, 1, 5, 20, 25, 30, 35)] == [None, 10, 10, 10, 5, 0, 0]


def test_a_log_beside_a_table_waits_for_no_terminal(monkeypatch):
    monkeypatch.setattr(logs, "_END_S", 0.1)
    monkeypatch.setattr(logs, "_MAX_LINES", 5)
    taken, taking = [], threading.Event()

    class Terminal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            taking.wait(60)
            taken.append(record.getMessage())

    handler = logs._FromThread(Terminal())
    for number in range(20):
        handler.emit(logging.LogRecord("", logging.INFO, "", 0, "line %d", (number,), None))
    handler.flush()  # returns
    assert taken == []
    taking.set()
    monkeypatch.setattr(logs, "_END_S", 60.0)
    handler.flush()
    left_out = [line for line in taken if not line.startswith("line ")]
    written = [line for line in taken if line.startswith("line ")]
    assert written == [f"line {number}" for number in range(len(written))]
    assert len(written) in (5, 6)  # one may have been on its way
    assert left_out == [f"{20 - len(written)} lines are left out here, the terminal took nothing"]


@pytest.mark.parametrize("value", [0, float("inf"), float("nan")])
def test_an_interval_that_is_no_time_is_refused(value):
    with pytest.raises(UserError, match="log_interval_s: Input should be (greater than 0|a finite number)"):
        build({"log_interval_s": value}, "rewards.toml")
