"""What a pipeline folder holds about its weights without reading them: safetensors headers and json files. No torch."""

import ast
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmos_rl
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import PolicyConfig
from cosmos_rl.policy.model.single_file import find_single_file

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""
_WEIGHT_NAMES = ("diffusion_pytorch_model", "model")
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_FAMILIES = Path(cosmos_rl.__file__).parent / "policy" / "model" / "diffusers"


class Unknown(Exception):
    """Something cannot be known without the model; the message says why."""


@dataclass(frozen=True)
class PipelineFiles:
    """A pipeline as its files describe it."""

    folder: Path
    class_name: str
    parts: Mapping[str, Shapes]
    """Part with weights -> the shapes of its tensors."""
    configs: Mapping[str, Mapping[str, Any]]
    """Part with weights -> its `config.json`."""

    @property
    def transformer(self) -> Shapes:
        """The shapes of the denoiser; of the first one where there are several, which are alike."""
        return self.parts["transformer"]

    @property
    def experts(self) -> list[str]:
        """Names of all denoisers."""
        return sorted(name for name in self.parts if name.startswith("transformer"))

    @property
    def others(self) -> list[str]:
        """Names of all parts that are never trained."""
        return [name for name in self.parts if name not in self.experts]

    def denoisers(self, which: str = "all") -> Shapes:
        """The shapes of all denoisers or of one; their names are in front of the tensors' where there are several."""
        if len(self.experts) == 1:
            return self.transformer
        chosen = [name for name in self.experts if which in ("all", name)]
        return {f"{name}.{tensor}": shape for name in chosen for tensor, shape in self.parts[name].items()}

    def class_of(self, part: str) -> str:
        """The class of a part."""
        return str(self.configs.get(part, {}).get("_class_name", f"a pipeline without a {part}"))

    def count(self, part: str) -> int:
        """How many numbers a part holds."""
        return elements(self.parts[part])


def elements(shapes: Shapes) -> int:
    """How many numbers the tensors hold together."""
    return sum(math.prod(shape) for shape in shapes.values())


def read_pipeline(policy: PolicyConfig) -> PipelineFiles:
    """The pipeline that `policy` names, from its folder or the hub cache.

    Raises:
        Unknown: it is not there, or not in a form that can be read without loading it.
    """
    if not policy.is_diffusers:
        raise Unknown("only diffusers pipelines are looked into")
    folder = locate_base(policy)
    index = _json(folder / "model_index.json")
    parts = [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]
    with_weights = [name for name in parts if (folder / name / "config.json").is_file()]
    if "transformer" not in with_weights:
        raise Unknown(f"{folder} has no part named transformer")
    return PipelineFiles(
        folder,
        str(index.get("_class_name", "")),
        {name: read_shapes(folder / name) for name in with_weights},
        {name: _json(folder / name / "config.json") for name in with_weights},
    )


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a model folder (one safetensors file, or several with an index).

    Raises:
        Unknown: no safetensors weights there.
    """
    for stem in _WEIGHT_NAMES:
        index = folder / f"{stem}.safetensors.index.json"
        if index.is_file():
            files = sorted(set(_json(index)["weight_map"].values()))
            return {name: shape for file in files for name, shape in _header(folder / file).items()}
        single = folder / f"{stem}.safetensors"
        if single.is_file():
            return _header(single)
    raise Unknown(f"{folder} holds no safetensors weights")


def served_classes() -> set[str]:
    """Pipeline classes that a file in `policy/model/diffusers` serves, read from its source: importing needs torch.

    Not those of `sana_model.py` and the like: the stock pipeline is driven there, as it is without such a file.
    """
    found: set[str] = set()
    for path in _FAMILIES.glob("*.py"):
        try:
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and node.name == "supported_model_types":
                found |= _returned_texts(node)
    return found


def _returned_texts(function: ast.FunctionDef) -> set[str]:
    """The strings in what a function returns; not those of its docstring."""
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    constants = [node.value for value in values for node in ast.walk(value) if isinstance(node, ast.Constant)]
    return {value for value in constants if isinstance(value, str)}


def is_hub_name(name: str) -> bool:
    """Whether a model name means a repository on the hub, as the launcher decides it."""
    return not Path(name).expanduser().exists() and name.count("/") == 1 and not name.startswith((".", "/", "~"))


def locate_base(policy: PolicyConfig) -> Path:
    """The local folder of the pipeline that `policy` names; of a transformer in one file that of its other parts.

    Raises:
        Unknown: it is not there.
    """
    try:
        single = find_single_file(policy)
    except UserError as error:
        raise Unknown(str(error)) from None
    if single is not None:
        return single.base
    return locate_pipeline(policy.model_name_or_path, policy.model_revision)


def locate_pipeline(name: str, revision: str | None) -> Path:
    """The local folder of a pipeline, or that of the hub cache.

    Raises:
        Unknown: it is not there.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_name(name):
        raise Unknown(f'policy.model_name_or_path = "{name}" does not exist')
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "model_index.json", revision=revision)
    if not isinstance(found, str):
        at = f" --revision {revision}" if revision else ""
        raise Unknown(f"{name} is not in the hub cache; `hf download {name}{at}` fetches it")
    return Path(found).parent


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _MAX_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(opened.read(length))
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError:
        raise Unknown(f"{file} is missing") from None
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise Unknown(f"{file} is not a whole safetensors file ({error})") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unknown(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise Unknown(f"{path} cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise Unknown(f"{path} holds no table")
    return content
