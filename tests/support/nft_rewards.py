"""Rewards of the DiffusionNFT tests: smooth in the image, so that rounding to 8 bits hardly moves them."""

import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]


def smooth(to_be_evaluated: Image) -> float:
    """A weighted mean of all values, of all frames of a video, about -0.5 ... 0.5."""
    height, width, channels = to_be_evaluated.shape[-3:]
    rows, columns = np.linspace(0, 3, height)[:, None, None], np.linspace(0, 2, width)[None, :, None]
    weights = np.cos(rows + columns + np.arange(channels))
    return float((to_be_evaluated / 255.0 * weights).mean())


def large(to_be_evaluated: Image) -> float:
    """Another one, a hundred times larger and turned round."""
    return -100.0 * float(np.sin(to_be_evaluated[::2] / 255.0).mean())


def lost_on_some_prompts(to_be_evaluated: Image, prompt: str) -> float | None:
    """`smooth`, but not for prompts with the word "lost"."""
    return None if "lost" in prompt else smooth(to_be_evaluated)


def never(to_be_evaluated: Image) -> float | None:
    """No score at all."""
    return None


def not_a_number(to_be_evaluated: Image) -> float:
    """NaN."""
    return float("nan")


def broken(to_be_evaluated: Image) -> float:
    """Fails as a function with a bug does."""
    return to_be_evaluated.no_such_thing  # type: ignore[attr-defined]


def stuck(to_be_evaluated: Image) -> float:
    """Does not return for a minute."""
    time.sleep(60)
    return 0.0


def dies_on_rank_one(to_be_evaluated: Image) -> float:
    """Ends the process of rank 1 at its first call; the others continue."""
    if os.environ.get("RANK") == "1":
        os._exit(17)
    return smooth(to_be_evaluated)


def slow(to_be_evaluated: Image) -> float:
    """`smooth` after a moment, in which a signal can arrive; it leaves a file that shows that it was called."""
    Path(os.environ["TEST_CALLED"]).touch()
    time.sleep(0.01)
    return smooth(to_be_evaluated)


def constant(to_be_evaluated: Image) -> float:
    """The same for all."""
    return 0.25


def seldom(to_be_evaluated: Image) -> float:
    """0 for all but black images."""
    return float(not to_be_evaluated.any())
