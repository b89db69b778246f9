"""LoRA adapters on a diffusers transformer: create, check, warm-start."""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict
from peft.utils.other import get_pattern_key

from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.sharding import copy_full
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import LoraConfig
from cosmos_rl.policy.config.model_rules import adapter_name_problems, target_problems
from cosmos_rl.policy.model.adapter_files import (
    PATH_KEY,
    Convert,
    FileAdapter,
    adapter_file,
    describe_empty,
    fit_pairs,
    read_tensors,
)
from cosmos_rl.storage.weight_files import open_weights, read_table
from cosmos_rl.utils.logging import logger

TRANSFORMER_PREFIX = "transformer."
_ADAPTABLE = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Embedding)
METADATA_KEY = "lora_adapter_metadata"
_SIDECAR = "adapter_config.json"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


def list_linear_names(transformer: torch.nn.Module) -> list[str]:
    """Names of all linear layers, in order."""
    return [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]


def list_layer_names(transformer: torch.nn.Module) -> list[str]:
    """Names of all layers that can have an adapter, in order."""
    return [name for name, module in transformer.named_modules() if isinstance(module, _ADAPTABLE)]


def check_targets(targets: Sequence[str], transformer: torch.nn.Module) -> None:
    """Every target must be the name of a layer or the end of one, and of no other module.

    Raises:
        UserError: lists the others, each with the names that could be meant.
    """
    modules = (name for name, _ in transformer.named_modules())
    problems = target_problems(targets, list_layer_names(transformer), modules)
    if problems:
        raise UserError("\n".join(problems))


def add_adapters(transformer: Any, config: LoraConfig) -> None:
    """Freeze the transformer and add one trainable adapter for each of ``lora_names``; the primary one is active.

    Adapter weights are float32 whatever the dtype of the base, so that small optimiser steps are not rounded away.

    Raises:
        UserError: a target or pattern that matches no module.
    """
    transformer.requires_grad_(False)
    names = [name for name, _ in transformer.named_modules()]
    _check_config(config, names)
    targets = list(config.target_modules)
    if config.target_modules == "all-linear":
        targets = list_linear_names(transformer)
    check_targets(targets, transformer)
    peft_config = {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": targets,
        "init_lora_weights": config.init_lora_weights,
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.r_pattern or {}),
        "alpha_pattern": dict(config.alpha_pattern or {}),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are meant
        for name in config.lora_names:
            transformer.add_adapter(PeftLoraConfig(**peft_config), adapter_name=name)
    for name, param in list(transformer.named_parameters()):
        if ".lora_" in name and param.dtype != torch.float32:
            owner, _, leaf = name.rpartition(".")
            setattr(transformer.get_submodule(owner), leaf, torch.nn.Parameter(param.detach().float()))
    activate(transformer, config.active_adapter)


def base_state(transformer: Any) -> dict[str, torch.Tensor]:
    """Weights and saved buffers of the base under the names that they have without adapters."""
    state = {k: v for k, v in transformer.state_dict().items() if ".lora_" not in k}
    return {k.replace(".base_layer.", "."): v for k, v in state.items()}


def initialise(transformer: Any, config: LoraConfig, seed: int) -> None:
    """Start values of fresh adapters, drawn by (seed, name): the same for any number of ranks.

    As in PEFT: A is Kaiming-uniform (``true``) or normal with standard deviation 1/r (``gaussian``), B is zero; with
    ``false`` B is drawn like A.
    """
    kind = config.init_lora_weights
    for name, param in transformer.named_parameters():
        if ".lora_" not in name:
            continue
        full = torch.zeros(param.shape, dtype=torch.float32)
        generator = randomness.generator(seed, f"lora/{name}")
        if ".lora_A." in name and kind == "gaussian":
            torch.nn.init.normal_(full, std=1.0 / param.shape[0], generator=generator)
        elif ".lora_A." in name or kind is False:
            torch.nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        copy_full(param, full)


def activate(transformer: Any, adapter: str) -> None:
    """Make ``adapter`` the active and the only trainable one."""
    transformer.set_adapter(adapter)
    for name, param in transformer.named_parameters():
        param.requires_grad_(re.search(rf"\.lora_[AB]\.{re.escape(adapter)}\.", name) is not None)


def _check_config(config: LoraConfig, module_names: list[str]) -> None:
    """Adapters have names of their own; exports hold the difference to the base's own weights."""
    problems = adapter_name_problems(config.lora_names, module_names)
    if problems:
        raise UserError("\n".join(problems))
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise UserError(
            f'not supported yet: policy.lora.init_lora_weights = "{config.init_lora_weights}" changes the base '
            'weights, which an exported adapter cannot carry; use true or "gaussian"'
        )


