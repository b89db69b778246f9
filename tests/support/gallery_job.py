"""One rank of an online job that writes down how many bytes each of its gathers sends: for `train_on_ranks`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.nft_runs import Job, run_here


def main(config_file: str, folder: str, resume_step: str, *overrides: str) -> int:
    """Train as this rank; ``gathered_<rank>.txt`` in the folder has a line for each gather."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gather, record = dist.all_gather, Path(folder) / f"gathered_{rank}.txt"

    def noted(parts: list[torch.Tensor], own: torch.Tensor, **kwargs: Any) -> Any:
        with record.open("a") as file:
            file.write(f"{own.nbytes}\n")
        return gather(parts, own, **kwargs)

    dist.all_gather = noted
    torch.set_num_threads(1)
    run_here(Job(Path(config_file), Path(folder), overrides, int(resume_step)), ranks, rank)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
