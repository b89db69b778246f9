"""LoRA adapters on a diffusers transformer: create, check, warm-start."""

import difflib
import json
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model_state_dict
from safetensors import safe_open

from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.sharding import copy_full
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import LoraConfig

TRANSFORMER_PREFIX = "transformer."
METADATA_KEY = "lora_adapter_metadata"


def linear_names(transformer: torch.nn.Module) -> list[str]:
    """Names of all linear layers, in order."""
    return [name for name, module in transformer.named_modules() if isinstance(module, torch.nn.Linear)]


def check_targets(targets: Sequence[str], names: Iterable[str]) -> None:
    """Every target must be the name of a module or the end of one.

    Raises:
        UserError: lists the targets that match nothing, each with the nearest ending that exists.
    """
    names = list(names)
    endings = {".".join(parts[-n:]) for parts in (name.split(".") for name in names) for n in (1, 2, 3)}
    unmatched = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unmatched:
        lines = []
        for target in unmatched:
            near = difflib.get_close_matches(target, endings, n=1)
            lines.append(f"  {target!r} matches no module" + (f"; did you mean {near[0]!r}?" if near else ""))
        raise UserError("policy.lora.target_modules:\n" + "\n".join(lines))


def add_adapters(transformer: Any, config: LoraConfig) -> None:
    """Freeze the transformer and add one trainable adapter for each of ``lora_names``; the primary one is active.

    Adapter weights are float32 whatever the dtype of the base, so that small optimiser steps are not rounded away.

    Raises:
        UserError: a target or pattern that matches no module.
    """
    transformer.requires_grad_(False)
    names = [name for name, _ in transformer.named_modules()]
    _check_config(config, names)
    targets = linear_names(transformer) if config.target_modules == "all-linear" else list(config.target_modules)
    check_targets(targets, names)
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
    """PEFT tells adapters apart by their name between dots; exports hold the difference to the base's own weights."""
    parts = {part for name in module_names for part in name.split(".")}
    taken = [name for name in config.lora_names if name in parts or not name.isidentifier()]
    if taken:
        raise UserError(
            f"policy.lora.lora_names: {', '.join(map(repr, taken))} cannot name an adapter: names are identifiers that "
            "no part of the transformer has"
        )
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise UserError(
            f'not runnable yet: policy.lora.init_lora_weights = "{config.init_lora_weights}" changes the base weights, '
            'which an exported adapter cannot carry; use true or "gaussian"'
        )


def adapter_state(transformer: Any, adapter: str) -> dict[str, torch.Tensor]:
    """Weights of one adapter under names without the adapter's name (``….lora_A.weight``)."""
    return get_peft_model_state_dict(transformer, adapter_name=adapter)


def adapter_file(path: str) -> Path:
    """The safetensors file of an exported adapter: the file itself, or the one in a folder.

    Raises:
        UserError: nothing there.
    """
    place = Path(path).expanduser()
    tries = (
        [place]
        if place.suffix == ".safetensors"
        else [
            place / name
            for name in ("model.safetensors", "pytorch_lora_weights.safetensors", "adapter_model.safetensors")
        ]
    )
    for candidate in tries:
        if candidate.is_file():
            return candidate
    raise UserError(f"policy.lora.lora_path = {path!r}: no adapter there; looked for {', '.join(map(str, tries))}")


def warm_start(transformer: Any, adapter: str, path: str) -> None:
    """Load an exported adapter (diffusers or PEFT key style) into ``adapter``; every weight must fit.

    Raises:
        UserError: other modules, ranks or scales than the adapter at hand.
    """
    file = adapter_file(path)
    with safe_open(file, framework="pt") as opened:
        weights = {_plain_key(key): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
        metadata = opened.metadata() or {}
    _check_scales(transformer, adapter, _stored_scales(file, metadata), file)
    own = adapter_state(transformer, adapter)
    problems = [f"  {key}: not in the adapter" for key in sorted(weights.keys() - own.keys())]
    problems += [f"  {key}: not in the file" for key in sorted(own.keys() - weights.keys())]
    problems += [
        f"  {key}: {tuple(weights[key].shape)} in the file, {tuple(own[key].shape)} in the adapter"
        for key in sorted(own.keys() & weights.keys())
        if weights[key].shape != own[key].shape
    ]
    if problems:
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise UserError(
            f"policy.lora.lora_path: {file} does not fit policy.lora (r, target_modules, patterns):\n"
            + "\n".join(problems[:10])
            + more
        )
    for key, value in own.items():
        copy_full(value, weights[key])


def _plain_key(key: str) -> str:
    return key.removeprefix("base_model.model.").removeprefix(TRANSFORMER_PREFIX)


def _stored_scales(file: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """Rank, alpha and patterns as the file's header or the ``adapter_config.json`` beside it tells them."""
    if METADATA_KEY in metadata:
        return {k.removeprefix(TRANSFORMER_PREFIX): v for k, v in json.loads(metadata[METADATA_KEY]).items()}
    beside = file.parent / "adapter_config.json"
    return json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}


def _check_scales(transformer: Any, adapter: str, stored: dict[str, Any], file: Path) -> None:
    """The scale alpha / r is not in the weights: when the file says it, it must be the adapter's."""
    own = transformer.peft_config[adapter]
    for name in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
        if name in stored and (stored[name] or None) != (getattr(own, name) or None):
            raise UserError(
                f"policy.lora.lora_path: {file} was trained with {name} = {stored[name]!r}, policy.lora says "
                f"{getattr(own, name)!r}; the adapter would act with another strength"
            )
