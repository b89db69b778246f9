"""Tars of samples, made by the standard library."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def write_tar(path: Path, members: Mapping[str, bytes] | Sequence[tuple[str, bytes]]) -> Path:
    """``members``: pairs where a name comes twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def pack(folder: Path, target: Path, samples_per_tar: int) -> Path:
    """The files of a flat folder of pairs in tars, in the order of their names."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stems = sorted({path.stem for path in files})
    for number in range(0, len(stems), samples_per_tar):
        stems_here = stems[number : number + samples_per_tar]
        members = {path.name: path.read_bytes() for path in files if path.stem in stems_here}
        write_tar(target / f"{number // samples_per_tar:03}.tar", members)
    return target


def pack_parallel(folder: Path, target: Path, samples_per_tar: int, kinds: Mapping[str, str]) -> Path:
    """The same in a folder of tars for each kind: ``kinds`` are ending -> name of the folder."""
    stems = sorted({path.stem for path in folder.iterdir() if path.is_file()})
    for ending, kind in kinds.items():
        for number in range(0, len(stems), samples_per_tar):
            names = [f"{stem}{ending}" for stem in stems[number : number + samples_per_tar]]
            members = {name: (folder / name).read_bytes() for name in names}
            write_tar(target / kind / f"{number // samples_per_tar:03}.tar", members)
    return target


def image_bytes(brightness: int, size: tuple[int, int] = (8, 8)) -> bytes:
    """A grey PNG; ``size`` is (height, width)."""
    content = io.BytesIO()
    Image.fromarray(np.full((*size, 3), brightness, np.uint8)).save(content, "PNG")
    return content.getvalue()


def sample(key: str, brightness: int = 0) -> dict[str, bytes]:
    """The members of a captioned image."""
    return {f"{key}.png": image_bytes(brightness), f"{key}.json": json.dumps({"prompt": key}).encode()}
