"""Judges generated digits with a classifier fitted on real digits that no training ever saw.

    python examples/quickstart/judge.py FOLDER

FOLDER holds images and, next to each, a `<name>.json` with {"prompt": ...}, as digits.py writes them.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from digits import WORDS, enlarge, load_part
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC


@dataclass(frozen=True)
class Scores:
    """What the judge says about a set of images. Every figure is a fraction."""

    accuracy: float
    per_digit: dict[str, float]
    judge_accuracy_real: float  # the same judge on real digits that it was not fitted on
    spread_ratio: float  # within-class spread of the images / of real digits; 1 = as varied as real ones
    images: int


def features(images: Sequence[Image.Image]) -> np.ndarray:
    """Returns images of any size as brightness `[N, 64]` in 0..1: each of 8 x 8 cells averaged."""
    small = [image.convert("L").resize((8, 8), Image.Resampling.BOX) for image in images]
    return np.stack([np.asarray(image, dtype=np.float32).ravel() / 255 for image in small])


def spread(cells: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean over digits of the root-mean-square over cells of the standard deviation within the digit."""
    return float(np.mean([np.sqrt(cells[labels == digit].var(axis=0).mean()) for digit in np.unique(labels)]))


class Judge:
    """A support vector machine on 8 x 8 cells, fitted on the real digits of one part and tested on another."""

    def __init__(self, fit_part: str = "judge_fit", test_part: str = "judge_test") -> None:
        real, fit_labels = _real(fit_part)
        self.classifier = SVC(C=10.0, gamma=0.2).fit(real, fit_labels)  # pyright: ignore[reportArgumentType]
        self.spread_real = spread(real, fit_labels)
        self.accuracy_real = float(self.classifier.score(*_real(test_part)))

    def labels(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Returns the digit `[N]` that the judge sees in each image."""
        return self.classifier.predict(features(images))

    def judge(self, images: Sequence[Image.Image], asked: np.ndarray) -> Scores:
        """Compares images with the digits `[N]` that were asked for."""
        right = self.labels(images) == asked
        per_digit = {WORDS[digit]: float(right[asked == digit].mean()) for digit in np.unique(asked)}
        ratio = spread(features(images), asked) / self.spread_real
        return Scores(float(right.mean()), per_digit, self.accuracy_real, ratio, len(images))


class SecondJudge:
    """Another kind of classifier, the nearest neighbour, on digits that neither the reward nor the first judge has.

    It judges once, at the very end: nothing is tuned to please it.
    """

    def __init__(self) -> None:
        self.classifier = KNeighborsClassifier(n_neighbors=1).fit(*_real("second_judge"))
        self.accuracy_real = float(self.classifier.score(*_real("judge_test")))

    def accuracy(self, images: Sequence[Image.Image], asked: np.ndarray) -> float:
        """Returns the share of images that show the digit `[N]` that was asked for."""
        return float(np.mean(self.classifier.predict(features(images)) == asked))


def _real(part: str) -> tuple[np.ndarray, np.ndarray]:
    digits, labels = load_part(part)
    return features([enlarge(digit) for digit in digits]), labels


def read_folder(folder: Path) -> tuple[list[Image.Image], np.ndarray]:
    """Returns a folder's images and the digits `[N]` that their prompts ask for."""
    images, asked = [], []
    for record in sorted(folder.glob("*.json")):
        words = json.loads(record.read_text(encoding="utf-8"))["prompt"].split()
        with Image.open(record.with_suffix(".png")) as image:
            images.append(image.convert("RGB"))
        asked.append(next(index for index, word in enumerate(WORDS) if word in words))
    return images, np.asarray(asked)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Judge a folder of generated digits.")
    parser.add_argument("folder", type=Path)
    print(json.dumps(asdict(Judge().judge(*read_folder(parser.parse_args(argv).folder))), indent=2))


if __name__ == "__main__":
    main()
