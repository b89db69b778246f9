"""Which base model a run starts from, in a few characters. No torch."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from cosmos_rl.storage.weight_files import read_table

_SAMPLED_BYTES = 2**20
_TEXTS = (".json", ".txt", ".model")
_VARIANTS = (".fp16.", ".bf16.", ".ema.", ".non_ema.")


def pipeline_digest(name: str, revision: str | None) -> str | None:
    """16 hex digits of what a pipeline's files hold, wherever they are; None: there is no such folder here.

    Settings and tokenizers count as a whole; of weights, which may take an hour to read, the size and the first and
    last megabyte. What is no part of the pipeline, such as a README or another variant of the weights, does not.
    """
    folder = find_folder(name, revision)
    if folder is None or not (folder / "model_index.json").is_file():
        return None
    digest = hashlib.sha256(_read_settings(folder / "model_index.json"))
    for file in _files(folder):
        digest.update(f"\n{file.relative_to(folder).as_posix()}\n".encode())
        read = {".json": _read_settings}.get(file.suffix, read_ends)
        digest.update(read(file))
    return digest.hexdigest()[:16]


def policy_digest(place: str) -> str | None:
    """As `pipeline_digest`, of what has the weights of a policy: also an adapter, by its file or folder."""
    path = Path(place).expanduser()
    if path.is_file():
        return hashlib.sha256(read_ends(path)).hexdigest()[:16]
    if not path.is_dir() or (path / "model_index.json").is_file():
        return pipeline_digest(place, None)
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.suffix in (".json", ".safetensors")):
        digest.update(f"\n{file.relative_to(path).as_posix()}\n".encode())
        digest.update({".json": _read_settings}.get(file.suffix, read_ends)(file))
    return digest.hexdigest()[:16]


def find_folder(name: str, revision: str | None) -> Path | None:
    """The folder of a pipeline, by its path or in the hub's cache; None: it is not here."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache  # late: only a hub name needs it

    found = try_to_load_from_cache(name, "model_index.json", revision=revision)
    if not isinstance(found, str):
        return None
    return Path(found).parent


def _files(folder: Path) -> Iterator[Path]:
    index = read_table(folder / "model_index.json")
    for part in sorted(name for name, value in index.items() if isinstance(value, list)):
        for file in sorted((folder / part).glob("*")):
            weights = file.suffix == ".safetensors" and not any(word in file.name for word in _VARIANTS)
            if weights or file.suffix in _TEXTS:
                yield file


def _read_settings(file: Path) -> bytes:
    """The content of a JSON file without what saving it again would change: versions and paths."""
    text = file.read_bytes()
    try:
        content = json.loads(text)
    except ValueError:
        return text
    if isinstance(content, dict):
        content = {k: v for k, v in content.items() if not k.startswith("_") or k == "_class_name"}
    return json.dumps(content, sort_keys=True).encode()


def read_ends(file: Path) -> bytes:
    """Size, first and last megabyte of a file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(_SAMPLED_BYTES)
        opened.seek(max(0, size - _SAMPLED_BYTES))
        return f"{size}:".encode() + first + opened.read(_SAMPLED_BYTES)
