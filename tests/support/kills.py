"""Runs that are killed at random moments and continued from what they had saved."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_rl.checkpoint import layout
from tests.support.nft_runs import Job, forked, run_forked
from tests.support.patience import wait_until


def run_with_kills(
    config: Path,
    folder: Path,
    options: tuple[str, ...],
    *,
    total: int,
    kill_after: Sequence[int],
    ranks: int,
    seed: int,
    delay_s: float = 0.3,
) -> Path:
    """A run of ``total`` steps into ``folder / "killed"``, whose processes get SIGKILL within ``delay_s`` after each of
    some steps; every start resumes from the newest whole checkpoint.

    ``kill_after``: where a save follows soon, it may come before the kill or not.
    """
    killed, chance = folder / "killed", random.Random(seed)
    for wanted in kill_after:
        processes = forked([Job(config, killed, options, newest_step(killed))], ranks, folder)
        _wait_for_step(killed, wanted, processes)
        time.sleep(chance.uniform(0.0, delay_s))
        for process in processes:
            process.kill()
            process.join()
    newest = newest_step(killed)
    assert 0 < newest < total
    run_forked([Job(config, killed, options, newest)], ranks, folder)
    return killed


def newest_step(run: Path) -> int:
    """Of the whole checkpoints of a run; 0: there is none."""
    return max(layout.list_whole_steps(run / "checkpoints"), default=0) if run.is_dir() else 0


def _wait_for_step(folder: Path, step: int, processes: list[Any]) -> None:
    file = folder / "metrics.jsonl"

    def is_there() -> bool:
        assert all(process.is_alive() for process in processes), "the run ended before the moment of the kill"
        return file.exists() and len(file.read_text().splitlines()) >= step

    wait_until(is_there, "the moment of the kill", poll_s=0.002)
