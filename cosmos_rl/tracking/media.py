"""Images of a run on the disk: ``media/<kind>/step_<N>/<index>_<slug>.png`` with an ``index.json``.

A video is an ``.mp4`` of the same name, and the image is its first frame.
``<kind>`` is ``validation`` (the same prompts and noise over time) or ``rollout`` (best and worst training samples).
"""

import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from cosmos_rl.storage import atomic
from cosmos_rl.storage.disk import OF_A_RUN, report_full_disk

if TYPE_CHECKING:  # the report reads galleries without torch
    from torch import Tensor

    from cosmos_rl.distributed.context import Context

MAX_CAPTION_CHARS = 100
USUAL_FPS = 16.0
TOTAL = "total"
"""Name of the score that is trained on, among the scores of single rewards."""


@dataclass(frozen=True)
class Shown:
    """One image or video of a gallery."""

    pixels: "Tensor | None"
    """uint8 on the CPU: ``[H, W, 3]``, or ``[T, H, W, 3]`` for a video. None: another rank has and writes them."""
    prompt: str
    sample_id: int
    """Global id: with the step and the run's seed it reproduces the image."""
    group: str = ""
    """"best", "worst", "fixed" (same prompts and noise in every gallery) or "" (plain)."""
    scores: Mapping[str, float | None] = field(default_factory=dict)
    """Reward name -> score, and "total"; None: missing."""
    finite: bool = True
    """Whether all pixels were numbers before they became uint8."""
    blank: bool = False
    """Whether it shows nothing, see `is_blank`."""
    fps: float | None = None
    """Frames per second of a video."""
    of_set: str = ""
    """Label of the validation set; empty: there is one."""


def slugify(text: str) -> str:
    """Something that every file system takes as part of a name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "empty"


def build_caption(shown: Shown) -> str:
    """The first 100 characters of the prompt, and the total score where there is one: ``a cat | avg: 0.8125``.

    Of several validation sets the label stands in front: ``[ocr] a cat``.
    """
    prompt, total = shown.prompt[:MAX_CAPTION_CHARS], _finite(shown.scores.get(TOTAL))
    if shown.of_set:
        prompt = f"[{shown.of_set}] {prompt}"
    if total is None:
        return prompt
    return f"{prompt} | avg: {total:.4g}"


def save_gallery(
    folder: Path, shown: Sequence[Shown], *, remedy: str = OF_A_RUN, context: "Context | None" = None
) -> list[Path]:
    """Write the images and ``index.json`` into ``folder``, whole or not at all; an older ``folder`` is replaced.

    A row of the index has ``file``, ``prompt``, ``sample_id``, ``group`` and ``scores``, of a video ``clip`` too, of
    several validation sets ``set``; a missing score is null.

    Args:
        remedy: what to do when the disk is full.
        context: of all ranks, which call this together; each writes what it has. None: there is one rank.
    """
    names = [f"{i:03d}_{slugify(one.prompt)}.png" for i, one in enumerate(shown)]
    with report_full_disk(folder, remedy):
        if context is None or context.world_size == 1:
            with atomic.staging(folder) as stage:
                _save_own(stage, names, shown)
                _save_index(stage, names, shown)
        else:
            _save_over_ranks(folder, names, shown, context)
    return [folder / name for name in names]


def _save_over_ranks(folder: Path, names: Sequence[str], shown: Sequence[Shown], context: "Context") -> None:
    """Where a rank fails, the launcher ends the others, and the next gallery removes what is left aside."""
    if context.is_main:
        atomic.begin(folder)
    context.barrier()
    stage = atomic.staging_path(folder)
    if context.rank % context.cp_size == 0:  # context-parallel peers have the same media
        _save_own(stage, names, shown)
    context.barrier()
    if context.is_main:
        _save_index(stage, names, shown)
        atomic.commit(folder)


def _save_own(stage: Path, names: Sequence[str], shown: Sequence[Shown]) -> None:
    for name, one in zip(names, shown, strict=True):
        if one.pixels is not None:
            _save(one, one.pixels, stage / name)


def _save_index(stage: Path, names: Sequence[str], shown: Sequence[Shown]) -> None:
    rows = [_build_row(stage / name, one) for name, one in zip(names, shown, strict=True)]
    (stage / "index.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def is_blank(pixels: "Tensor") -> bool:
    """Whether it has one colour only, as weights or latents that are not finite make it, and the like."""
    return bool((pixels == pixels.flatten(0, -2)[0]).all())


def pick_best_and_worst(
    total_N: "Tensor", groups: "Tensor | Sequence[Hashable]", count: int
) -> tuple[list[int], list[int]]:
    """Rows of up to ``count`` best and ``count`` worst samples, best first and worst first.

    Each prompt gives its best sample before any gives its second best (the same for the worst), so that one easy
    prompt does not fill the gallery. No row is in both lists; with fewer than ``2 * count`` scores the best go first.

    Args:
        total_N: reward per sample ``[N]``; NaN: missing, never picked.
        groups: which prompt each sample belongs to ``[N]``.
        count: rows wanted of each kind.
    """
    totals: list[float] = total_N.tolist()
    if not isinstance(groups, Sequence):
        groups = groups.tolist()  # elements of a tensor never compare equal as keys
    scored = [row for row, total in enumerate(totals) if not math.isnan(total)]
    best = _one_per_group(sorted(scored, key=lambda row: -totals[row]), groups)[: min(count, (len(scored) + 1) // 2)]
    rest = sorted((row for row in scored if row not in set(best)), key=lambda row: totals[row])
    return best, _one_per_group(rest, groups)[:count]


def _one_per_group(ordered: Sequence[int], groups: Sequence[Hashable]) -> list[int]:
    """The rows in turns: the first of every group, then the second of every group ...; within a turn as they came."""
    seen: dict[Hashable, int] = {}
    turns = []
    for order, row in enumerate(ordered):
        turns.append((seen.get(groups[row], 0), order, row))
        seen[groups[row]] = turns[-1][0] + 1
    return [row for _, _, row in sorted(turns)]


def _save(one: Shown, tensor: "Tensor", file: Path) -> None:
    pixels = tensor.numpy()
    if pixels.ndim == 4:
        from cosmos_rl.tracking.clips import encode_clip  # most runs have no videos

        file.with_suffix(".mp4").write_bytes(encode_clip(pixels, one.fps or USUAL_FPS))
        pixels = pixels[0]
    Image.fromarray(pixels).save(file)


def _build_row(file: Path, one: Shown) -> dict[str, object]:
    scores = {reward: _finite(score) for reward, score in one.scores.items()}
    row = {"file": file.name, "prompt": one.prompt, "sample_id": one.sample_id, "group": one.group, "scores": scores}
    if one.of_set:
        row["set"] = one.of_set
    clip = file.with_suffix(".mp4")
    if clip.exists():
        row["clip"] = clip.name
    return row


def _finite(score: float | None) -> float | None:
    """JSON has no NaN, and neither NaN nor infinity is a score."""
    if score is None or not math.isfinite(score):
        return None
    return float(score)
