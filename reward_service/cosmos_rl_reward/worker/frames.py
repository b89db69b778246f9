"""Videos for a reward of images: frames are scored like images, and the mean over them is the video's score.

Needs only numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cosmos_rl_reward.payload.metadata import find_per_item
from cosmos_rl_reward.worker.outcome import check


def choose_frames(count: int, wanted: int) -> np.ndarray:
    """Indices of the frames that are scored: all, or the middle ones of ``wanted`` equal parts of the video.

    Args:
        count: frames of the video.
        wanted: how many; 0, or more than there are, means all.
    """
    if not 0 < wanted < count:
        return np.arange(count)
    return ((np.arange(wanted) + 0.5) * count / wanted).astype(int)


def score_frames(
    videos: np.ndarray,
    metadata: Mapping[str, Any],
    indices: np.ndarray,
    limit: int,
    score: Callable[[np.ndarray, dict[str, Any]], Any],
) -> dict[str, Any]:
    """Score some frames of every video; what a reward of videos would have returned.

    A video of which a frame has no score has none. Columns of texts, which have no mean, are left out.

    Args:
        videos: uint8 ``[B, 3, T, H, W]``.
        metadata: of the job; lists with one entry for each video (see `find_per_item`) get one for each frame.
        indices: the frames.
        limit: images in one call of the reward.
        score: the reward, which takes images ``[N, H, W, 3]`` and their metadata.
    """
    per_video = find_per_item(metadata, len(videos))
    owners, times = np.repeat(np.arange(len(videos)), len(indices)), np.tile(indices, len(videos))
    parts, errors, warnings = [], {}, []
    for first in range(0, len(owners), limit):
        rows = slice(first, first + limit)
        images = np.ascontiguousarray(videos[owners[rows], :, times[rows]].transpose(0, 2, 3, 1))
        returned = score(images, _select(metadata, per_video, owners[rows]))
        scores, wrong = check(returned, len(images))
        parts.append(scores)
        warnings.append(str(returned.get("warning") or ""))
        for row, reason in sorted(wrong.items()):
            errors.setdefault(int(owners[first + row]), f"frame {times[first + row]}: {reason}")
    means = _mean_over_frames(_concatenate(parts), len(indices))
    return {"scores": means, "item_errors": errors, "warning": "; ".join(dict.fromkeys(filter(None, warnings)))}


def _select(metadata: Mapping[str, Any], per_video: set[str], owners: np.ndarray) -> dict[str, Any]:
    """Metadata of images: each with the entries of its video."""
    own = {key: [metadata[key][k] for k in owners] for key in per_video}
    chosen = {**metadata, **own, "media_type": "image"}
    chosen.pop("video_infos", None)
    return chosen


def _concatenate(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: _concatenate([part[key] for part in parts]) for key in parts[0]}
    return [value for part in parts for value in part]


def _mean_over_frames(scores: Mapping[str, Any], frames: int) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for key, column in scores.items():
        if isinstance(column, dict):
            means[key] = _mean_over_frames(column, frames)
        elif not any(isinstance(value, str) for value in column):
            rows = [column[first : first + frames] for first in range(0, len(column), frames)]
            means[key] = [None if None in row else float(np.mean(row)) for row in rows]
    return means
