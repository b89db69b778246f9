"""Whether an adapter like that of `[policy.lora]` can hold those of the teachers, by the shapes in their files."""

import contextlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.selection import adaptable_layers, adapter_ranks, find_pattern
from cosmos_rl.launcher.pipeline_files import PipelineFiles
from cosmos_rl.policy.config import Config, LoraConfig
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.plan import name_teachers
from cosmos_rl.storage.weight_files import open_weights

if TYPE_CHECKING:
    from torch import Tensor


def teacher_problems(config: Config, pipeline: PipelineFiles) -> Iterator[str]:
    """What in the adapters of teachers has no place in that of the policy; only where there are some torch is loaded.

    Files that are not there or not whole are left to `inspect_environment`, and forms that only the loaded pipeline may
    know to the run.
    """
    lora, which = config.policy.lora, config.policy.diffusers.trained_denoiser
    if lora is None or not job_kind(config).online:
        return
    trained = [name for name in pipeline.experts if which in ("all", name)]
    for key, place in name_teachers(online_table(config)).items():
        if not Path(place).expanduser().exists():
            continue
        for name in trained:
            layers = adaptable_layers(pipeline.parts[name])
            rows = {layer: shape[0] for layer, shape in layers.items()}
            with contextlib.suppress(UserError):
                file = _find_file(place, name, trained)
                for problem in _misfits(file, pipeline.class_of(name), rows, lora, adapter_ranks(lora, layers)):
                    yield f'{key} = "{place}": {file} {problem}'


def _find_file(place: str, denoiser: str, trained: Sequence[str]) -> Path:
    from cosmos_rl.policy.model.adapter_files import adapter_file, adapter_place

    return adapter_file(adapter_place(place, denoiser, trained))


def _misfits(
    file: Path, class_name: str, rows: Mapping[str, int], lora: LoraConfig, ranks: Mapping[str, int]
) -> Iterator[str]:
    """Values are read only where the shapes do not settle it: what is zero needs no place."""
    from cosmos_rl.policy.model.adapter_files import describe_empty, fit_pairs, read_tensors

    found = read_tensors(_read(file, values=False), class_name, rows, None)
    fits = all(down.shape[0] <= ranks.get(layer, 0) for layer, (down, _) in found.pairs.items())
    if found.unknown or (found.pairs and fits):
        return
    pairs = fit_pairs(read_tensors(_read(file, values=True), class_name, rows, None), ranks)
    if not pairs:
        yield describe_empty(found)
    others = [layer for layer in pairs if layer not in ranks]
    higher = {layer: down.shape[0] for layer, (down, _) in pairs.items() if down.shape[0] > ranks.get(layer, math.inf)}
    if others:
        yield (
            f"adapts {_shorten(others)}, where policy.lora has no adapter to hold a teacher; add them to "
            "policy.lora.target_modules"
        )
    if higher:
        found_ranks, own = sorted({*higher.values()}), sorted({ranks[layer] for layer in higher})
        yield (
            f"has the rank {' or '.join(map(str, found_ranks))} in {_shorten(higher)}, and the adapters of "
            f"policy.lora, which hold a teacher too, {' or '.join(map(str, own))}; set {_advise(higher, lora)}, or "
            "give a teacher of a lower rank"
        )


def _advise(higher: Mapping[str, int], lora: LoraConfig) -> str:
    """The keys that set the ranks of these layers, with the values that they need."""
    needed: dict[str, int] = {}
    for layer, rank in higher.items():
        pattern = find_pattern(layer, lora)
        key = "policy.lora.r" if pattern is None else f"policy.lora.r_pattern.{json.dumps(pattern)}"
        needed[key] = max(rank, needed.get(key, 0))
    return " and ".join(f"{key} = {rank}" for key, rank in sorted(needed.items()))


def _read(file: Path, *, values: bool) -> "dict[str, Tensor]":
    """The tensors of a file; without their values but for single numbers, such as an alpha."""
    import torch

    tensors: dict[str, Tensor] = {}
    with open_weights(file) as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            shape = opened.get_slice(name).get_shape()
            known = values or math.prod(shape) == 1
            tensors[name] = opened.get_tensor(name) if known else torch.empty(shape, device="meta")
    return tensors


def _shorten(layers: Collection[str]) -> str:
    more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
    return f"{min(layers)}{more}"
