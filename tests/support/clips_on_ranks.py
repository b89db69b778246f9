"""One of two ranks that make videos, without a model: `python -m tests.support.clips_on_ranks CONFIG FOLDER STEP`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cosmos_rl.distributed.context import process_group
from cosmos_rl.policy.trainer.data_parallel import gather_over_ranks
from cosmos_rl.policy.trainer.own_media import OwnMedia
from cosmos_rl.tracking.media import Shown, save_gallery

COUNT, FRAMES, SIDE = 5, 9, 64


def clip(index: int) -> torch.Tensor:
    """A video uint8 ``[T, H, W, 3]`` that is like no other one; the first has one colour."""
    shades = torch.arange(SIDE * SIDE * 3).reshape(SIDE, SIDE, 3) // 64 * (index > 0) + 40 * index
    return (shades.expand(FRAMES, -1, -1, -1) % 256).to(torch.uint8)


def main(_: str, folder: str, step: str, *ranks: str) -> int:
    """Make five videos in chunks of two over all ranks and write them as a gallery; each rank says what it held."""
    gather, sent = dist.all_gather, []

    def noted(parts: list[torch.Tensor], own: torch.Tensor, **kwargs: Any) -> Any:
        sent.append(own.nbytes)
        return gather(parts, own, **kwargs)

    dist.all_gather = noted
    with process_group("cpu") as context:
        own = OwnMedia(context)
        (blank,) = gather_over_ranks(
            COUNT, 2, context, lambda indices, _: (own.keep(indices, torch.stack([clip(i) for i in indices])),)
        )
        shown = [Shown(own[i], f"clip {i}", i, "fixed", blank=bool(blank[i]), fps=16.0) for i in range(COUNT)]
        save_gallery(Path(folder) / "media/validation/step_1", shown, context=context)
        held = [one.sample_id for one in shown if one.pixels is not None]
        empty = [one.sample_id for one in shown if one.blank]
        print(f"rank {context.rank} held {held} blank {empty} sent {sum(sent)} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
