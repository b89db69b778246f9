"""What can be done with weights without training: exports of a checkpoint, and imports of another format."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cosmos_rl.checkpoint.export import PipelineExport
from cosmos_rl.checkpoint.state import AVERAGE, holds_average, restore
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model import consolidated
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.driver.loading import build_empty, fetch_pipeline
from cosmos_rl.policy.model.lora import base_state
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_ema, prepare_export
from cosmos_rl.utils.logging import logger


def export_checkpoint(policy: Path, out: Path, file_format: str = "diffusers") -> Path:
    """Write the export of a checkpoint (``…/step_<N>/policy``) as the new folder or file ``out``; returns it.

    The configuration is the ``config.toml`` of the checkpoint's run. EMA weights are exported when the run kept them.

    Args:
        file_format: ``diffusers``, an adapter or a pipeline folder, or ``cosmos-pt``, one file like Cosmos-Predict2.5's
            own checkpoints, in which an adapter is merged.

    Raises:
        UserError: ``out`` exists, or the run folder is not whole.
    """
    out = out.expanduser().absolute()
    if out.exists():
        raise UserError(f"{out} exists already: name a new one")
    config_file = policy.parents[2] / "config.toml"
    if not config_file.is_file():
        raise UserError(f"{config_file} is missing: a checkpoint is exported with the configuration of its run")
    config = load_config(config_file)
    if file_format == "cosmos-pt":
        _require_cosmos(fetch_pipeline(config.policy.model_name_or_path, config.policy.model_revision))
    model: PipelineModel = ModelRegistry.build_diffusers_model(config, param_dtype=config.train.param_dtype)
    params = model.trainable_parameters()
    ema = build_ema(params, config.train)
    write = _WRITERS[file_format]
    if ema is None:
        average = {name: torch.empty_like(param) for name, param in params.items() if holds_average(policy)}
        restore(policy, params, None, {AVERAGE: average})
        with torch.no_grad():
            for name, value in average.items():
                params[name].copy_(value)
        write(model, out)
        return out
    restore(policy, params, None, {"ema": ema.shadow})
    with ema.average_parameters():
        write(model, out)
    return out


def import_consolidated(file: Path, base: str, revision: str | None, out: Path) -> Path:
    """Write the pipeline ``base`` with the transformer of a consolidated checkpoint into the new folder ``out``.

    Raises:
        UserError: ``out`` exists, the base is of another family, or the file has other tensors than its transformer.
    """
    out = out.expanduser().absolute()
    if out.exists():
        raise UserError(f"{out} exists already: name a new folder")
    folder = fetch_pipeline(base, revision)
    _require_cosmos(folder)
    transformer = build_empty(folder / "transformer", torch.float32)
    wanted = {name: value.shape for name, value in transformer.state_dict().items()}
    weights = consolidated.read_consolidated(file, wanted)
    logger.info(f"{file}: all {len(weights)} tensors of the transformer are there, and no others")
    PipelineExport({"transformer": weights}, folder, {}).write(out)
    return out


def _require_cosmos(folder: Path) -> None:
    kind = json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
    if kind != consolidated.PIPELINE:
        raise UserError(f"{folder}: a {kind}; .pt checkpoints are only for {consolidated.PIPELINE}")


def _write_export(model: PipelineModel, out: Path) -> None:
    prepare_export(model)(out)


def _write_consolidated(model: PipelineModel, out: Path) -> None:
    transformer = model.denoisers["transformer"]
    if model.lora_config is not None:
        transformer.fuse_lora(adapter_names=[model.primary_adapter])
    weights: dict[str, Tensor] = base_state(transformer)
    consolidated.write_consolidated(out, {name: value.to(model.param_dtype) for name, value in weights.items()})


_WRITERS: dict[str, Callable[[PipelineModel, Path], None]] = {
    "diffusers": _write_export,
    "cosmos-pt": _write_consolidated,
}
