"""Where weights come from: a local folder or the hub, read without running code from the files."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady

TOKENIZER_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
_HINT = "run cosmos-rl-reward-prepare, which downloads it (a start never does), or copy it there"
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")


def require_packages(*packages: str) -> None:
    """Check that packages are installed, without importing them.

    Raises:
        NotReady: names those that are missing.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise NotReady(
            f"not installed in this reward's environment: {', '.join(missing)}; run cosmos-rl-reward-prepare"
        )


def find_folder(name: str, patterns: Iterable[str], *, offline: bool = False, published: str = "") -> Path:
    """A local folder as it is, else the hub repository of that name (downloaded into the hub's cache when missing).

    Args:
        name: a folder, or ``owner/name`` on the hub.
        patterns: files wanted from the hub.
        offline: use the cache only.
        published: hub name of what an absolute path should hold: it is downloaded there when the folder is missing.

    Raises:
        NotReady: neither a folder nor available from the hub.
    """
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    require_packages("huggingface_hub")
    import huggingface_hub

    place: dict[str, Any] = {"local_files_only": offline}
    if published and Path(name).expanduser().is_absolute():
        if offline:
            raise NotReady(f"weights: no folder {name}; {_HINT}")
        name, place = published, {"local_dir": Path(name).expanduser()}
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns), **place))
    except Exception as error:  # network, names and permissions fail in many ways; each means "not there"
        if offline:
            raise NotReady(f"weights {name!r}: not a local folder, and not in the hub's cache; {_HINT}") from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotReady(f"weights {name!r}: not a local folder, and not available from the hub ({reason})") from error


def find_or_download(configured: str, path: Path, repository: str, *, offline: bool) -> Path:
    """A file of weights: ``configured`` if that is one, else ``path``, fetched from a hub repository when missing.

    Raises:
        NotReady: it is missing and may not, or cannot, be fetched.
    """
    if Path(configured).is_file():
        return Path(configured)
    if path.is_file():
        return path
    if offline:
        raise NotReady(f"weights {path} are missing; {_HINT}")
    require_packages("huggingface_hub")
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(repository, path.name, local_dir=path.parent)
    except Exception as error:  # network, names and permissions fail in many ways; each means "not there"
        raise NotReady(f"weights {path} are missing, and {repository} cannot be read: {error}") from error
    return path


def download_text(url: str, path: Path) -> None:
    """Fetch a small text file to ``path``, which appears when it is whole.

    Raises:
        NotReady: it cannot be read there, or not written here.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=60) as answer:
            write_atomically(path, answer.read())
    except OSError as error:
        raise NotReady(f"{path} is missing, and cannot be fetched from {url}: {error}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file aside and give it its name when it is whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def find_file(folder: str | Path, names: Iterable[str]) -> Path:
    """The first of ``names`` that exists in a folder.

    Raises:
        NotReady: none does.
    """
    names = list(names)
    for name in names:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise NotReady(f"weights: none of {', '.join(names)} in {folder}; run cosmos-rl-reward-prepare, or copy it there")


def load_state(path: Path) -> dict[str, Any]:
    """Tensors of a ``.safetensors`` or torch file, on the CPU; the latter through torch's tensors-only reader.

    Files that wrap the weights as ``state_dict`` or ``model`` are unwrapped.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):  # its reader could be made to run code
        raise NotReady(f"weights: {path} is a torch file: read with torch 2.6 or newer, or convert it to safetensors")
    state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(state.get(key), dict):
            state = state[key]
    return state


def rename(state: dict[str, Any], names: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A state dict with other names: each regular expression of ``names`` is replaced, in their order."""
    renamed: dict[str, Any] = {}
    for name, value in state.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def select_prefix(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names begin with ``prefix``, without it."""
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def load_model(kind: Any, config: Any, state: dict[str, Any], dtype: Any, source: Path, **arguments: Any) -> Any:
    """A transformers model of the class ``kind`` with these weights, in evaluation mode.

    Raises:
        NotReady: they are not exactly this model's weights; names ``source``.
    """
    model, found = kind.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **arguments,
    )
    for problem in ("missing", "unexpected", "mismatched"):
        if names := sorted(found[f"{problem}_keys"]):
            raise NotReady(
                f"weights {source}: {len(names)} {problem}, such as {names[0]}; this is another model's file"
            )
    return model.eval()


def build_head(state: dict[str, Any], source: Path, *between: Any) -> Any:
    """Linear layers in float32, in the order of the numbers in their names, with ``between`` after each but the last.

    Raises:
        NotReady: a layer has no weights.
    """
    import torch

    depths = sorted({int(name.partition(".")[0]) for name in state if name[0].isdigit()})
    layers: list[Any] = []
    for prefix in [f"{depth}." for depth in depths] or [""]:
        weight, bias = state.get(f"{prefix}weight"), state.get(f"{prefix}bias")
        if weight is None:
            raise NotReady(f"weights {source}: the head has no {prefix}weight")
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.weight.data = weight.float()
        if bias is not None:
            linear.bias.data = bias.float()
        layers += [*between, linear]
    return torch.nn.Sequential(*layers[len(between) :]).eval()


def torch_dtype(name: str, device: str) -> Any:
    """The torch dtype of a configured name. float16 becomes float32 on a CPU: exact, and faster there."""
    import torch

    dtype = getattr(torch, name, None)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise NotReady(f"reward_args.dtype: {name!r} is not float16, bfloat16 or float32")
    return torch.float32 if device.startswith("cpu") and dtype == torch.float16 else dtype


def choose_dtype(reward: BaseRewardHandler) -> Any:
    """float32 when that is configured, else bfloat16: for models that were trained so and overflow in float16.

    It becomes the reward's own ``dtype``, which its provenance shows.
    """
    import torch

    if reward.dtype != "float32":
        reward.dtype = "bfloat16"
    return getattr(torch, reward.dtype)
