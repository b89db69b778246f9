"""Diffusers pipelines: one file per family. ``DiffuserModel`` is the class to derive from."""

from cosmos_rl.policy.model.diffusers.diffuser_model import DiffuserModel

__all__ = ["DiffuserModel"]
