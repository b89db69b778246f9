"""What can be done with weights without training: exports of a checkpoint, and imports of another format."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cosmos_rl.checkpoint.export import PipelineExport
from cosmos_rl.checkpoint.state import AVERAGE, holds_average, restore
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.policy.model import consolidated, exports
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.diffusers.pipeline_model import DTYPES
from cosmos_rl.policy.model.driver.loading import build_empty, fetch_pipeline
from cosmos_rl.policy.model.driver.rows import find_absent
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_ema, prepare_export
from cosmos_rl.storage.weight_files import read_table
from cosmos_rl.utils.logging import logger


def export_checkpoint(policy: Path, out: Path, file_format: str = "diffusers") -> list[Path]:
    """Write the export of a checkpoint (``…/step_<N>/policy``) as the new folder or file ``out``.

    Returns what it wrote: of several experts the formats of one file write one for each, named like ``out``. The
    configuration is the ``config.toml`` of the checkpoint's run. EMA weights are exported when the run kept them.

    Args:
        file_format: a name in ``FORMATS``; docs/checkpoints.md has what each is for.

    Raises:
        UserError: ``out`` exists, the run folder is not whole, or the format cannot hold what was trained.
    """
    out = out.expanduser().absolute()
    if out.exists():
        raise UserError(f"{out} exists already: name a new one")
    config_file = policy.resolve().parents[2] / "config.toml"  # through the link of the output folder
    if not config_file.is_file():
        raise UserError(f"{config_file} is missing: a checkpoint is exported with the configuration of its run")
    config = _with_published_base(load_config(config_file))
    if file_format == "cosmos-pt":
        _require_cosmos(fetch_pipeline(config.policy.model_name_or_path, config.policy.model_revision))
    form = FORMATS[file_format]
    if form.needs_adapter and config.policy.lora is None:
        raise UserError(
            f"--format {file_format}: this run has no adapter, it trained the weights themselves; --format diffusers "
            "writes a pipeline folder, --format single-file one file of the transformer"
        )
    param_dtype = config.train.param_dtype
    if form.merges and config.policy.lora is not None:
        param_dtype = "float32"  # base and adapter are added before they are rounded
    model: PipelineModel = ModelRegistry.build_diffusers_model(config, param_dtype=param_dtype)
    params = model.trainable_parameters()
    ema = build_ema(params, config.train)
    dtype = DTYPES[config.train.param_dtype]
    if ema is None:
        average = {name: torch.empty_like(param) for name, param in params.items() if holds_average(policy)}
        restore(policy, params, None, {AVERAGE: average})
        with torch.no_grad():
            for name, value in average.items():
                params[name].copy_(value)
        return form.write(model, out, dtype)
    restore(policy, params, None, {"ema": ema.shadow})
    with ema.average_parameters():
        return form.write(model, out, dtype)


def _with_published_base(config: Config) -> Config:
    """The same, with the base as it is published where the run has quantised it: what is exported fits to that."""
    if config.policy.lora is None:
        return config
    lora = config.policy.lora.model_copy(update={"quantize_base": "none"})
    return config.model_copy(update={"policy": config.policy.model_copy(update={"lora": lora})})


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
    PipelineExport({"transformer": weights}, folder, {}, find_absent(folder)).write(out)
    return out


def _require_cosmos(folder: Path) -> None:
    kind = read_table(folder / "model_index.json").get("_class_name")
    if kind != consolidated.PIPELINE:
        raise UserError(f"{folder}: a {kind}; .pt checkpoints are only for {consolidated.PIPELINE}")


@dataclass(frozen=True)
class _Format:
    """A form of an export."""

    write: Callable[[PipelineModel, Path, torch.dtype], list[Path]]
    """Writes the model's weights, in a type of numbers, to a new place; returns what it wrote."""
    needs_adapter: bool = False
    merges: bool = False
    """Whether an adapter is added to the base."""


def _write_export(model: PipelineModel, out: Path, dtype: torch.dtype) -> list[Path]:
    prepare_export(model)(out)
    return [out]


def _write_merged(model: PipelineModel, out: Path, dtype: torch.dtype) -> list[Path]:
    weights = {
        denoiser: {name: value.to(dtype) for name, value in merged.items()}
        for denoiser, merged in exports.merge_adapters(model).items()
    }
    folder = model.base_folder
    PipelineExport(weights, folder, model.sampling_call(), find_absent(folder)).write(out)
    return [out]


def _write_consolidated(model: PipelineModel, out: Path, dtype: torch.dtype) -> list[Path]:
    [merged] = exports.merge_adapters(model).values()
    consolidated.write_consolidated(out, {name: value.to(dtype) for name, value in merged.items()})
    return [out]


FORMATS = {
    "diffusers": _Format(_write_export),
    "peft": _Format(exports.write_peft, needs_adapter=True),
    "comfyui": _Format(exports.write_comfyui, needs_adapter=True),
    "merged": _Format(_write_merged, needs_adapter=True, merges=True),
    "single-file": _Format(exports.write_single_file, merges=True),
    "cosmos-pt": _Format(_write_consolidated, merges=True),
}
