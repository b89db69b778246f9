"""torchao's 8-bit Adam and AdamW, with moments that any number of ranks can take over."""

from typing import Any

import torch
from torch import Tensor

from cosmos_rl.distributed.blocks import BLOCK, blocks_in_a_row
from cosmos_rl.distributed.sharding import local_part, shard_like
from cosmos_rl.errors import UserError


def eight_bit_optimizer(name: str) -> Any:
    """The class of ``Adam8bit`` or ``AdamW8bit``.

    Raises:
        UserError: torchao is missing.
    """
    try:
        from torchao import optim  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f'train.optm_name = "{name}" needs torchao: pip install torchao') from error

    class EightBit(getattr(optim, name)):
        """torchao decides by the part that a rank holds, so that ranks would differ; here the whole tensor decides."""

        def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
            local = local_part(p)
            if not blocks_in_a_row(p.shape) or local.numel() == 0:
                return torch.zeros_like(p)
            return shard_like(p, self._subclass_zeros(local, signed, BLOCK), p.shape).to(p.device)

    return EightBit
