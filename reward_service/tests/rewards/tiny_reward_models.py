"""Small models of the real classes, with random weights, as folders on disk."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

WORDS = ["a photo of a red cat and two dogs on the moon", "blue sky green tree large small sign"] * 4


def save_tokenizer(folder: Path, **special: str) -> PreTrainedTokenizerFast:
    """A small byte-pair tokenizer, trained on a few words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = ["<pad>", "<unk>", "<bos>", "<eos>", *special.values()]
    tokenizer.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=120, special_tokens=list(dict.fromkeys(tokens)))
    )
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<bos>", "<eos>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", **special},
    )
    fast.save_pretrained(folder)
    return fast


def find_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The number of one token."""
    number = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(number, int)
    return number


def clip_config(vocabulary: int, eos: int) -> CLIPConfig:
    """Two layers of width 32, images of 28 x 28 in patches of 14."""
    common = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "projection_dim": 24}
    return CLIPConfig(
        projection_dim=24,
        vision_config={**common, "hidden_size": 32, "image_size": 28, "patch_size": 14, "hidden_act": "gelu"},
        text_config={
            **common,
            "hidden_size": 32,
            "vocab_size": vocabulary,
            "max_position_embeddings": 16,
            "eos_token_id": eos,
            "bos_token_id": None,
            "pad_token_id": None,
            "hidden_act": "gelu",
        },
    )


def save_clip(folder: Path, seed: int = 0) -> CLIPModel:
    """A CLIP model with its tokenizer; weights are large enough that scores differ."""
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(seed)
    model = CLIPModel(clip_config(len(tokenizer), find_id(tokenizer, "<eos>"))).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


def randomise(model: torch.nn.Module, scale: float = 0.2) -> None:
    """Weights that make outputs depend on inputs (the library's start values nearly do not)."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 0:
            noise = torch.randn_like(parameter) * scale
            is_norm = "norm" in name or "ln_" in name
            parameter.data.copy_(noise + 1 if is_norm and name.endswith("weight") else noise)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


CHAT = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}<|vision_start|><|{{ c['type'] }}_pad|>\
<|vision_end|>{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = (
    "<pad>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MEAN, STD = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])


def _qwen_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        [*WORDS, "Yes No are there rating"], trainers.BpeTrainer(vocab_size=150, special_tokens=list(SPECIAL))
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL[2:]),
    )


def save_qwen(folder: Path, version: str = "2", extra_rows: int = 8) -> torch.nn.Module:
    """A Qwen2-VL ("2") or Qwen2.5-VL ("2.5") with its processor; ``extra_rows`` unused rows for special tokens."""
    tokenizer = _qwen_tokenizer()
    ids: dict[str, Any] = {
        "vision_start_token_id": find_id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": find_id(tokenizer, "<|vision_end|>"),
        "image_token_id": find_id(tokenizer, "<|image_pad|>"),
        "video_token_id": find_id(tokenizer, "<|video_pad|>"),
    }
    text = {
        "vocab_size": len(tokenizer) + extra_rows,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    torch.manual_seed(0)
    if version == "2":
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
        config = Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
        model = Qwen2VLForConditionalGeneration(config)
    else:
        vision |= {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "fullatt_block_indexes": [1]}
        vision |= {"window_size": 56, "tokens_per_second": 2}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        model = Qwen2_5_VLForConditionalGeneration(config)
    randomise(model.eval(), 0.15)
    model.save_pretrained(folder)
    parts = {
        "image_processor": Qwen2VLImageProcessor(),
        "video_processor": Qwen2VLVideoProcessor(),
        "tokenizer": tokenizer,
    }
    (Qwen2VLProcessor if version == "2" else Qwen2_5_VLProcessor)(**parts, chat_template=CHAT).save_pretrained(folder)
    return model


def patches(frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels ``[T, 3, H, W]`` 0..255 as Qwen2-VL's patches, written down from its layout, and their grid."""
    frames = (frames / 255 - MEAN[:, None, None]) / STD[:, None, None]
    time, _, height, width = frames.shape
    grid = (time // 2, height // 14, width // 14)
    rows = []
    for t in range(grid[0]):
        for block_y in range(0, grid[1], 2):
            for block_x in range(0, grid[2], 2):
                for y in (block_y, block_y + 1):
                    for x in (block_x, block_x + 1):
                        cube = frames[2 * t : 2 * t + 2, :, 14 * y : 14 * y + 14, 14 * x : 14 * x + 14]
                        rows.append(cube.transpose(0, 1).flatten())
    return torch.stack(rows), torch.tensor([grid])
