"""Diffusers pipelines: one file per family. ``DiffuserModel`` is the class to derive from."""

from cosmos_rl.policy.model.quiet import without_extras

with without_extras():
    import diffusers.utils  # noqa: F401 (what is installed is looked up here)
    from peft.import_utils import is_torchao_available

    from cosmos_rl.policy.model.diffusers.diffuser_model import DiffuserModel

    is_torchao_available()  # its answer is kept

__all__ = ["DiffuserModel"]
