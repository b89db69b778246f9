"""Loads a pipeline so that it can be driven, without components that only guard inference."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

from cosmos_rl.distributed.precision import list_float32_units
from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver.rows import find_row
from cosmos_rl.policy.model.quiet import quiet_libraries
from cosmos_rl.storage.weight_files import read_table


class NothingChecked(ModelMixin, ConfigMixin):
    """Stands where Cosmos has a safety checker, whose package and weights training does without."""

    config_name = "config.json"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(1))  # a model without any tensor cannot be saved

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Tensor) -> Tensor:
        return frames


def load_pipeline(name: str, *, dtype: torch.dtype = torch.float32, revision: str | None = None) -> Any:
    """The pipeline of a local folder or a hub repository.

    Raises:
        UserError: there is none, or a part cannot be loaded.
    """
    folder = fetch_pipeline(name, revision)
    try:
        with quiet_libraries():
            return read_pipeline(folder, dtype)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{name}: cannot be loaded as a pipeline ({str(error).splitlines()[0]})") from error


def fetch_pipeline(name: str, revision: str | None) -> Path:
    """The folder of a pipeline; one on the hub is downloaded.

    Raises:
        UserError: there is none.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    folder = Path(name).expanduser()
    try:
        with quiet_libraries():
            if not folder.is_dir():
                folder = Path(DiffusionPipeline.download(name, revision=revision))
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{name}: cannot be loaded as a pipeline ({str(error).splitlines()[0]})") from error
    if not (folder / "model_index.json").is_file():
        raise UserError(f"{name}: not a pipeline folder, it has no model_index.json")
    return folder


def read_pipeline(folder: Path, dtype: Any, **parts: Any) -> Any:
    """The pipeline of a local folder without the components that its row leaves out.

    Args:
        dtype: of all parts, or by their names.
        parts: components to take in place of those of the folder.
    """
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    index: Any = DiffusionPipeline.load_config(str(folder))
    absent = find_row(index["_class_name"]).absent
    if not absent:
        return DiffusionPipeline.from_pretrained(str(folder), dtype=dtype, **parts)
    # by a folder of links with another index: diffusers refuses an index that names a package which is not there
    with tempfile.TemporaryDirectory() as aside:
        for entry in folder.iterdir():
            if entry.name != "model_index.json":
                (Path(aside) / entry.name).symlink_to(entry.absolute())
        changed = {**index, **{part: [None, None] for part in absent}}
        (Path(aside) / "model_index.json").write_text(json.dumps(changed), encoding="utf-8")
        parts |= {part: NothingChecked() for part in absent}
        return DiffusionPipeline.from_pretrained(aside, dtype=dtype, **parts)


def list_denoisers(folder: Path) -> list[str]:
    """Names of a pipeline's denoisers, sorted: ``transformer``, and a second expert where there is one."""
    index = read_table(folder / "model_index.json")
    return sorted(name for name, value in index.items() if name.startswith("transformer") and value[0])


def build_empty(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder with parameters that take no memory; buffers that are in no file are computed.

    What inference keeps in float32 stays so, as far as shards can hold it.
    """
    import diffusers
    from accelerate import init_empty_weights

    model_class = getattr(diffusers, read_table(folder / "config.json")["_class_name"])
    with init_empty_weights(include_buffers=False):
        shell = model_class.from_config(model_class.load_config(folder))
    if dtype != torch.float32:
        shell = shell.to(dtype)
        for part in list_float32_units(shell):
            part.float()
    return shell
