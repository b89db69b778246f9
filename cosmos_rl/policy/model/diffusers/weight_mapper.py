"""The weight mapper of all diffusers models."""

from cosmos_rl.policy.model.base import WeightMapper


class DiffuserModelWeightMapper(WeightMapper):
    """Diffusers models train and export under their own parameter names."""
