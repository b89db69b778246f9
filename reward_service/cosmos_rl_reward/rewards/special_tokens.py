"""Qwen2-VL with a small head that is read at special tokens of the question: HPSv3 and VideoReward are built so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.rewards.samples import SampleError
from cosmos_rl_reward.rewards.weights import build_head, load_model, rename, select_prefix

# of a checkpoint written by transformers 5 or by an earlier version -> those of the backbone in transformers 5
_CURRENT_NAMES = (
    (r"^model\.(?!visual\.|language_model\.)", "language_model."),
    (r"^model\.(?=visual\.|language_model\.)", ""),
)


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


class SpecialTokenModel:
    """Processor, backbone and head.

    Attributes:
        processor: of the base model, with the special tokens.
    """

    def __init__(
        self, base: Path, state: dict[str, Any], tokens: list[str], dtype: Any, device: str, source: Path
    ) -> None:
        """Build the model from plain weights.

        Args:
            base: folder with configuration and processor; the vocabulary is what the weights have.
            state: weights, named as in Qwen2-VL checkpoints; names of the head begin with ``rm_head``.
            tokens: the special tokens.
            dtype: of the backbone; the head stays in float32.
            source: named in errors.

        Raises:
            NotReady: weights are missing or of another model.
        """
        import torch
        from transformers import AutoConfig, AutoProcessor, Qwen2VLModel

        rest = {name: value for name, value in state.items() if not name.startswith(("rm_head.", "lm_head."))}
        backbone, head = rename(rest, _CURRENT_NAMES), select_prefix(state, "rm_head.")
        words = "language_model.embed_tokens.weight"
        if words not in backbone or not head:
            raise NotReady(f"weights {source}: no Qwen2-VL with a head rm_head")
        self.processor: Any = AutoProcessor.from_pretrained(str(base))
        self._tokens = add_tokens(self.processor.tokenizer, tokens)
        config = AutoConfig.from_pretrained(str(base))
        config.text_config.vocab_size = backbone[words].shape[0]
        if max(self._tokens) >= config.text_config.vocab_size:
            raise NotReady(
                "the weights have no row for the special tokens; weights and tokenizer do not belong together"
            )
        self._backbone = load_model(Qwen2VLModel, config, backbone, dtype, source).to(device)
        # what else the training had in the head is idle in scoring
        self._head = build_head(head, source, torch.nn.ReLU()).to(device)

    def ask(self, texts: list[str], kind: str, media: list[Any]) -> Any:
        """``__call__`` for one question about each image (``kind`` = ``image``) or video.

        ``media`` have the size that the model takes.
        """
        questions = []
        for text in texts:
            content = [{"type": kind}, {"type": "text", "text": text}]
            messages = [{"role": "user", "content": content}]
            questions.append(self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        keywords: dict[str, Any] = {f"{kind}s": media, "do_resize": False, "padding": True, "return_tensors": "pt"}
        if kind == "video":
            keywords["do_sample_frames"] = False
        return self(self.processor(text=questions, **keywords))

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
