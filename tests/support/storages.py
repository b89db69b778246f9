"""Which storages the operations of a block make, and when they are gone."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """The storages that operations of this thread make within the block, and which of them are still there."""

    def __init__(self, image: int = 1) -> None:
        """``image``: bytes of an image."""
        super().__init__()
        self._image = image
        self._made: dict[int, tuple[StorageWeakRef, torch.dtype, int]] = {}
        self.largest_float = self.most_images = 0
        """Bytes of one tensor; bytes of all images at a time."""
        self.most_bytes = 0
        """Of all tensors at a time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            storage = result.untyped_storage()
            self._made[storage.data_ptr()] = (StorageWeakRef(storage), result.dtype, storage.nbytes())
            self.most_bytes = max(self.most_bytes, self._count_all())
            if result.is_floating_point():
                self.largest_float = max(self.largest_float, storage.nbytes())
            elif result.dtype == torch.uint8:
                self.most_images = max(self.most_images, self.count_bytes(torch.uint8, self._image))
        return result

    def count_bytes(self, dtype: torch.dtype, unit: int) -> int:
        """Bytes of those of this type that are there now, where they are a multiple of ``unit``."""
        sizes = [size for made, kind, size in self._made.values() if kind == dtype and not made.expired()]
        return sum(size for size in sizes if size % unit == 0)

    def _count_all(self) -> int:
        self._made = {place: made for place, made in self._made.items() if not made[0].expired()}
        return sum(size for _, _, size in self._made.values())
