"""Runs every benchmark and prints one table (`make bench`)."""

import logging

import torch

from benchmarks import async_saves, memory, nft_update, reward_overlap, rollout, sft_step, start_up


def main() -> None:
    """Measure and print."""
    logging.getLogger("cosmos").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    parts = (start_up, sft_step, rollout, nft_update, reward_overlap, async_saves, memory)
    rows = [row for part in parts for row in part.measure()]
    width = max(len(row[0]) for row in rows)
    for what, result, target in rows:
        print(f"{what:{width}}  {result:32}  target {target}")


if __name__ == "__main__":
    main()
