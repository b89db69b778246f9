"""Runs the benchmarks, or those that are named, and prints one table (`make bench ARGS="rollout memory"`).

What a busy machine changes is marked: wall times. CPU seconds and ratios of them it changes by some percent.
"""

import importlib
import logging
import sys

import torch

from cosmos_rl.utils.logging import logger

PARTS = (
    "start_up",
    "sft_step",
    "rank_invariant",
    "cache_fill",
    "growth",
    "rollout",
    "nft_update",
    "reward_overlap",
    "reward_submit",
    "async_saves",
    "memory",
    "nft_tasks",
    "driver",
    "trained_steps",
    "exact_tilt",
)

BUSY = "  (a busy machine changes this)"


def main(names: list[str]) -> None:
    """Measure and print."""
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        sys.exit(f"no benchmark of that name: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    logger.setLevel(logging.WARNING)
    torch.set_num_threads(1)
    rows = [row for name in names or PARTS for row in importlib.import_module(f"benchmarks.{name}").measure()]
    width = max(len(row[0]) for row in rows)
    for what, result, target in rows:
        print(f"{what:{width}}  {result:32}  target {target}{BUSY if 'wall' in what else ''}")


if __name__ == "__main__":
    main(sys.argv[1:])
