"""Silences the progress bars and needless warnings of the libraries while they load or save a pipeline."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """No progress bars of the libraries: ours is the only progress that a log should hold."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.enable_progress_bar()
        transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    """Only errors of the libraries: a prompt that is cut is theirs to say once, not on each of many calls."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    places = (diffusers_logging, transformers_logging)
    before = [place.get_verbosity() for place in places]
    for place in places:
        place.set_verbosity_error()
    try:
        yield
    finally:
        for place, verbosity in zip(places, before, strict=True):
            place.set_verbosity(verbosity)


def load_adapter(pipe: Any, folder: Path) -> None:
    """Load and use an exported adapter. Its text encoders have no part of it, of which diffusers warns each time."""
    from diffusers.utils import logging as diffusers_logging

    before = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        pipe.load_lora_weights(str(folder), weight_name="model.safetensors", adapter_name="default")
    finally:
        diffusers_logging.set_verbosity(before)
    pipe.set_adapters("default")
