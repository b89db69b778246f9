"""A folder of captioned images to measure with."""

import json
from pathlib import Path

import numpy as np
from PIL import Image


def write_images(folder: Path, count: int, size: int) -> None:
    """``count`` random square images with ten different captions."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / f"{i:04d}.png")
        (folder / f"{i:04d}.json").write_text(
            json.dumps({"prompt": f"a photo of the digit {i % 10}"}), encoding="utf-8"
        )
