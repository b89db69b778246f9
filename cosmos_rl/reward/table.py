"""What goes into a reward and what comes out. A missing score is NaN with a reason, never a number."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Metadata = Mapping[str, Any]
"""What a prompt set knows about a prompt in addition to its text, passed on to the rewards."""


@dataclass(frozen=True)
class ScoringRequest:
    """``N`` generated samples that are to be scored."""

    media: Tensor
    """Images uint8 ``[N, H, W, 3]``, videos uint8 ``[N, T, H, W, 3]``, on the CPU; of a model whose samples are plain
    vectors float32 ``[N, D]``."""
    prompts: Sequence[str]
    metadata: Sequence[Metadata]
    sample_ids: Sequence[int]
    """Global ids, for messages."""
    fps: float | None = None
    """Frames per second of videos."""
    latents: Tensor | None = None
    """What the reward service decodes to the media, float16 ``[N, C, T', h, w]`` on the CPU; sent in their place where
    the configuration says so."""
    rewards: Collection[str] | None = None
    """Names of those that are asked; None: all."""

    def asks(self, name: str) -> bool:
        """Whether a reward is asked."""
        return self.rewards is None or name in self.rewards

    def take(self, row_R: Tensor, rewards: Collection[str] | None) -> "ScoringRequest":
        """The samples at rows int64 ``[R]`` for these rewards."""
        rows: list[int] = row_R.tolist()
        return ScoringRequest(
            self.media[row_R],
            [self.prompts[row] for row in rows],
            [self.metadata[row] for row in rows],
            [self.sample_ids[row] for row in rows],
            self.fps,
            None if self.latents is None else self.latents[row_R],
            rewards,
        )

    def __post_init__(self) -> None:
        """Raises `ValueError`: the parts do not fit each other, so scores would go to the wrong samples."""
        shape, count = tuple(self.media.shape), len(self.prompts)
        images = self.media.dtype == torch.uint8 and len(shape) in (4, 5) and shape[-1] == 3
        vectors = self.media.dtype == torch.float32 and len(shape) == 2
        if not (images or vectors) or 0 in shape:
            raise ValueError(f"media are {self.media.dtype} {list(shape)}, not uint8 [N, H, W, 3] or [N, T, H, W, 3]")
        if not count == shape[0] == len(self.metadata) == len(self.sample_ids):
            raise ValueError(
                f"{shape[0]} samples with {count} prompts, {len(self.metadata)} metadata and {len(self.sample_ids)} ids"
            )
        if self.latents is not None and len(self.latents) != count:
            raise ValueError(f"{count} samples with latents of {len(self.latents)}")


@dataclass(frozen=True)
class RewardTable:
    """Scores of ``N`` samples."""

    scores: Mapping[str, Tensor]
    """Reward name -> float64 ``[N]`` on the CPU, as the reward gave it; NaN: missing or not asked. Also of weight 0."""
    total_N: Tensor
    """float64 ``[N]``: weighted, clipped and scaled; NaN where a score that is asked and counts is missing."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Row -> why its total is missing."""

    @property
    def missing_N(self) -> Tensor:
        """bool ``[N]``: which totals are missing."""
        return torch.isnan(self.total_N)


class Rewards(Protocol):
    """All rewards of a job behind one call that returns at once."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the scores in every table, in order."""
        ...

    @property
    def terms(self) -> Sequence[str]:
        """Names of those that are only shown, as terms of others."""
        ...

    @property
    def weights(self) -> Mapping[str, float]:
        """Scale times weight of each; 0: measured, not trained on."""
        ...

    @property
    def bounds(self) -> Mapping[str, tuple[float, float]]:
        """Between which scores each of them counts."""
        ...

    @property
    def origins(self) -> Mapping[str, str]:
        """What gives each; another text is another reward."""
        ...

    @property
    def sends_latents(self) -> bool:
        """Whether requests need `ScoringRequest.latents`."""
        ...

    def submit(self, request: ScoringRequest) -> "Future[RewardTable]":
        """Begin to score; the future fails with what cannot be put down to single samples (wrong token, broken
        function, service gone). A service that does not answer in time leaves its samples without a score."""
        ...

    def close(self) -> None:
        """End threads and connections."""
        ...
