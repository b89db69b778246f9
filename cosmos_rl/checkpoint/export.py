"""Exports that stock diffusers and PEFT load: a LoRA folder, or a whole pipeline folder."""

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor

from cosmos_rl.checkpoint.layout import LORA_FILE
from cosmos_rl.errors import UserError
from cosmos_rl.storage import atomic
from cosmos_rl.storage.weight_files import read_table
from cosmos_rl.utils.logging import logger

SAMPLING_FILE = "cosmos_rl.json"
"""What an export says about its use that no file of diffusers or PEFT can hold."""
_SHARDS = "diffusion_pytorch_model{suffix}.safetensors"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one denoiser."""

    weights: Mapping[str, Tensor]
    """Names in the denoiser without the adapter's name, ``….lora_A.weight`` and ``….lora_B.weight``."""
    peft_config: Mapping[str, Any]
    """The table of its ``peft.LoraConfig``; alpha is the rank, as every layer's factor is in its up matrix."""

    def write(self, folder: Path, base_model: str, revision: str | None) -> None:
        """Write ``model.safetensors`` and ``adapter_config.json``.

        Every key begins with ``transformer.``, whatever denoiser it is for: diffusers has the caller say that.
        """
        from diffusers.loaders.lora_base import LoraBaseMixin  # late: the model's package imports diffusers first

        LoraBaseMixin.write_lora_layers(
            LoraBaseMixin.pack_weights({k: v.contiguous() for k, v in self.weights.items()}, "transformer"),
            save_directory=str(folder),
            is_main_process=True,
            weight_name=LORA_FILE,
            save_function=None,  # pyright: ignore[reportArgumentType]  (None: diffusers' own writer)
            safe_serialization=True,
            lora_adapter_metadata=LoraBaseMixin.pack_weights(_to_json(self.peft_config), "transformer"),
        )
        config = _to_json(self.peft_config) | {"base_model_name_or_path": base_model, "revision": revision}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        _check_pairs(folder / LORA_FILE)


@dataclass(frozen=True)
class LoraExport:
    """The adapters of the trained denoisers."""

    adapters: Mapping[str, Adapter]
    """By the denoiser's name in the pipeline."""
    base_model: str
    revision: str | None
    """Of the base on the hub."""
    sampling: Mapping[str, Any]
    """Arguments with which the pipeline's call samples as it was trained, such as the length that prompts had."""

    def write(self, step_dir: Path) -> None:
        """Write ``<step_dir>/lora``, and in it a folder for each denoiser but ``transformer``; whole or not at all."""
        with atomic.staging(step_dir) as stage:
            folder = stage / "lora"
            for denoiser, adapter in self.adapters.items():
                place = folder if denoiser == "transformer" else folder / denoiser
                adapter.write(place, self.base_model, self.revision)
            _write_sampling(folder, self.sampling)
        logger.info(f"[Policy] LoRA adapter exported to {(step_dir / 'lora').absolute()}")


def _to_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-ready values; an unset table stays out."""
    return {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}


def _check_pairs(file: Path) -> None:
    """Every adapted module has both matrices under ``transformer.``: diffusers silently drops any other key."""
    with safe_open(file, framework="pt") as opened:
        keys = set(opened.keys())
    downs = {k.removesuffix("lora_A.weight") for k in keys if k.endswith("lora_A.weight")}
    ups = {k.removesuffix("lora_B.weight") for k in keys if k.endswith("lora_B.weight")}
    if not downs or downs != ups or len(keys) != 2 * len(downs) or not all(k.startswith("transformer.") for k in keys):
        raise RuntimeError(f"{file}: the exported adapter has keys that diffusers would not load: {sorted(keys)[:4]}")


@dataclass(frozen=True)
class PipelineExport:
    """A whole pipeline: the base's folder with other denoisers."""

    weights: Mapping[str, Mapping[str, Tensor]]
    """State dicts of the trained denoisers by their names in the pipeline."""
    base_folder: Path
    """Local folder of the base pipeline."""
    sampling: Mapping[str, Any]
    """Arguments with which the pipeline's call samples as it was trained."""
    absent: Collection[str]
    """Components of the base that the export is without. The pipeline's class makes them, or the caller gives them:
    diffusers refuses an index that names them, as their packages are not its own."""

    def write(self, step_dir: Path) -> None:
        """Write the pipeline folder ``step_dir``, whole or not at all.

        Frozen parts keep the files and the dtype of the base. They are copied once per run; later exports of the run
        link to the first one's files, so that ten exports of a large model do not take ten times the space.
        """
        earlier = _find_earlier_export(step_dir)
        with atomic.staging(step_dir) as stage:
            index = read_table(self.base_folder / "model_index.json")
            left = {name: value for name, value in index.items() if name not in {*self.weights, *self.absent}}
            self._write_index(index, stage / "model_index.json")
            for name, value in left.items():
                part = self.base_folder / name
                if isinstance(value, list) and part.is_dir():
                    _copy_part(part, stage / name, earlier and earlier / name)
            _write_sampling(stage, self.sampling)
            for name, weights in self.weights.items():
                (stage / name).mkdir()
                shutil.copyfile(self.base_folder / name / "config.json", stage / name / "config.json")
                whole = {k: v.contiguous() for k, v in weights.items()}
                save_torch_state_dict(whole, stage / name, filename_pattern=_SHARDS, max_shard_size="4GB")
                for file in (stage / name).iterdir():
                    atomic.share(file)  # safetensors makes files that only their owner can read
        logger.info(f"[Policy] Pipeline exported to {step_dir.absolute()}")

    def _write_index(self, index: Mapping[str, Any], target: Path) -> None:
        """The base's own file, unless it names what is absent."""
        changed = {**index, **{name: [None, None] for name in self.absent if name in index}}
        if changed == index:
            shutil.copyfile(self.base_folder / "model_index.json", target)
        else:
            target.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def read_sampling(folder: Path) -> dict[str, Any]:
    """Arguments with which the pipeline's call samples as it was trained; empty where the export does not say.

    Raises:
        UserError: the file that says it is not as it was written.
    """
    file = folder / SAMPLING_FILE
    if not file.is_file():
        return {}
    found: Any = None
    with contextlib.suppress(ValueError):
        found = json.loads(file.read_bytes())
    if not isinstance(found, dict) or not isinstance(found.get("max_sequence_length", 1), int):
        raise UserError(f'{file}: expected like {{"max_sequence_length": 256}}')
    return found


def _write_sampling(folder: Path, sampling: Mapping[str, Any]) -> None:
    text = json.dumps(sampling, indent=2)
    (folder / SAMPLING_FILE).write_text(text + "\n", encoding="utf-8")


def _find_earlier_export(step_dir: Path) -> Path | None:
    """Another whole export of the same run, if there is one."""
    others = (p for p in step_dir.parent.glob("step_*") if p != step_dir and (p / "model_index.json").is_file())
    return next(others, None)


def _copy_part(source: Path, target: Path, earlier: Path | None) -> None:
    for folder, folders, names in os.walk(source):
        folders[:] = [f for f in folders if not f.startswith(".")]
        inside = Path(folder).relative_to(source)
        (target / inside).mkdir(parents=True, exist_ok=True)
        for name in names:
            same = earlier and earlier / inside / name
            if same is None or not _try_link(same, target / inside / name):
                shutil.copyfile(
                    Path(folder) / name, target / inside / name
                )  # follows the hub cache's links to its blobs


def _try_link(existing: Path, new: Path) -> bool:
    """Whether ``new`` could be made another name of ``existing``; not every file system can do that."""
    try:
        os.link(existing, new)
    except OSError:
        return False
    return True
