"""Media stay on the rank that made them, which writes them: only what is said about them travels between ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_rl.distributed.context import Context
from cosmos_rl.tracking.media import is_blank


class OwnMedia:
    """What this rank made of samples that are split over ranks as `gather_over_ranks` does it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rows: dict[int, Tensor] = {}
        self.are_images = True
        """Whether they can be shown: uint8."""

    def keep(self, indices: Sequence[int], media_N: Tensor) -> Tensor:
        """Keep the media ``[N, ...]`` of the samples ``indices``; which of them have one colour only, bool ``[N]``."""
        self.are_images = media_N.dtype == torch.uint8
        rows = [row.cpu() for row in media_N]
        for index, row in zip(indices, rows, strict=True):
            if index % self._context.dp_size == self._context.dp_rank:  # else it only fills up a chunk
                self._rows[index] = row
        return torch.tensor([self.are_images and is_blank(row) for row in rows])

    def __getitem__(self, index: int) -> Tensor | None:
        """Those of a sample; None: another rank has them."""
        return self._rows.get(index)
