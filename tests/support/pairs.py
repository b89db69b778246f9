"""Folders of captioned images, and changes of them."""

import json
from collections.abc import Sequence
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


def marked_folder(folder: Path, sizes: Sequence[tuple[int, int]]) -> Path:
    """Captioned grey images of (height, width) each, whose two far ends are red for eight pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (height, width) in enumerate(sizes):
        pixels = np.full((height, width, 3), 128, np.uint8)
        along = pixels if height >= width else pixels.swapaxes(0, 1)
        along[:8] = along[-8:] = (255, 0, 0)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    return folder
