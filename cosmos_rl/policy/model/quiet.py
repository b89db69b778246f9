"""Silences the progress bars of the libraries while they load or save a pipeline."""

import contextlib
from collections.abc import Iterator


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
