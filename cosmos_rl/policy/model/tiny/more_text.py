"""Tokenizers that spell (one token per character or byte) and random encoders, for the families other than SD3."""

# pyright: reportArgumentType=false
# diffusers' hints name one scheduler, one tokenizer and tuples of one length where several are meant

from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, pre_tokenizers, processors
from transformers import (
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaModel,
    LlamaTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    UMT5Config,
    UMT5EncoderModel,
)

WIDTH = 32
"""Of every encoder here."""

LLAVA_SIDE = 48
"""Pixels of the images that the tiny Llava sees, in patches of 2."""
_LLAMA3_SPECIALS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_HUNYUAN_OTHERS = 12
"""Tokens of its template before the prompt, with the start of the text, that are not of the description."""
_SPELT = ["▁", *(chr(code) for code in range(ord("!"), ord("~") + 1))]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_QWEN_SPECIALS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _number_tokens(*parts: list[str]) -> dict[str, int]:
    tokens = [token for part in parts for token in part]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def _prepend_token(tokenizer: Any, token: str) -> Any:
    """Puts a token before every text, as the published tokenizers do: then no text is without any."""
    known = [(token, tokenizer.convert_tokens_to_ids(token))]
    start = processors.TemplateProcessing(single=f"{token} $A", special_tokens=known)
    tokenizer.backend_tokenizer.post_processor = start
    return tokenizer


def gemma_tokenizer() -> GemmaTokenizer:
    """One token per printable ASCII character, one per byte of any other."""
    vocab = _number_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], _BYTES, _SPELT)
    return _prepend_token(GemmaTokenizer(vocab=vocab, merges=[], model_max_length=1024), "<bos>")


def llama_tokenizer() -> LlamaTokenizer:
    """Like the Gemma one, with Llama's special tokens."""
    vocab = _number_tokens(["<unk>", "<s>", "</s>", "<pad>"], _BYTES, _SPELT)
    return _prepend_token(LlamaTokenizer(vocab=vocab, merges=[], pad_token="<pad>", model_max_length=1024), "<s>")


def qwen_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, Qwen's special tokens and a chat template."""
    vocab = _number_tokens(["<|endoftext|>"], sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], extra_special_tokens=_QWEN_SPECIALS, model_max_length=2048, chat_template=_CHAT
    )
    return tokenizer


def gemma_encoder(tokenizer: GemmaTokenizer) -> Gemma2Model:
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return Gemma2Model(config).eval()


def umt5_encoder(tokenizer: Any) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer))).eval()


def t5_encoder(tokenizer: Any):
    from transformers import T5EncoderModel

    return T5EncoderModel(T5Config(**_t5_sizes(tokenizer))).eval()


def _t5_sizes(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def llama_encoder(tokenizer: LlamaTokenizer) -> LlamaModel:
    return LlamaModel(_llama_sizes(tokenizer)).eval()


def _llama_sizes(tokenizer: LlamaTokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=1,
        eos_token_id=2,
    )


def glm_encoder(tokenizer: Any) -> GlmModel:
    config = GlmConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        eos_token_id=0,
    )
    return GlmModel(config).eval()


def llava_tokenizer() -> LlamaTokenizer:
    """The Llama one with the specials of Llama 3, and whole tokens for the text that HunyuanVideo puts around prompts.

    That text has as many tokens as in the published model, whose pipeline cuts them away by their number.
    """
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import DEFAULT_PROMPT_TEMPLATE

    tokenizer = llama_tokenizer()
    after = DEFAULT_PROMPT_TEMPLATE["template"].partition("<image>")[2]
    description = after[: after.index("<|eot_id|>")]
    chunks = DEFAULT_PROMPT_TEMPLATE["crop_start"] - _HUNYUAN_OTHERS
    ends = [len(description) * k // chunks for k in range(chunks + 1)]
    words = [description[first:last] for first, last in pairwise(ends)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*_LLAMA3_SPECIALS, "<image>"]})
    whole = [*dict.fromkeys(words), "system", "user", "assistant", "\n\n"]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in whole])
    return tokenizer


def llava_encoder(tokenizer: LlamaTokenizer) -> LlavaForConditionalGeneration:
    """Llama that sees an image as 24 x 24 tokens."""
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
        image_size=LLAVA_SIDE,
        patch_size=2,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=_llama_sizes(tokenizer),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    config.pad_token_id = tokenizer.pad_token_id
    return LlavaForConditionalGeneration(config).eval()


def _qwen3_sizes(tokenizer: Qwen2Tokenizer, layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=0,
    )


def qwen3_encoder(tokenizer: Qwen2Tokenizer) -> Qwen3Model:
    return Qwen3Model(_qwen3_sizes(tokenizer, 2)).eval()


def deep_qwen3_encoder(tokenizer: Qwen2Tokenizer) -> Qwen3ForCausalLM:
    """With as many layers as FLUX.2-klein reads features from by default (9, 18 and 27)."""
    return Qwen3ForCausalLM(_qwen3_sizes(tokenizer, 28)).eval()


def qwen_vl_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        "pad_token_id": 0,
        "eos_token_id": 0,
    }
    vision = {
        "depth": 1,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()
