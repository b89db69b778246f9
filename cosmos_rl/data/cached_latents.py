"""A data set whose images and videos are not decoded where a cache holds their latents."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cosmos_rl.data.cache import TensorCache
from cosmos_rl.data.items import Item, Wrapped, identify, take


class CachedLatents(Wrapped):
    """The elements of a data set, those with a source in the cache with their latent in place of pixels.

    A data set that cannot say what an element is without decoding it is read as ever.
    """

    def __init__(self, dataset: Sequence[Any], cache: TensorCache) -> None:
        super().__init__(dataset)
        self._cache = cache

    def take(self, index: int, sample_id: int | None) -> Any:
        """See `cosmos_rl.data.items.take`."""
        item = identify(self._dataset, index, sample_id)
        found = None if item is None else self._with_latent(item)
        if found is not None:
            return found
        return take(self._dataset, index, sample_id)

    def _with_latent(self, item: Item) -> Item | None:
        """The item, and what was rejected for it, with their latents; None: not all are there."""
        if item.source is None:
            return None
        entry = self._cache.get(item.source, remember=False)  # loader processes would each keep their own
        if entry is None:
            return None
        rejected = item.rejected
        if rejected is not None:
            rejected = self._with_latent(rejected)
            if rejected is None:
                return None
        return replace(item, latent=entry["latent"], rejected=rejected)
