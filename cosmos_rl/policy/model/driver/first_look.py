"""What is seen of a pipeline without running it."""

import inspect
from typing import Any

from torch import nn

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver.contract import Size


def require_seams(pipeline: Any) -> None:
    """Refuse a pipeline without the methods that it is held by.

    Raises:
        UserError: names what is missing.
    """
    needed = {"encode_prompt": pipeline, "prepare_latents": pipeline, "__call__": pipeline}
    scheduler, vae = getattr(pipeline, "scheduler", None), getattr(pipeline, "vae", None)
    needed |= {"scheduler.set_timesteps": scheduler, "scheduler.step": scheduler, "vae.decode": vae}
    missing = [name for name, owner in needed.items() if not callable(getattr(owner, name.split(".")[-1], None))]
    if not missing and not find_denoisers(pipeline):
        missing = ["a component named transformer…"]
    if not missing:
        parameters = inspect.signature(type(pipeline).__call__).parameters
        wanted = ("prompt", "num_inference_steps", "height", "width", "generator", "output_type", "return_dict")
        missing = [f"argument {name} of __call__" for name in wanted if name not in parameters]
    if missing:
        raise UserError(
            f'{type(pipeline).__name__} cannot be driven: the check "the pipeline has the seams it is held by" '
            f"failed: missing {', '.join(missing)}. docs/models.md says what to do."
        )


def smallest_size(pipeline: Any, *, video: bool, given: int = 0) -> Size:
    """Media of a few latent pixels: 4 x 4, and of a video two latent frames, one more than ``given`` at least."""
    factors = {name: value for name, value in _factors(pipeline).items() if "temporal" not in name}
    space = max(factors.values(), default=8)
    edge = max(32, 4 * space)
    if not video:
        return Size(edge, edge, 1)
    return Size(edge, edge, temporal_factor(pipeline) * max(given, 1) + 1)


def temporal_factor(pipeline: Any) -> int:
    """Frames of a video per latent frame after the first."""
    return max([value for name, value in _factors(pipeline).items() if "temporal" in name], default=4)


def _factors(pipeline: Any) -> dict[str, int]:
    return {name: value for name, value in vars(pipeline).items() if name.startswith("vae_") and type(value) is int}


def find_denoisers(pipeline: Any) -> dict[str, nn.Module]:
    parts = {name: part for name, part in pipeline.components.items() if name.startswith("transformer")}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
