"""The weights of a policy in the forms that other tools read. See docs/checkpoints.md, "Formats"."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.lora import base_state, fold_config, fold_weights, list_layer_names
from cosmos_rl.policy.model.original_names import Pair, adapters_to_original, find_names, last_block, to_original
from cosmos_rl.storage import atomic

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


def merge_adapters(model: PipelineModel) -> dict[str, dict[str, Tensor]]:
    """The trained denoisers' weights, an adapter added to them: base + factor * up @ down.

    Where there is an adapter, load the model with ``param_dtype`` float32, so that the sum is rounded once.
    """
    merged = {}
    for name, module in model.denoisers.items():
        if model.lora_config is not None:
            module.fuse_lora(adapter_names=[model.primary_adapter])
        merged[name] = base_state(module)
    return merged


def write_peft(model: PipelineModel, out: Path, dtype: torch.dtype) -> None:
    """A folder that ``peft.PeftModel.from_pretrained(transformer, folder)`` loads.

    Raises:
        UserError: the pipeline has several trained experts.
    """
    module = _only_denoiser(model, "peft")
    weights = {f"base_model.model.{name}": value for name, value in _folded(model, module, dtype).items()}
    config = fold_config(module.peft_config[model.primary_adapter])
    config |= {"base_model_name_or_path": model.model_str, "revision": model.revision, "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    with atomic.staging(out) as stage:
        save_file(weights, stage / "adapter_model.safetensors", metadata={"format": "pt"})
        atomic.share(stage / "adapter_model.safetensors")
        (stage / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True), encoding="utf-8")


def write_comfyui(model: PipelineModel, out: Path, dtype: torch.dtype) -> None:
    """One file with ``lora_unet_<original name>.lora_down.weight``, ``.lora_up.weight`` and ``.alpha``.

    Alpha is the rank, as every layer's factor is in its up matrix: readers that look for an alpha and readers that take
    the factor 1 do the same.

    Raises:
        UserError: the original names are not known, or there are several trained experts.
    """
    module = _only_denoiser(model, "comfyui")
    names = find_names(
        type(module).__name__,
        "--format comfyui",
        "--format diffusers writes an adapter that diffusers loads",
    )
    folded = _folded(model, module, dtype)
    pairs: dict[str, Pair] = {
        key.removesuffix(_DOWN): (value, folded[key.removesuffix(_DOWN) + _UP])
        for key, value in folded.items()
        if key.endswith(_DOWN)
    }
    weights: dict[str, Tensor] = {}
    for name, (down, up) in adapters_to_original(names, pairs, last_block(list_layer_names(module))).items():
        key = f"lora_unet_{name.replace('.', '_')}"
        weights[f"{key}.lora_down.weight"], weights[f"{key}.lora_up.weight"] = down, up
        weights[f"{key}.alpha"] = torch.tensor(float(down.shape[0]))
    base = str(model.model_str) if not Path(model.model_str).expanduser().exists() else Path(model.model_str).name
    _write_file(weights, out, {"format": "pt", "base_model": base})


def write_single_file(model: PipelineModel, out: Path, dtype: torch.dtype) -> None:
    """The transformer alone under its original names, an adapter merged.

    Raises:
        UserError: the original names are not known.
    """
    module = _only_denoiser(model, "single-file")
    instead = "--format merged writes a pipeline folder"
    if model.lora_config is None:
        instead = "--format diffusers writes a pipeline folder"
    names = find_names(type(module).__name__, "--format single-file", instead)
    [merged] = merge_adapters(model).values()
    _write_file(to_original(names, {name: value.to(dtype) for name, value in merged.items()}), out, {"format": "pt"})


def _folded(model: PipelineModel, module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    found = fold_weights(module, model.primary_adapter)
    return {name: value.detach().to("cpu", dtype).contiguous() for name, value in found}


def _only_denoiser(model: PipelineModel, file_format: str) -> Any:
    if len(model.denoisers) > 1:
        raise UserError(
            f"--format {file_format}: one file cannot hold the {len(model.denoisers)} trained experts of this pipeline"
            "; --format diffusers writes a folder for each"
        )
    return next(iter(model.denoisers.values()))


def _write_file(weights: Mapping[str, Tensor], out: Path, metadata: dict[str, str]) -> None:
    with atomic.staging_file(out) as aside:
        save_file({name: value.contiguous() for name, value in weights.items()}, aside, metadata=metadata)
        atomic.share(aside)
