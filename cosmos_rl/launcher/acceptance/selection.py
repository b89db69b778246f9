"""What of a pipeline a configuration trains, from the shapes of its weights. No torch."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cosmos_rl.launcher.pipeline_files import PipelineFiles, Shapes, elements
from cosmos_rl.policy.config import Config, LoraConfig
from cosmos_rl.policy.config.model_rules import adapter_name_problems, target_problems

ALL_LINEAR = "all-linear"
_BUFFERS = re.compile(r"(^|\.)pos_embed\.pos_embed$")  # in the file, but computed, not trained


@dataclass(frozen=True)
class Selection:
    """How many numbers of the transformer are trained, and how the others are held."""

    trained: int
    frozen: int
    spare_adapters: int
    """Numbers of adapters other than the trained one."""
    targets: Mapping[str, int]
    """LoRA target -> how many layers it finds."""
    problems: Sequence[str] = ()
    """What speaks against the adapters' names and targets."""
    shapes: Sequence[tuple[int, ...]] = ()
    """Of the trained tensors."""


def parameters(shapes: Shapes) -> int:
    """How many numbers are weights rather than stored buffers."""
    return elements({name: shape for name, shape in shapes.items() if not _BUFFERS.search(name)})


def select(config: Config, pipeline: PipelineFiles) -> Selection:
    """What of the transformer is trained, by the rules of the trainer."""
    shapes, whole = pipeline.denoisers(config.policy.diffusers.trained_denoiser), elements(pipeline.denoisers())
    if config.policy.lora is not None:
        return _select_adapters(config.policy.lora, shapes, whole)
    chosen = {name: shape for name, shape in shapes.items() if config.policy.is_trained(name)}
    trained = parameters(chosen)
    shapes = [shape for name, shape in chosen.items() if not _BUFFERS.search(name)]
    return Selection(trained, whole - trained, 0, {}, shapes=shapes)


def _select_adapters(lora: LoraConfig, shapes: Shapes, whole: int) -> Selection:
    layers = adaptable_layers(shapes)
    found = _find_targets(lora, layers)
    ranks = adapter_ranks(lora, layers)
    matrices = [matrix for name, rank in ranks.items() for matrix in _adapter_shapes(layers[name], rank)]
    size = sum(math.prod(matrix) for matrix in matrices)
    modules = _list_modules(shapes)
    problems = adapter_name_problems(lora.lora_names, modules)
    if lora.target_modules != ALL_LINEAR:
        problems += target_problems(lora.target_modules, layers, modules)
    return Selection(
        trained=size,
        frozen=whole,
        spare_adapters=(len(lora.lora_names) - 1) * size,
        targets={target: len(names) for target, names in found.items()},
        problems=problems,
        shapes=matrices,
    )


def _list_modules(shapes: Shapes) -> set[str]:
    """Names of all modules with weights in them, at any depth."""
    paths = (name.split(".")[:-1] for name in shapes)
    return {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}


def adapter_ranks(lora: LoraConfig, layers: Shapes) -> dict[str, int]:
    """Those of the layers that get adapters, with their ranks."""
    found = _find_targets(lora, layers)
    return {name: _pick_rank(name, lora) for names in found.values() for name in names}


def adaptable_layers(shapes: Shapes) -> Shapes:
    """Linear layers and two-dimensional convolutions."""
    weights = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")}
    return {name: shape for name, shape in weights.items() if len(shape) in (2, 4)}


def _find_targets(lora: LoraConfig, layers: Shapes) -> dict[str, list[str]]:
    """Target -> the layers that it finds."""
    if lora.target_modules == ALL_LINEAR:
        return {ALL_LINEAR: [name for name, shape in layers.items() if len(shape) == 2]}
    return {
        target: [name for name in layers if name == target or name.endswith(f".{target}")]
        for target in lora.target_modules
    }


def _adapter_shapes(layer: tuple[int, ...], rank: int) -> Iterator[tuple[int, ...]]:
    """Shapes of the two matrices of an adapter."""
    outside, inside, *kernel = layer
    yield (rank, inside, *kernel)
    yield (outside, rank)


def find_pattern(name: str, lora: LoraConfig) -> str | None:
    """The key of ``r_pattern`` that sets the rank of a layer; None: ``r`` does."""
    return next((key for key in lora.r_pattern if re.match(rf"(.*\.)?({key})$", name)), None)


def _pick_rank(name: str, lora: LoraConfig) -> int:
    """The rank of the adapter of a layer, by PEFT's rule: the first pattern that matches the end of the name."""
    pattern = find_pattern(name, lora)
    return lora.r if pattern is None else lora.r_pattern[pattern]