def adapter_state(transformer: Any, adapter: str) -> dict[str, torch.Tensor]:
    """Weights of one adapter under names without the adapter's name (``….lora_A.weight``)."""
    return get_peft_model_state_dict(transformer, adapter_name=adapter)


def scales(transformer: Any, adapter: str) -> dict[str, float]:
    """Adapted layer -> the factor of its ``up @ down``: alpha / r, with rslora alpha / sqrt(r), patterns included."""
    layers = ((name, getattr(module, "scaling", None)) for name, module in transformer.named_modules())
    return {
        name: float(scaling[adapter]) for name, scaling in layers if isinstance(scaling, dict) and adapter in scaling
    }


def fold_weights(transformer: Any, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """`adapter_state` with each layer's factor multiplied into its up matrix, so that the factor left is 1.

    Loaders disagree about where a file says its alpha, and take 1 where they find none.
    """
    factors = scales(transformer, adapter)
    for key, value in adapter_state(transformer, adapter).items():
        if key.endswith(_UP):
            value = value.detach() * factors[key.removesuffix(_UP)]
        yield key, value


def fold_config(peft_config: Any) -> dict[str, Any]:
    """The table of an adapter whose factors are in its up matrices: alpha is the rank of every layer."""
    table = peft_config.to_dict()
    same = {"lora_alpha": table["r"], "alpha_pattern": dict(table["rank_pattern"]), "use_rslora": False}
    return table | same


def warm_start(
    transformer: Any,
    adapter: str,
    path: str,
    key: str = PATH_KEY,
    convert: Convert | None = None,
    *,
    frozen: bool = False,
) -> None:
    """Load an adapter of any known form into ``adapter``; every weight must fit, and it keeps its strength.

    Args:
        key: the setting that names ``path``.
        convert: see ``read_tensors``.
        frozen: what is loaded is not trained, so that it may have a lower rank and fewer layers: zeros for the rest
            change no output.

    Raises:
        UserError: other modules, ranks or scales than the current adapter, or none at all.
    """
    file = adapter_file(path, key)
    with open_weights(file) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        metadata = opened.metadata() or {}
    found = read_tensors(tensors, type(transformer).__name__, layer_rows(transformer), convert)
    if found.of_text:
        logger.warning(
            f"{key}: {file}: {len(found.of_text)} tensors are for the text encoders ({found.of_text[0]}, …), which are "
            "not trained here; they are not used"
        )
    own, factors = adapter_state(transformer, adapter), scales(transformer, adapter)
    ranks = {name.removesuffix(_DOWN): value.shape[0] for name, value in own.items() if name.endswith(_DOWN)}
    pairs = fit_pairs(found, ranks)
    if not pairs and not found.unknown:
        raise UserError(f"{key}: {file} {describe_empty(found)}")
    weights = {layer + _DOWN: down for layer, (down, _) in pairs.items()}
    weights |= {layer + _UP: up for layer, (_, up) in pairs.items()}
    if frozen:
        weights |= {name: _fill_up(weights.get(name), value, int(name.endswith(_UP))) for name, value in own.items()}
    _require_fit(f"{key}: {file}", found, own, weights)
    stored = found.factors
    if not stored:
        table = _read_scales(file, metadata)
        if frozen and table.keys() & {"r", "lora_alpha"}:
            place = f"header ({METADATA_KEY})" if METADATA_KEY in metadata else _SIDECAR
            stored = _read_factors(table, found, f"{key}: {file}: its {place}")
        elif _is_folded(transformer, adapter, table, f"{key}: {file}"):
            stored = dict.fromkeys(factors, 1.0)
    for name, value in own.items():
        weight, layer = weights[name], name.removesuffix(_UP)
        if name.endswith(_UP) and layer in stored and stored[layer] != factors[layer]:
            weight = weight.float() * (stored[layer] / factors[layer])
        copy_full(value, weight)
    logger.info(f"{key}: {file}: an adapter by the names of {found.form} for {len(pairs)} layers, all of them loaded")


def _fill_up(found: torch.Tensor | None, own: torch.Tensor, dim: int) -> torch.Tensor:
    """A matrix of an adapter with zeros up to the rank of ``own``, which is its size in ``dim``; zeros for none."""
    if found is None:
        return torch.zeros(own.shape)
    lacks = own.shape[dim] - found.shape[dim] if found.ndim == own.ndim else 0
    if lacks <= 0:
        return found
    return torch.cat([found, found.new_zeros(*found.shape[:dim], lacks, *found.shape[dim + 1 :])], dim)


def layer_rows(transformer: Any) -> dict[str, int]:
    """Outputs of all layers that can have an adapter, whether or not they have one."""
    layers = ((name, module) for name, module in transformer.named_modules() if isinstance(module, _ADAPTABLE))
    return {name.removesuffix(".base_layer"): module.weight.shape[0] for name, module in layers if ".lora_" not in name}


def _require_fit(
    where: str, found: FileAdapter, own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> None:
    problems = [f"  {name}: no layer of this model, or no part of a LoRA" for name in found.unknown]
    problems += [f"  {name}: not in the adapter" for name in sorted(weights.keys() - own.keys())]
    problems += [f"  {name}: not in the file" for name in sorted(own.keys() - weights.keys())]
    problems += [
        f"  {name}: {tuple(weights[name].shape)} in the file, {tuple(own[name].shape)} in the adapter"
        for name in sorted(own.keys() & weights.keys())
        if weights[name].shape != own[name].shape
    ]
    if not problems:
        return
    more = ""
    if len(problems) > 10:
        more = f"\n  and {len(problems) - 10} more"
    ranks = sorted({down.shape[0] for down, _ in found.pairs.values()})
    targets = sorted({re.sub(r"^\w+\.\d+\.", "", layer) for layer in found.pairs})
    if targets:
        more += (
            f"\n  the file has policy.lora.r = {' or '.join(map(str, ranks))}, target_modules = {json.dumps(targets)}"
        )
    raise UserError(
        f"{where} does not fit policy.lora (r, target_modules, patterns):\n" + "\n".join(problems[:10]) + more
    )


def _read_scales(file: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """Rank, alpha and patterns from the file's header or the ``adapter_config.json`` next to it."""
    if METADATA_KEY in metadata:
        return {k.removeprefix(TRANSFORMER_PREFIX): v for k, v in json.loads(metadata[METADATA_KEY]).items()}
    sidecar = file.parent / _SIDECAR
    if not sidecar.is_file():
        return {}
    return read_table(sidecar)


def _read_factors(table: Mapping[str, Any], found: FileAdapter, where: str) -> dict[str, float]:
    """Layer of a file -> alpha over rank by its table, with PEFT's rule for patterns; the rank is that of the matrix
    where the table has none.

    Args:
        where: the setting, the file and the table, for messages.

    Raises:
        UserError: a rank or an alpha that is no positive number, or no alpha.
    """
    factors: dict[str, float] = {}
    for layer, (down, _) in found.pairs.items():
        rank = _read_positive(table, "r", "rank_pattern", layer, down.shape[0], where)
        alpha = _read_positive(table, "lora_alpha", "alpha_pattern", layer, None, where)
        factors[layer] = alpha / math.sqrt(rank) if table.get("use_rslora") else alpha / rank
    return factors


def _read_positive(
    table: Mapping[str, Any], name: str, pattern: str, layer: str, default: float | None, where: str
) -> float:
    own = table.get(pattern) or {}
    if not isinstance(own, dict):
        raise UserError(f"{where} has {pattern} = {json.dumps(own)}, which is no table; correct it there")
    value, key = table.get(name, default), get_pattern_key(list(own), layer)
    if key in own:
        value, name = own[key], f"{pattern}.{json.dumps(key)}"
    elif name not in table and default is None:
        raise UserError(f"{where} has no {name}, so that the strength of the adapter is not known; add it there")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{where} has {name} = {json.dumps(value)}, which is no positive number; correct it there")
    return value


def _is_folded(transformer: Any, adapter: str, stored: dict[str, Any], where: str) -> bool:
    """Whether the factor alpha / r is in the up matrices of a file; otherwise it must be the adapter's.

    Args:
        where: the setting and the file, for messages.

    Raises:
        UserError: the file says another factor than the adapter's, and not 1.
    """
    if not stored:
        logger.warning(f"{where} does not say its alpha; it acts with the factor 1, as in diffusers")
        return True
    own = transformer.peft_config[adapter]
    patterns = [stored.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not stored.get("use_rslora") and stored.get("lora_alpha") == stored.get("r") and patterns[0] == patterns[1]:
        return True  # the factor is 1: as exported, or trained with alpha = r
    for name in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        if name in stored and (stored[name] or None) != (getattr(own, name) or None):
            raise UserError(
                f"{where} was trained with {name} = {stored[name]!r}, policy.lora says "
                f"{getattr(own, name)!r}; the adapter would have a different strength"
            )
    return False
