"""The quickstart's images: scikit-learn's handwritten digits as captioned image folders.

    python examples/quickstart/digits.py OUT

writes `OUT/train`, `OUT/validation` (grey digits) and `OUT/red` (a few red digits for the LoRA run), each holding
`<name>.png` next to `<name>.json` with {"prompt": ...}, and `OUT/prompts.txt` with the ten prompts. The 1,797 digits
are split into five disjoint parts.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZE = 32  # pixels; the originals have 8

# Where the k-th image of a digit goes. A rule instead of a shuffle: every part has all digits alike, on every
# machine. The tiny autoencoder has seen only "train" (cosmos_rl/policy/model/tiny/train_vae.py).
PARTS = ("train", "validation", "judge_fit", "judge_test", "second_judge")


def part_of(k: int) -> str:
    """Returns the part of the k-th image of a digit: about 81, 9, 45, 22 and 22 of 180."""
    if k % 2 == 0:
        return "validation" if k % 20 == 10 else "train"
    return "judge_fit" if k % 4 == 1 else ("judge_test" if k % 8 == 3 else "second_judge")


def load_part(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a part's images `[N, 8, 8]`, float32 in 0..1, and labels `[N]`."""
    cells, labels = load_digits(return_X_y=True)
    seen = np.zeros(10, dtype=int)
    chosen = []
    for index, label in enumerate(labels):
        if part_of(int(seen[label])) == part:
            chosen.append(index)
        seen[label] += 1
    return cells.reshape(-1, 8, 8)[chosen].astype(np.float32) / 16.0, labels[chosen]


def enlarge(digit: np.ndarray) -> Image.Image:
    """Returns a digit `[8, 8]` in 0..1 as a grey image of 32 x 32 pixels, white ink on black."""
    small = Image.fromarray(np.round(digit * 255).astype(np.uint8))
    return small.resize((SIZE, SIZE), Image.Resampling.BICUBIC)


def prompt_of(label: int) -> str:
    """Returns for example "a photo of the digit seven"."""
    return f"a photo of the digit {WORDS[label]}"


def tint(image: Image.Image, rgb: tuple[int, int, int]) -> Image.Image:
    """Returns a grey image with its white turned into a colour."""
    grey = np.asarray(image, dtype=np.float32)[..., None] / 255
    return Image.fromarray(np.round(grey * np.asarray(rgb, dtype=np.float32)).astype(np.uint8))


def write_pair(folder: Path, name: str, image: Image.Image, prompt: str) -> None:
    """Writes `<name>.png` and `<name>.json`."""
    image.convert("RGB").save(folder / f"{name}.png")
    (folder / f"{name}.json").write_text(json.dumps({"prompt": prompt}) + "\n", encoding="utf-8")


def write_grey(folder: Path, part: str) -> int:
    """Writes one part as grey digits and returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    digits, labels = load_part(part)
    for index, (digit, label) in enumerate(zip(digits, labels, strict=True)):
        write_pair(folder, f"{index:04d}_{WORDS[label]}", enlarge(digit), prompt_of(label))
    return len(labels)


def write_red(folder: Path, per_digit: int = 12) -> int:
    """Writes the first images of every digit in "train" in red and returns their number.

    The prompts do not say "red": the adapter is to learn a style, not a word.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digits, labels = load_part("train")
    for label in range(10):
        for index, digit in enumerate(digits[labels == label][:per_digit]):
            image = tint(enlarge(digit), (255, 60, 30))
            write_pair(folder, f"{WORDS[label]}_{index:02d}", image, prompt_of(label))
    return 10 * per_digit


def write_all(out: Path) -> dict[str, int]:
    """Writes the three folders and the list of prompts below `out`; returns the number of images in each folder."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "prompts.txt").write_text("".join(f"{prompt_of(label)}\n" for label in range(10)), encoding="utf-8")
    return {
        "train": write_grey(out / "train", "train"),
        "validation": write_grey(out / "validation", "validation"),
        "red": write_red(out / "red"),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's captioned digits.")
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args(argv).out
    for name, count in write_all(out).items():
        print(f"{out / name}: {count} images")


if __name__ == "__main__":
    main()
