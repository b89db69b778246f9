"""A data set whose images and videos are not decoded where a cache holds their latents."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cosmos_rl.data.cache import TensorCache
from cosmos_rl.data.items import identify, take


class CachedLatents(Sequence[Any]):
    """The elements of a data set, those with a source in the cache with their latent in place of pixels.

    A data set that cannot say what an element is without decoding it is read as ever.
    """

    def __init__(self, dataset: Sequence[Any], cache: TensorCache) -> None:
        self._dataset = dataset
        self._cache = cache

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.take(index, None)

    def take(self, index: int, sample_id: int | None) -> Any:
        """See `cosmos_rl.data.items.take`."""
        item = identify(self._dataset, index, sample_id)
        if item is not None and item.source is not None:
            entry = self._cache.get(item.source, remember=False)  # loader processes would each keep their own
            if entry is not None:
                return replace(item, latent=entry["latent"])
        return take(self._dataset, index, sample_id)

    @property
    def prompts(self) -> Sequence[str] | None:
        """The captions, where the data set knows them without decoding."""
        return getattr(self._dataset, "prompts", None)

    @property
    def digest(self) -> str | None:
        """Of names and captions, where the data set knows it."""
        return getattr(self._dataset, "digest", None)
