"""Diffusers pipelines: one file per family. ``DiffuserModel`` is the class to derive from."""

from cosmos_rl.policy.model.imports import hide_extras

with hide_extras():
    import diffusers.pipelines.pipeline_utils
    import diffusers.schedulers.scheduling_flow_match_euler_discrete  # noqa: F401 (with all that they import)
    from peft.import_utils import is_torchao_available

    from cosmos_rl.policy.model.diffusers.diffuser_model import DiffuserModel
    from cosmos_rl.policy.model.diffusers.pipeline_model import PipelineModel
    from cosmos_rl.policy.model.quiet import mute_torchao

    is_torchao_available()  # its answer is kept

mute_torchao()  # which quantised bases and 8-bit optimisers import later

__all__ = ["DiffuserModel", "PipelineModel"]
