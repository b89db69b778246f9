"""The weights of a policy in the forms that other tools read. See docs/checkpoints.md, "Formats"."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.lora import base_state, fold_config, fold_weights, layer_rows
from cosmos_rl.policy.model.original_names import Pair, adapters_to_original, find_names, to_original
from cosmos_rl.policy.model.original_tables import Names
from cosmos_rl.storage import atomic

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_EXPERTS = {"transformer": "high_noise", "transformer_2": "low_noise"}
"""What the files of the experts of Wan 2.2 are called."""


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


def write_peft(model: PipelineModel, out: Path, dtype: torch.dtype) -> list[Path]:
    """A folder that ``peft.PeftModel.from_pretrained(transformer, folder)`` loads; of several trained experts one with
    such a folder for each, by its name in the pipeline."""
    with atomic.staging(out) as stage:
        for name, module in model.denoisers.items():
            _write_peft_folder(model, module, stage / name if len(model.denoisers) > 1 else stage, dtype)
    return [out]


def _write_peft_folder(model: PipelineModel, module: Any, folder: Path, dtype: torch.dtype) -> None:
    weights = {f"base_model.model.{name}": value for name, value in _folded(model, module, dtype).items()}
    config = fold_config(module.peft_config[model.primary_adapter])
    config |= {"base_model_name_or_path": model.model_str, "revision": model.revision, "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    atomic.share(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True), encoding="utf-8")


def write_comfyui(model: PipelineModel, out: Path, dtype: torch.dtype) -> list[Path]:
    """One file for each trained expert, with an adapter under the original names of its layers.

    Most are ``lora_unet_<name>.lora_down.weight``, ``.lora_up.weight`` and ``.alpha``. Alpha is the rank, as the factor
    of every layer is in its up matrix: readers that look for an alpha and readers that take the factor 1 do the same.
    Where diffusers' pipeline reads only ``diffusion_model.<name>.lora_A.weight`` and ``.lora_B.weight``, it is these.

    Raises:
        UserError: the original names are not known, or ComfyUI has no such model.
    """
    instead = "--format diffusers writes an adapter that diffusers loads"
    files, headers = {}, {}
    for name, module in model.denoisers.items():
        class_name = type(module).__name__
        names = find_names(class_name, "--format comfyui", instead)
        if not names.adapters:
            raise UserError(f"--format comfyui: ComfyUI has no {class_name} of its own; {instead}")
        folded = _folded(model, module, dtype)
        pairs: dict[str, Pair] = {
            key.removesuffix(_DOWN): (value, folded[key.removesuffix(_DOWN) + _UP])
            for key, value in folded.items()
            if key.endswith(_DOWN)
        }
        originals = adapters_to_original(names, pairs, layer_rows(module), "--format comfyui")
        files[name] = name_tensors(names, originals)
        headers[name] = _describe(model, names.architecture and f"{names.architecture}/lora") | _describe_ranks(
            originals
        )
    return _write_files(files, out, headers)


def _describe(model: PipelineModel, architecture: str) -> dict[str, str]:
    """What the header of a file says of its base, by the keys that other tools show. Without paths of this machine."""
    base = str(model.model_str)
    if Path(base).expanduser().exists():
        base = Path(base).name
    header = {"format": "pt", "base_model": base, "ss_sd_model_name": base}
    if architecture:
        header["modelspec.architecture"] = architecture
    return header


def _describe_ranks(adapters: Mapping[str, Pair]) -> dict[str, str]:
    """Rank and alpha, which are equal here; kohya's word where layers differ, as joined ones do."""
    ranks = {down.shape[0] for down, _ in adapters.values()}
    rank = str(ranks.pop()) if len(ranks) == 1 else "Dynamic"
    return {"ss_network_dim": rank, "ss_network_alpha": rank}


def name_tensors(names: Names, adapters: Mapping[str, Pair]) -> dict[str, Tensor]:
    """The tensors of a file of adapters that ComfyUI reads.

    Args:
        adapters: under the original names of their layers, all factors in the up matrices.
    """
    tensors: dict[str, Tensor] = {}
    for name, (down, up) in adapters.items():
        if names.adapters == "PEFT":
            key = f"diffusion_model.{name}"
            tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
        else:
            key = f"lora_unet_{name.replace('.', '_')}"
            tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
            tensors[f"{key}.alpha"] = torch.tensor(float(down.shape[0]))
    return tensors


def write_single_file(model: PipelineModel, out: Path, dtype: torch.dtype) -> list[Path]:
    """Each trained expert alone, in a file under its original names, an adapter merged.

    Raises:
        UserError: the original names are not known, or not all tensors of such a file are.
    """
    instead = "--format merged writes a pipeline folder"
    if model.lora_config is None:
        instead = "--format diffusers writes a pipeline folder"
    found = {}
    for name, module in model.denoisers.items():
        class_name = type(module).__name__
        found[name] = find_names(class_name, "--format single-file", instead)
        if found[name].lacking:
            raise UserError(
                f"--format single-file: such a file of a {class_name} has {found[name].lacking} too, which pipelines "
                f"of diffusers do not have; {instead}"
            )
    files = {
        name: to_original(found[name], {key: value.to(dtype) for key, value in merged.items()}, "--format single-file")
        for name, merged in merge_adapters(model).items()
    }
    return _write_files(files, out, {name: _describe(model, names.architecture) for name, names in found.items()})


def _folded(model: PipelineModel, module: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    found = fold_weights(module, model.primary_adapter)
    return {name: value.detach().to("cpu", dtype).contiguous() for name, value in found}


def _write_files(
    files: Mapping[str, Mapping[str, Tensor]], out: Path, headers: Mapping[str, Mapping[str, str]]
) -> list[Path]:
    """Write the tensors of each expert, all of them or none: one as ``out``, of several by their names."""
    places = dict.fromkeys(files, out)
    if len(files) > 1:
        places = {name: out.with_stem(f"{out.stem}_{_EXPERTS.get(name, name)}") for name in files}
    for place in places.values():
        if place.exists():
            raise UserError(f"{place} exists already: name a new file")
    with ExitStack() as stack:
        for name, weights in files.items():
            aside = stack.enter_context(atomic.staging_file(places[name]))
            header = {**headers[name], "modelspec.title": places[name].stem}
            save_file({key: value.contiguous() for key, value in weights.items()}, aside, metadata=header)
            atomic.share(aside)
    return list(places.values())
