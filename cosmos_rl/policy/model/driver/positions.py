"""Where a state lies in what `prepare_latents` gives: some pipelines step only the frames that are not given."""

from typing import TYPE_CHECKING

import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver.contract import Size
from cosmos_rl.policy.model.driver.seams import Positions, Run

if TYPE_CHECKING:
    from cosmos_rl.policy.model.driver.calls import PipelineCalls

_BASES = {True: 1024, False: 16}
"""Positions are sent digit by digit: each must survive the tensor's dtype, float32 or less."""


def measure_positions(calls: "PipelineCalls", size: Size, leaf: int | None = None) -> Positions:
    """Send each element's own position through the pipeline, and read it in what its first step gets.

    Args:
        leaf: index of the tensor in the flat results of `prepare_latents`; None: the one that the facts name.

    Raises:
        UserError: the first step gets anything else than elements of that tensor.
    """
    leaf = calls.facts.leaf if leaf is None else leaf
    guidance = calls.facts.guidance_off
    first = Run(calls.device, on_step=lambda run, _index, _v, _t, x, _stock: run.stop(x))
    with torch.no_grad():
        calls.go(first, 1, guidance, size)
        assert first.spec is not None
        template = first.prepared[leaf]
        count, base = template[0].numel(), _BASES[template.dtype == torch.float32]
        position, found, unit = torch.arange(count), torch.zeros(0), 1
        shape: tuple[int, ...] = ()
        while unit < count:
            digits = (position // unit % base).to(template).reshape(template.shape)
            run = Run(
                calls.device,
                text=first.recorded,
                encoded_media=first.media_results,
                prepare=(first.prepared, first.spec),
                on_step=lambda run, _index, _v, _t, x, _stock: run.stop(x),
                state=digits,
                leaf=leaf,
            )
            seen = calls.go(run, 1, guidance, size)[0]
            shape = tuple(seen.shape)
            digit = seen.flatten().double().round()
            found = digit if unit == 1 else found + digit * unit
            unit *= base
    index = found.long()
    if len(index) == 0 or len(index.unique()) != len(index) or int(index.max()) >= count or int(index.min()) < 0:
        raise UserError(f"the first step gets {shape}, which are not elements of what prepare_latents gives")
    layout = sorted(range(template.ndim), key=template.stride, reverse=True)
    return Positions(index, shape, layout)


def holds_state(calls: "PipelineCalls", size: Size, leaf: int) -> bool:
    """Whether what the loop steps is a part of this tensor."""
    try:
        measure_positions(calls, size, leaf)
    except (UserError, ValueError, RuntimeError):  # put into another tensor the numbers may not go through at all
        return False
    return True
