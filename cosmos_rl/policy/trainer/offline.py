"""What can be done with a finished run without training on."""

from pathlib import Path

from cosmos_rl.checkpoint.state import restore
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_ema, prepare_export


def export_checkpoint(policy: Path, out: Path) -> Path:
    """Write the export of a checkpoint (``…/step_<N>/policy``) into the new folder ``out``; returns it.

    The configuration is the ``config.toml`` of the checkpoint's run. EMA weights are exported when the run kept them.

    Raises:
        UserError: ``out`` exists, or the run folder is not whole.
    """
    out = out.expanduser().absolute()
    if out.exists():
        raise UserError(f"{out} exists already: name a new folder")
    config_file = policy.parents[2] / "config.toml"
    if not config_file.is_file():
        raise UserError(f"{config_file} is missing: a checkpoint is exported with the configuration of its run")
    config = load_config(config_file)
    model: DiffuserModel = ModelRegistry.build_diffusers_model(config, param_dtype=config.train.param_dtype)
    params = model.trainable_parameters()
    ema = build_ema(params, config.train)
    if ema is None:
        restore(policy, params, None, {})
        prepare_export(model)(out)
        return out
    restore(policy, params, None, {"ema": ema.shadow})
    with ema.average_parameters():
        prepare_export(model)(out)
    return out
