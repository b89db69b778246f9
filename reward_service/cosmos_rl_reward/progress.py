"""How far the work on each reward is: the numbers, and the line of a log that says what an interval brought."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_rl_reward.results import EXPIRED, FAILED

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Totals:
    """What was done of one reward since this process was started."""

    scored: int = 0
    """Samples with a score."""
    unscored: int = 0
    """Samples without one, in jobs that have a result."""
    failed: int = 0
    """Jobs that failed or expired."""

    def count(self, event: Mapping[str, Any]) -> "Totals":
        """With one more job, of whose end this is the event."""
        unscored = event.get("failed", 0)
        return Totals(
            self.scored + event.get("items", 0) - unscored,
            self.unscored + unscored,
            self.failed + (event["state"] in (FAILED, EXPIRED)),
        )

    def since(self, before: "Totals") -> "Totals":
        """What was done after ``before``."""
        return Totals(self.scored - before.scored, self.unscored - before.unscored, self.failed - before.failed)


@dataclass(frozen=True)
class RewardProgress:
    """One reward."""

    state: str
    """``ready``, ``idle``, ``loading``, ``failed`` or ``absent``."""
    reason: str = ""
    queued: int | None = None
    """Jobs without a result, also those that are being scored; None where that is not known, on a worker host."""
    totals: Totals = Totals()


@dataclass(frozen=True)
class Snapshot:
    """All rewards at one time."""

    time: float
    """Seconds on a clock that only grows."""
    rewards: Mapping[str, RewardProgress]


Look = Callable[[], Snapshot]


def per_second(before: Snapshot, now: Snapshot, reward: str) -> float | None:
    """Samples that got a score, per second between two snapshots; None where no time is between them."""
    if now.time <= before.time or reward not in before.rewards:
        return None
    done = now.rewards[reward].totals.since(before.rewards[reward].totals)
    return done.scored / (now.time - before.time)


def describe_interval(before: Snapshot, now: Snapshot) -> str:
    """One line on what happened between two snapshots; empty when nothing did and nothing waits."""
    parts = [_describe_reward(name, before, now) for name in now.rewards]
    if not any(parts):
        return ""
    return f"last {now.time - before.time:.0f} s: {'; '.join(filter(None, parts))}"


def _describe_reward(name: str, before: Snapshot, now: Snapshot) -> str:
    reward = now.rewards[name]
    known = before.rewards.get(name, RewardProgress(""))
    done = reward.totals.since(known.totals)
    lost = reward.state == "absent" != known.state  # the other states are logged where they begin
    if done == Totals() and not reward.queued and not lost:
        return ""
    found = [f"{name} {_count(done.scored, 'sample')}"]
    if rate := per_second(before, now, name):
        found.append(f"{rate:,.1f}/s" if rate >= 1 else f"{rate:.2g}/s")
    if done.unscored:
        found.append(f"{done.unscored:,} without a score")
    if done.failed:
        found.append(f"{_count(done.failed, 'job')} failed")
    if reward.queued:
        found.append(f"{_count(reward.queued, 'job')} unfinished")
    if reward.state != "ready":
        found.append(reward.state)
    return ", ".join(found)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


async def log_progress(look: Look, every_s: float) -> None:
    """A line in the log every ``every_s`` seconds in which something happened, and one at the end, until cancelled."""
    before = look()
    try:
        while True:
            await asyncio.sleep(every_s)
            before = _log_interval(before, look())
    finally:
        _log_interval(before, look())


def _log_interval(before: Snapshot, now: Snapshot) -> Snapshot:
    if line := describe_interval(before, now):
        logger.info("%s", line)
    return now
