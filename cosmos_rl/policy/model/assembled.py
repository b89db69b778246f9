"""A pipeline folder of a transformer in one file and of the other parts of a base."""

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.digest import pipeline_digest, read_ends
from cosmos_rl.policy.model.original_names import from_original, original_names, to_original
from cosmos_rl.policy.model.single_file import SECOND_EXPERT, SingleFile, find_prefix
from cosmos_rl.storage import atomic
from cosmos_rl.storage.locks import hold_lock
from cosmos_rl.storage.weight_files import open_weights, read_table
from cosmos_rl.utils.logging import logger

_WAIT_S = 1800.0
_SHARDS = "diffusion_pytorch_model{suffix}.safetensors"


def assemble(single: SingleFile, place: Path) -> Path:
    """The pipeline folder in ``place``, made once for each state of file and base; the base's other parts are links.

    Raises:
        UserError: the file does not hold the base's transformer.
    """
    base, changed = pipeline_digest(str(single.base), None) or "", single.file.stat().st_mtime_ns
    content = read_ends(single.file) + f"{base}/{changed}".encode()  # files may differ between equal ends
    if single.low_noise is not None:
        content += read_ends(single.low_noise) + str(single.low_noise.stat().st_mtime_ns).encode()
    folder = place / f"{single.file.stem}-{hashlib.sha256(content).hexdigest()[:8]}"
    stuck = f"{folder}: another process has been making it for {_WAIT_S:g} s; is it stuck?"
    with hold_lock(place / ".lock", _WAIT_S, stuck):  # ranks that are started by hand: one makes it, the others find it
        if not (folder / "model_index.json").is_file():
            _write(single, folder)
    return folder


def _write(single: SingleFile, folder: Path) -> None:
    files = {"transformer": single.file}
    index = read_table(single.base / "model_index.json")
    if single.low_noise is not None:
        files[SECOND_EXPERT] = single.low_noise
    elif index.get(SECOND_EXPERT, [None])[0]:
        logger.warning(
            f"{single.file}: is taken for the high-noise expert; the low-noise one is that of {single.base}, unless "
            "policy.single_file_low_noise names its file"
        )
    with atomic.staging(folder) as stage:
        for part in (name for name, value in index.items() if isinstance(value, list) and name not in files):
            if (single.base / part).is_dir():
                _link(single.base / part, stage / part)
        for part, file in files.items():
            _write_transformer(file, single.base / part, stage / part)
        shutil.copyfile(single.base / "model_index.json", stage / "model_index.json")
    logger.info(f"with the other parts of {single.base} it is the pipeline {folder}")


def _write_transformer(file: Path, base: Path, out: Path) -> None:
    weights = read_transformer(file, base)
    out.mkdir()
    shutil.copyfile(base / "config.json", out / "config.json")
    save_torch_state_dict(weights, out, filename_pattern=_SHARDS, max_shard_size="4GB")
    for written in out.iterdir():
        atomic.share(written)
    logger.info(f"{file}: all {len(weights)} tensors of the transformer are there")


def _link(part: Path, target: Path) -> None:
    try:
        target.symlink_to(part.absolute(), target_is_directory=True)
    except OSError:  # a disk without links
        shutil.copytree(part, target)


def read_transformer(file: Path, base: Path) -> dict[str, Tensor]:
    """The transformer of a file by diffusers' names, whatever names the file has; exactly that of the base.

    Args:
        base: the folder of the transformer in the base.

    Raises:
        UserError: names the tensors that are missing, unexpected, or of another shape.
    """
    import torch

    from cosmos_rl.policy.model.driver.loading import build_empty

    config = read_table(base / "config.json")
    wanted = build_empty(base, torch.float32).state_dict()
    found, other = _read(file), f"{file}: is not the {base.name} of {base.parent}"
    own = found.keys() <= wanted.keys() or wanted.keys() <= found.keys()  # names of diffusers, some may be missing
    names = original_names(config["_class_name"])
    if own:
        _require_equal_shapes(other, found, wanted)
    elif names is not None:
        found = {name: value for name, value in found.items() if re.fullmatch(names.unused, name) is None}
        original = to_original(names, wanted, f"{file}: is read by the names of its authors")
        original = {name.removeprefix(names.prefix): value for name, value in original.items()}
        _require_equal_shapes(other, found, original)
        found = from_original(names, found, wanted)
    else:
        found = _convert(file, other, found, config)
        _require_equal_shapes(other, found, wanted)
    return {name: value.contiguous() for name, value in found.items()}


def _convert(file: Path, other: str, found: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """By diffusers' own converter of a class whose original names are not known here."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    converter: Any = SINGLE_FILE_LOADABLE_CLASSES.get(config["_class_name"], {}).get("checkpoint_mapping_fn")
    if converter is None:
        known = ", ".join(name for name in SINGLE_FILE_LOADABLE_CLASSES if "Transformer" in name)
        raise UserError(f"{file}: diffusers reads no {config['_class_name']} from one file, only {known}")
    left = dict(found)
    try:
        found = converter(checkpoint=left, config=config)
    except KeyError as error:
        raise UserError(f"{other}: {error} is missing") from error
    except (IndexError, ValueError, RuntimeError) as error:
        raise UserError(f"{other}: diffusers cannot read its names ({error})") from error
    if left is not found:
        found = {**left, **found}  # what the converter has not taken
    return found


def _read(file: Path) -> dict[str, Tensor]:
    """The transformer's tensors without a prefix; what else the file holds is named and left out."""
    with open_weights(file) as opened:
        keys = list(opened.keys())
        prefix = find_prefix(keys)
        own = [key for key in keys if key.startswith(prefix)]
        others = sorted({key.split(".")[0] for key in set(keys) - set(own)})
        found = {key.removeprefix(prefix): opened.get_tensor(key) for key in own}
    if others:
        logger.warning(
            f"{file}: {len(keys) - len(own)} tensors are of other parts ({', '.join(others)}) and are not used; VAE "
            "and text encoders are those of the base"
        )
    return found


def _require_equal_shapes(other: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    lines = [f"  missing: {name}" for name in sorted(wanted.keys() - found.keys())]
    lines += [f"  unexpected: {name}" for name in sorted(found.keys() - wanted.keys())]
    lines += [
        f"  {name}: {tuple(found[name].shape)} in the file, {tuple(value.shape)} in the base"
        for name, value in wanted.items()
        if name in found and found[name].shape != value.shape
    ]
    if lines:
        raise UserError(
            f"{other}, {len(lines)} tensors differ (another base? policy.single_file_base names it):\n"
            + "\n".join(lines[:8])
        )
