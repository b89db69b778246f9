"""Pipelines that make only the sizes of a list of their own, and resize what comes out to the size asked for."""

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver.contract import Size
from cosmos_rl.policy.model.driver.driver import Driver


def require_listed_size(binned: Driver, plain: Driver, size: Size, key: str) -> None:
    """Refuse a size that the stock call would replace: training must see the latents that sampling makes.

    Args:
        binned: calls the pipeline with its list.
        plain: calls it without.
        size: of the media.
        key: what sets it.

    Raises:
        UserError: names the size of the list.
    """
    kind = type(binned.pipeline).__name__
    try:
        made = binned.noise_shape(size)[-2:]
    except ValueError as error:
        raise UserError(
            f"policy.diffusers.resolution_binning = true: {kind} has no list for this model ({error})"
        ) from None
    asked = plain.noise_shape(size)[-2:]
    if made == asked:
        return
    listed = [side * new // old for side, new, old in zip((size.height, size.width), made, asked, strict=True)]
    raise UserError(
        f"{key} = {[size.height, size.width]}: with resolution_binning {kind} makes {listed} "
        f"and resizes it; set {key.rpartition('.')[2]} = {listed}, or resolution_binning = false"
    )
