"""Cosmos-Predict2.5: worlds of a text, an image or a video. Its maths is the stock pipeline's, which is driven."""

from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.driver.model import DrivenModel

PIPELINES = ("Cosmos2_5_PredictBasePipeline",)


@ModelRegistry.register_driven
class CosmosPredict2_5Model(DrivenModel):
    """``DrivenModel`` for the pipeline of Cosmos-Predict2.5.

    What the pipeline does not show is its row of ``ROWS`` in ``policy/model/driver/rows.py``: the safety checker is not
    loaded, single steps are asked for with one frame, and up to two latent frames are given. All else is what the stock
    call does:

    - text: the call's own ``encode_prompt``, with all layers of its Qwen2.5-VL side by side;
    - latents: ``encode_media`` inverts what the call hands to its decoder, normalised by the VAE's statistics;
    - conditioning: ``policy.diffusers.conditional_frames`` clean latent frames of an image or a video, which the call
      gives the transformer in place of the state's, with a mask. They have a noise level of their own, no velocity is
      trained there, and ``element_mask`` leaves them out of every mean and log-probability.

    Each is checked when the model is loaded; docs/models.md lists the checks.
    """

    @staticmethod
    def supported_model_types() -> list[str]:
        return list(PIPELINES)
