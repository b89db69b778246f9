"""SANA: images, videos, and videos of an image. Nothing of its maths is written here: the stock pipeline is driven."""

from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.driver.model import DrivenModel

PIPELINES = ("SanaPipeline", "SanaVideoPipeline", "SanaImageToVideoPipeline")


@ModelRegistry.register_driven
class SanaModel(DrivenModel):
    """``DrivenModel`` for the pipelines of SANA.

    What the pipelines do not show is their rows of ``ROWS`` in ``policy/model/driver/rows.py``: sizes are not moved to
    those of a list, and the first latent frame of ``SanaImageToVideoPipeline`` is the image's. All else is what the
    stock call does:

    - text: ``encode_prompts`` has the call's own ``encode_prompt`` run, so Gemma's embeddings and their mask reach the
      transformer as they do there;
    - latents: ``encode_media`` inverts what the call hands to its decoder, ``scaling_factor`` for images and
      ``latents_mean`` and ``latents_std`` for videos, and ``decode`` is the end of the call;
    - velocity and steps: the arguments of the transformer, and the sign and scale of what it returns, are those with
      which the call's loop calls it.

    Each is checked when the model is loaded; docs/models.md lists the checks.
    """

    @staticmethod
    def supported_model_types() -> list[str]:
        return list(PIPELINES)
