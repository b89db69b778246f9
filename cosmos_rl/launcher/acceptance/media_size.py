"""Sizes and numbers of frames that a model cannot make, from its files. No torch."""

import math
from collections.abc import Iterator

from cosmos_rl.launcher.geometry import find_geometry
from cosmos_rl.launcher.pipeline_files import PipelineFiles, Unknown, served_classes
from cosmos_rl.launcher.pipeline_source import in_diffusers, makes_videos
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.model_rules import conditional_frames_problem, frames_problem, size_problems
from cosmos_rl.policy.model.driver.rows import find_row

_POSITIONS = "pos_embed.pos_embed"
"""Tensor of a transformer that holds a vector for each position of a square."""


def media_problems(config: Config, pipeline: PipelineFiles) -> Iterator[str]:
    """One line for each setting that does not fit, with the nearest that does."""
    kind, diffusers = pipeline.class_name, config.policy.diffusers
    if kind not in served_classes() and not in_diffusers(kind):
        return  # a class of the user's own
    of_videos = makes_videos(kind)
    if of_videos is not None and of_videos != diffusers.is_video:
        makes = "images"
        if of_videos:
            makes = "videos"
        yield f"policy.diffusers.is_video = {str(diffusers.is_video).lower()}, but {kind} makes {makes}"
        return
    try:
        geometry = find_geometry(pipeline)
    except Unknown:
        return
    model, positions = config.policy.model_name_or_path, _positions(pipeline)
    problems: list[str | None] = list(size_problems(diffusers, model, geometry.multiple, positions))
    if diffusers.is_video:
        for key in ("train_frames", "inference_frames"):
            frames = getattr(diffusers, key)
            problems.append(frames_problem(f"policy.diffusers.{key}", frames, model, geometry.frame_multiple))
        if diffusers.conditional_frames is not None:
            able = find_row(kind).clean_frames
            problems.append(conditional_frames_problem(diffusers.conditional_frames, model, able))
    yield from (problem for problem in problems if problem is not None)


def _positions(pipeline: PipelineFiles) -> int | None:
    """Tokens of a side for which the transformer stores positions; None: it computes them."""
    shape = pipeline.transformer.get(_POSITIONS)
    if shape is None:
        return None
    return math.isqrt(shape[-2])
