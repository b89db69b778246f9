"""What a file or folder is, by what lies in it, and what takes it: for messages on one of the wrong kind. No torch."""

import contextlib
import enum
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cosmos_rl.checkpoint.layout import COMMIT_MARKER, TRAINER_STATE
from cosmos_rl.policy.model.single_file import holds_adapter


class FileKind(enum.Enum):
    """(What it is, what takes it.)"""

    PIPELINE = "a pipeline folder", "cosmos-rl sample takes it, and policy.model_name_or_path of a configuration"
    PIPELINE_PART = "a part of a pipeline", "cosmos-rl sample takes the folder around it"
    ADAPTER = "an exported adapter", "cosmos-rl sample takes it, and policy.lora.lora_path of a configuration"
    ADAPTER_FILE = "an adapter in one file", "policy.lora.lora_path of a configuration takes it"
    WEIGHTS_FILE = "one file of weights", "policy.model_name_or_path of a configuration takes that of a transformer"
    TORCH_FILE = "a checkpoint of PyTorch", "cosmos-rl import makes a pipeline of one of Cosmos-Predict2.5"
    CHECKPOINT = "a training checkpoint", "cosmos-rl export makes an adapter or a pipeline of it"
    RUN = "the folder of a run", "its exports are under safetensors/step_<N>, and cosmos-rl export makes one"
    CONFIG = "a configuration", "cosmos-rl check --config takes it"

    def describe(self, place: object) -> str:
        """``place`` as something of this kind, and what takes it; for ``<command>: …`` or ``<key>: …``."""
        what, takes = self.value
        return f"{place} is {what}; {takes}"


def find_kind(path: Path) -> FileKind | None:
    """What ``path`` is; None: nothing that is known here, or not there."""
    path = path.expanduser()
    if path.is_file():
        return _find_file_kind(path)
    if not path.is_dir():
        return None
    if (path / "model_index.json").is_file():
        return FileKind.PIPELINE
    if any((folder / name).is_file() for folder in (path, path / "policy") for name in (COMMIT_MARKER, TRAINER_STATE)):
        return FileKind.CHECKPOINT
    if next(_list_adapters(path), None) is not None:
        return FileKind.ADAPTER
    if (path / "config.toml").is_file() or any(path.glob("checkpoints/step_*/policy")):
        return FileKind.RUN
    if any(path.glob("step_*/policy")) or "checkpoints" in path.absolute().parts:
        return FileKind.CHECKPOINT
    if (path.absolute().parent / "model_index.json").is_file():
        return FileKind.PIPELINE_PART
    return None


def _find_file_kind(path: Path) -> FileKind | None:
    if path.suffix == ".safetensors":
        return {True: FileKind.ADAPTER_FILE, False: FileKind.WEIGHTS_FILE, None: None}[_is_adapter(path)]
    return {".toml": FileKind.CONFIG, ".pt": FileKind.TORCH_FILE, ".pth": FileKind.TORCH_FILE}.get(path.suffix)


def _list_adapters(folder: Path) -> Iterator[Path]:
    """Files that say that a folder is an adapter: for one denoiser, or for each of two experts."""
    for place in (folder, folder / "lora"):
        yield from place.glob("adapter_config.json")
        yield from place.glob("transformer*/adapter_config.json")
        yield from (file for file in place.glob("*.safetensors") if _is_adapter(file))


def _is_adapter(file: Path) -> bool | None:
    """None: it cannot be read."""
    with contextlib.suppress(SafetensorError, OSError), safe_open(file, framework="np") as opened:
        return holds_adapter(opened.keys())
    return None
