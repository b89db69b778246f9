"""Qwen2-VL with a small head that is read at special tokens of the question: HPSv3 and VideoReward are built so."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.rewards.samples import SampleError


def read_constants(path: Path, *names: str) -> list[str]:
    """Text constants of a Python file, without running it; an f-string keeps its names as ``{name}``.

    Raises:
        NotReady: the file is missing, or has no such constant.
    """
    if not path.is_file():
        raise NotReady(f"no file {path}")
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and (text := _text(node.value)) is not None:
            found.update({target.id: text for target in node.targets if isinstance(target, ast.Name)})
    for name in names:
        if name not in found:
            raise NotReady(f"{path} has no text constant {name}; it is of another version")
    return [found[name] for name in names]


def _text(node: ast.expr) -> str | None:
    """The text that an expression is; None when it is something else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.FormattedValue):
        return f"{{{node.value.id}}}" if isinstance(node.value, ast.Name) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = [_text(part) for part in node.values]
    return None if None in parts else "".join(part for part in parts if part is not None)


def merge_lora(state: dict[str, Any], scale: float) -> dict[str, Any]:
    """A checkpoint trained with LoRA as plain weights: ``W + scale * B A`` under the base model's names."""
    plain: dict[str, Any] = {}
    lora: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        name = name.replace(".modules_to_save.default.", ".")
        if ".original_module." in name:
            continue
        part = re.fullmatch(r"(.*)\.lora_([AB])(?:\.default)?\.weight", name)
        if part:
            lora.setdefault(f"{part[1]}.weight", {})[part[2]] = value
        else:
            plain[name] = value
    for name, pair in lora.items():
        if name not in plain or set(pair) != {"A", "B"}:
            raise NotReady(f"adapter weights for {name} do not fit the base model")
        base = plain[name]
        plain[name] = (base.float() + scale * (pair["B"].float() @ pair["A"].float())).to(base.dtype)
    return plain


def build(config: Any, state: dict[str, Any], head: str, dtype: Any, source: Path) -> tuple[Any, Any]:
    """Backbone and head from plain weights (names as in Qwen2-VL checkpoints).

    Args:
        config: the backbone's configuration; its vocabulary is set to what the weights have.
        state: all weights.
        head: prefix of the head's entries.
        dtype: of the backbone; the head stays in float32.
        source: named in errors.

    Raises:
        NotReady: weights are missing or of another model.
    """
    from transformers import Qwen2VLModel

    backbone: dict[str, Any] = {}
    top: dict[str, Any] = {}
    for name, value in state.items():
        if name.startswith(f"{head}."):
            top[name[len(head) + 1 :]] = value
        elif not name.startswith("lm_head."):
            backbone[_current_name(name)] = value
    words = "language_model.embed_tokens.weight"
    if words not in backbone or not top:
        raise NotReady(f"weights {source}: no Qwen2-VL with a head {head!r}")
    config.text_config.vocab_size = backbone[words].shape[0]
    load: Any = Qwen2VLModel.from_pretrained
    model, info = load(None, config=config, state_dict=backbone, dtype=dtype, output_loading_info=True)
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if wrong:
        raise NotReady(f"weights {source}: {len(wrong)} entries do not fit the base model, such as {sorted(wrong)[0]}")
    return model.eval(), _head(top, source)


def _current_name(name: str) -> str:
    """The entry's name in transformers 5, of a checkpoint written by it or by an earlier version."""
    if re.match(r"model\.(visual|language_model)\.", name):
        return name[len("model.") :]
    return re.sub(r"^model\.", "language_model.", name)


def _head(state: dict[str, Any], source: Path) -> Any:
    """One linear layer, or several with ReLU between them (what else the training had there is idle in scoring)."""
    import torch

    depths = sorted({int(name.partition(".")[0]) for name in state if name[0].isdigit()})
    layers: list[Any] = []
    for prefix in [f"{depth}." for depth in depths] or [""]:
        weight, bias = state.get(f"{prefix}weight"), state.get(f"{prefix}bias")
        if weight is None:
            raise NotReady(f"weights {source}: the head has no {prefix}weight")
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.weight.data = weight.float()
        if bias is not None:
            linear.bias.data = bias.float()
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).eval()


class SpecialTokenModel:
    """Backbone and head on one device."""

    def __init__(self, backbone: Any, head: Any, tokens: list[int], device: str) -> None:
        if max(tokens) >= backbone.config.text_config.vocab_size:
            raise NotReady(
                "the weights have no row for the special tokens; weights and tokenizer do not belong together"
            )
        self._backbone, self._head, self._tokens = backbone.to(device), head.to(device), tokens

    def __call__(self, inputs: Any) -> Any:
        """Head outputs at each special token.

        Args:
            inputs: what the processor returned for B samples.

        Returns:
            float32 ``[B, tokens, outputs]``.

        Raises:
            SampleError: a question does not have each token exactly once (a prompt may contain one).
        """
        import torch

        inputs = inputs.to(self._backbone.device)
        places = []
        for ids in inputs["input_ids"]:
            found = [torch.nonzero(ids == token).flatten() for token in self._tokens]
            if any(len(place) != 1 for place in found):
                raise SampleError("the prompt contains one of the model's own special tokens")
            places.append(torch.cat(found))
        for name in ("pixel_values", "pixel_values_videos"):
            if name in inputs:
                inputs[name] = inputs[name].to(self._backbone.dtype)
        # These models were trained with plain running positions, not with Qwen2-VL's own in time, height and width:
        # their training code went around the step that makes those.
        batch, length = inputs["input_ids"].shape
        positions = torch.arange(length, device=inputs["input_ids"].device).expand(3, batch, length)
        with torch.inference_mode():
            hidden = self._backbone(**inputs, position_ids=positions, use_cache=False).last_hidden_state
            rows = torch.stack([h[place] for h, place in zip(hidden, places, strict=True)])
            return self._head(rows.float())


def add_tokens(tokenizer: Any, tokens: list[str]) -> list[int]:
    """Append special tokens to a tokenizer; their ids."""
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.padding_side = "right"
    return tokenizer.convert_tokens_to_ids(tokens)
