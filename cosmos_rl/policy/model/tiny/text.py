"""Tokenizers made from a fixed list of captions, and random text encoders over them.

The encoders are never trained: random ones already give different prompts clearly different features, which is all
that a transformer trained from random weights needs.
"""

import itertools
import json
import math
from collections import Counter

from tokenizers import pre_tokenizers, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

CLIP_SPECIALS = ["<|startoftext|>", "<|endoftext|>"]
CLIP_WIDTH = 32
T5_WIDTH = 64  # SD3 pads the two CLIP features, laid side by side, to the T5 width

_DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_COLOURS = ["red", "green", "blue", "yellow", "orange", "purple", "pink", "white", "black", "grey", "brown"]
_SHAPES = ["circle", "square", "triangle", "cross", "ring", "star", "line", "cat", "dog", "tree", "house", "car"]
_SIZES = ["small", "big"]
_MOTIONS = ["left", "right", "up", "down"]


def captions() -> list[str]:
    """Returns the fixed captions that the vocabularies are made from."""
    digits = [f"a photo of the digit {d}" for d in _DIGITS]
    tinted = [f"a photo of the {c} digit {d}" for c, d in itertools.product(_COLOURS, _DIGITS)]
    shapes = [f"a {s} {c} {x} on a white background" for s, c, x in itertools.product(_SIZES, _COLOURS, _SHAPES)]
    videos = [f"a video of a {c} {x} moving {m}" for c, x, m in itertools.product(_COLOURS, _SHAPES, _MOTIONS)]
    return digits + tinted + shapes + videos + ["an image with two objects and the text hello world"]


def clip_tokenizer(max_length: int) -> CLIPTokenizer:
    """Returns a byte-level BPE tokenizer; prompts are padded to `max_length` tokens."""
    backend = CLIPTokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=CLIP_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    backend.train_from_iterator(captions(), trainer)
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    # The trainer numbers the tokens differently in every process, so the vocabulary is numbered again. It also gets
    # each byte as the end of a word: otherwise a rare last character reads as <|endoftext|> and cuts the prompt.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = CLIP_SPECIALS + alphabet + [f"{byte}</w>" for byte in alphabet] + [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=max_length)  # pyright: ignore[reportArgumentType]


def t5_tokenizer() -> T5Tokenizer:
    """Returns a Unigram tokenizer with one piece per caption word and one per printable ASCII character."""
    counts = Counter(" ".join(captions()).split())
    total = sum(counts.values())
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -8.0)]
    pieces += [(f"▁{word}", math.log(count / total)) for word, count in sorted(counts.items())]
    # "▁a" is a word above; a character costs more than any word, so that known words stay whole.
    pieces += [(chr(code), -10.0) for code in range(ord("!"), ord("~") + 1)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Returns a random 2-layer CLIP text encoder, width and projection 32, for prompts of up to 77 tokens."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=4 * CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=CLIP_WIDTH,
        max_position_embeddings=77,
        hidden_act="gelu",
        bos_token_id=0,
        eos_token_id=1,  # where the pooled feature is read
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config).eval()


def t5_encoder(tokenizer: T5Tokenizer) -> T5EncoderModel:
    """Returns a random 2-layer T5 encoder of width 64."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=T5_WIDTH,
        d_kv=8,
        d_ff=T5_WIDTH,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5EncoderModel(config).eval()  # dropout would be on otherwise
