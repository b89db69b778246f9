"""Runs every benchmark and prints one table (`make bench`)."""

import logging

import torch

from benchmarks import async_saves, memory, sft_step, start_up


def main() -> None:
    """Measure and print."""
    logging.getLogger("cosmos").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    rows = [row for part in (start_up, sft_step, async_saves, memory) for row in part.measure()]
    width = max(len(row[0]) for row in rows)
    for what, result, target in rows:
        print(f"{what:{width}}  {result:32}  target {target}")


if __name__ == "__main__":
    main()
