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


def smallest_size(pipeline: Any, *, video: bool) -> Size:
    """Media of a few latent pixels: 4 x 4, and two latent frames of a video."""
    factors = {name: value for name, value in vars(pipeline).items() if name.startswith("vae_") and type(value) is int}
    space = max([value for name, value in factors.items() if "temporal" not in name], default=8)
    time = max([value for name, value in factors.items() if "temporal" in name], default=4)
    edge = max(32, 4 * space)
    if not video:
        return Size(edge, edge, 1)
    return Size(edge, edge, time + 1)


def find_denoisers(pipeline: Any) -> dict[str, nn.Module]:
    parts = {name: part for name, part in pipeline.components.items() if name.startswith("transformer")}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
