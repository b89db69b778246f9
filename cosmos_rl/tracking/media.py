"""Pictures of a run on the disk: ``media/<kind>/step_<N>/<index>_<slug>.png`` with an ``index.json``."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from cosmos_rl.storage import atomic


def slug(text: str) -> str:
    """Something that every file system takes as part of a name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "empty"


def save_pictures(folder: Path, pictures_NHW3: Tensor, prompts: Sequence[str]) -> list[Path]:
    """Write uint8 pictures ``[N, H, W, 3]`` with their prompts into a new ``folder``, whole or not at all."""
    names = [f"{i:03d}_{slug(prompt)}.png" for i, prompt in enumerate(prompts)]
    with atomic.staging(folder) as stage:
        for name, picture in zip(names, pictures_NHW3.numpy(), strict=True):
            Image.fromarray(picture).save(stage / name)
        rows = [{"file": name, "prompt": prompt} for name, prompt in zip(names, prompts, strict=True)]
        (stage / "index.json").write_text(json.dumps(rows, indent=1))
    return [folder / name for name in names]
