"""The size of the media that a model works on, which changes from step to step where a job has several."""

import contextlib
from collections.abc import Iterator

from cosmos_rl.policy.config.buckets import Sides


class Sized:
    """A model that works on media of one size at a time."""

    media_size: Sides | None = None
    """Height and width of the media that it works on at the moment, for models that were built for certain ones."""

    @contextlib.contextmanager
    def at_size(self, size: Sides | None) -> Iterator[None]:
        """Inside the block media are of this height and width, one of those that the model was built for; None: of the
        configured ones, as outside."""
        if size is None or size == self.media_size:
            yield
            return
        before = self.media_size
        self.set_size(size)
        try:
            yield
        finally:
            if before is None:
                self.media_size = None
            else:
                self.set_size(before)

    def set_size(self, size: Sides) -> None:
        """Work on media of this height and width from now on."""
        self.media_size = size
