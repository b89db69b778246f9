"""Small models of the real classes, with random weights, as folders on disk."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

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


def clip_config(vocabulary: int, eos: int) -> CLIPConfig:
    """Two layers of width 32, pictures of 28 x 28 in patches of 14."""
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
    model = CLIPModel(clip_config(len(tokenizer), tokenizer.eos_token_id)).eval()
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
