"""A frozen weight in 8 bits, and the product with it. Imports torchao."""

from typing import Any

import torch
from torch import Tensor
from torchao.quantization import Int8Tensor, PerRow  # pyright: ignore[reportMissingImports]


class FrozenInt8(Int8Tensor):
    """torchao's 8-bit weight (one scale a row), whose product keeps 8 bits for the backward pass.

    The product of torchao's own class lets autograd keep an unpacked copy of each weight until the backward pass.
    """

    def get_original_weight(self) -> Tensor:
        """The weight as numbers, of the dtype that it had."""
        return self.dequantize()


class _Linear(torch.autograd.Function):
    """``x W^T`` with a weight that is unpacked in each pass and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(x, weight.dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [weight], [gradient] = ctx.saved_tensors, gradients
        return gradient @ weight.dequantize(gradient.dtype), None


@FrozenInt8.implements_torch_function(torch.nn.functional.linear)
def _linear(_function: Any, _types: Any, args: Any, kwargs: Any) -> Tensor:
    def product(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        out: Any = _Linear.apply(x, weight)
        return out if bias is None else out + bias.to(out.dtype)

    return product(*args, **kwargs)


def pack_int8(weight: Tensor) -> FrozenInt8:
    """A weight ``[out, in]`` in 8 bits: code times scale, the scale of a row is its largest magnitude / 127.5.

    Computed in float32 whatever the weight's dtype, in which a scale would be rounded.
    """
    packed: Any = FrozenInt8.from_hp(weight.float(), PerRow())
    return FrozenInt8(packed.qdata, packed.scale, packed.block_size, weight.dtype, zero_point=packed.zero_point)
