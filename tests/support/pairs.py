"""Folders of captioned images, and changes of them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image


def other_captions(folder: Path) -> None:
    (folder / "003.json").write_text(json.dumps({"prompt": "another caption"}))


def other_names(folder: Path) -> None:
    for suffix in ("json", "png"):
        (folder / f"003.{suffix}").rename(folder / f"0031.{suffix}")


def edit_folder(folder: Path, count: int = 6) -> Path:
    """Images with the images that they were made of in a folder of their own."""
    (folder / "before").mkdir(parents=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels[0]).save(folder / f"{number}.png")
        Image.fromarray(pixels[1]).save(folder / f"before/{number}.png")
        caption = {"prompt": f"make it {number}", "image": f"before/{number}.png"}
        (folder / f"{number}.json").write_text(json.dumps(caption), encoding="utf-8")
    return folder
