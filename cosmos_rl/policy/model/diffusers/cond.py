"""What conditions a velocity: made by a model, handed to every velocity call."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

TextTensors = Mapping[str, Tensor]
"""Keyword of the transformer's forward -> tensor ``[B, ...]``."""
Negative = str | Sequence[str] | None
"""Text that guidance leads away from: one for all prompts, one each, or none."""
_SHARED, _VALUES = "shared/", "values/"
"""Beginning of the names of shared tensors in a cache, and the name of the other values, in JSON."""


@dataclass(frozen=True)
class Cond:
    """Conditions of ``B`` samples."""

    text: TextTensors
    negative: TextTensors | None = None
    """Conditions of the negative prompts, for classifier-free guidance; None when the guidance is 1."""
    element_mask: Tensor | None = None
    """``[B, C, ...]``, broadcastable to the latents: which elements count in means. None: all."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Keyword of the transformer's forward -> what all samples share: tensors without a batch axis, and constants."""

    @property
    def batch_size(self) -> int:
        """B."""
        return next(iter(self.text.values())).shape[0]

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Cond":
        negative, element_mask = self.negative, self.element_mask
        if negative is not None:
            negative = {k: change(v) for k, v in negative.items()}
        if element_mask is not None:
            element_mask = change(element_mask)
        text = {k: change(v) for k, v in self.text.items()}
        return replace(self, text=text, negative=negative, element_mask=element_mask)

    def rows(self, which: slice | Tensor) -> "Cond":
        """The conditions of some samples: a view for a slice, a copy for indices int64 ``[N]``."""
        return self._map(lambda value: value[which if isinstance(which, slice) else which.to(value.device)])

    def concat(self, other: "Cond") -> "Cond":
        """The samples of both."""
        negative = mask = None
        if self.negative is not None and other.negative is not None:
            negative = {k: torch.cat([v, other.negative[k]]) for k, v in self.negative.items()}
        if self.element_mask is not None and other.element_mask is not None:
            mask = torch.cat([self.element_mask, other.element_mask])
        return Cond({k: torch.cat([v, other.text[k]]) for k, v in self.text.items()}, negative, mask, self.shared)

    def to(self, device: torch.device) -> "Cond":
        """The same on ``device``."""
        shared = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.shared.items()}
        return replace(self._map(lambda value: value.to(device)), shared=shared)

    def to_tensors(self) -> list[dict[str, Tensor]]:
        """The text of each sample and what all share, as tensors that a cache can keep; see ``from_tensors``."""
        shared = {_SHARED + k: v for k, v in self.shared.items() if isinstance(v, Tensor)}
        values = {k: v for k, v in self.shared.items() if not isinstance(v, Tensor)}
        if values:
            shared[_VALUES] = torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)
        rows = range(self.batch_size)
        return [{**{k: v[i : i + 1] for k, v in self.text.items()}, **shared} for i in rows]

    @classmethod
    def from_tensors(cls, entries: Sequence[Mapping[str, Tensor]]) -> "Cond":
        """The conditions of samples that ``to_tensors`` took apart."""
        first = entries[0]
        shared: dict[str, Any] = {k.removeprefix(_SHARED): v for k, v in first.items() if k.startswith(_SHARED)}
        if _VALUES in first:
            shared |= json.loads(bytes(first[_VALUES].tolist()))
        text = {k: torch.cat([one[k] for one in entries]) for k in first if k != _VALUES and not k.startswith(_SHARED)}
        return cls(text, shared=shared)


def negatives(negative: Negative, count: int) -> list[str] | None:
    """One for each of ``count`` prompts."""
    if negative is None:
        return None
    if isinstance(negative, str):
        return [negative] * count
    return list(negative)
