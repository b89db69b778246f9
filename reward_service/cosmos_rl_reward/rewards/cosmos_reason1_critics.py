"""The model that Cosmos-Reason1 asks: one in this process, or one behind an OpenAI-compatible server.

A critic has ``yes_and_no(frames, fps, system, question)``: two numbers, of Yes and of No as the next token, whose
difference is that of the logits; and ``answers(calls)``: runs such calls its own way, one result for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards.chat_endpoint import JPEG_QUALITY, ChatEndpoint, EndpointError, video_part
from cosmos_rl_reward.rewards.samples import SampleError
from cosmos_rl_reward.rewards.video_frames import FACTOR

Pair = tuple[float, float]
_TOP = 20  # what OpenAI's protocol and vLLM's default allow
_TOLERANCE = 1e-3


def no_probability(yes: float, no: float) -> float:
    """The softmax over two, of No: the logistic function of the difference."""
    return float(1 / (1 + np.exp(np.clip(yes - no, -700, 700))))


class LocalCritic:
    """A Qwen2.5-VL model loaded with transformers; answers are logits."""

    def __init__(self, folder: Path, device: str, dtype: Any) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        model: Any = AutoModelForImageTextToText.from_pretrained(str(folder), dtype=dtype)
        self._model = model.to(device).eval()
        self._processor: Any = AutoProcessor.from_pretrained(str(folder))
        encode = self._processor.tokenizer.encode
        self._yes, self._no = (encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))
        self._digest = digest(sorted(folder.glob("*.safetensors")))

    def yes_and_no(self, frames: Any, fps: float, system: str, question: str) -> Pair:
        """Next-token logits after the question about frames, a tensor ``[T, 3, H, W]``, 0..255."""
        import torch

        messages = [
            {"role": "system", "content": [{"type": "text", "text": system}]},
            {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]},
        ]
        text = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = self._processor(
            text=[text],
            videos=[frames],
            video_metadata=[{"total_num_frames": len(frames), "fps": fps}],
            do_resize=False,
            do_sample_frames=False,
            return_tensors="pt",
        ).to(self._model.device)
        inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(self._model.dtype)
        with torch.inference_mode():
            logits = self._model(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        return float(logits[self._yes]), float(logits[self._no])

    def answers(self, calls: list[Callable[[], Pair]]) -> list[Callable[[], Pair]]:
        """The calls themselves: one runs when its result is wanted."""
        return calls

    def describe(self) -> dict[str, Any]:
        """What its numbers depend on."""
        return {"model_digest": self._digest}


class EndpointCritic:
    """A model behind an OpenAI-compatible server; answers are log-probabilities."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint

    def yes_and_no(self, frames: Any, fps: float, system: str, question: str) -> Pair:
        """Log-probabilities of the first token of the answer; ``frames`` as for ``LocalCritic``.

        Raises:
            EndpointError: no answer, or one without log-probabilities.
            SampleError: see ``read_top_logprobs``; or the server did not give the model the whole video.
        """
        pixels = frames.byte().permute(0, 2, 3, 1).numpy()
        messages = [
            {"role": "system", "content": [{"type": "text", "text": system}]},
            {"role": "user", "content": [video_part(pixels), {"type": "text", "text": question}]},
        ]
        completion = self._endpoint.complete(
            messages,
            max_tokens=1,
            temperature=0,
            logprobs=True,
            top_logprobs=_TOP,
            # vLLM's own: the frames are chosen and sized here, and it would guess their rate and keep 32 of them
            mm_processor_kwargs={"fps": fps, "do_resize": False, "do_sample_frames": False},
            media_io_kwargs={"video": {"num_frames": len(pixels), "fps": fps}},
        )
        _check_whole(completion, pixels.shape, len(f"{system} {question}".split()))
        try:
            top = completion["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            listed = [(str(entry["token"]), float(entry["logprob"])) for entry in top]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            address = self._endpoint.address
            raise EndpointError(f"{address}: the answer has no choices[0].logprobs.content[0].top_logprobs") from error
        return read_top_logprobs(listed)

    def answers(self, calls: list[Callable[[], Pair]]) -> list[Callable[[], Pair]]:
        """Results of the calls, which run as many at a time as the options allow."""
        return [future.result for future in self._endpoint.run_concurrently(calls)]

    def describe(self) -> dict[str, Any]:
        """What its numbers depend on; the model's name is among the options."""
        return {"endpoint": self._endpoint.address, "frames": f"JPEG, quality {JPEG_QUALITY}"}


def read_top_logprobs(listed: list[tuple[str, float]]) -> Pair:
    """Log-probabilities of exactly "Yes" and "No" from a list of the likeliest tokens.

    A token that is not listed is at most as likely as the last one. When that bound fixes the share of No to 1e-3, it
    stands for the token.

    Raises:
        SampleError: it does not, or neither token is listed, or a number is not finite.
    """
    if not all(math.isfinite(value) for _, value in listed):
        raise SampleError("the server's log-probabilities are not finite")
    found: dict[str, float] = {}
    for token, value in listed:  # should two tokens read the same, the likelier counts
        found[token] = max(value, found.get(token, -math.inf))
    yes, no = found.get("Yes"), found.get("No")
    if yes is None and no is None:
        likeliest = ", ".join(repr(token) for token, _ in listed[:5])
        raise SampleError(f"neither Yes nor No is among the {len(listed)} likeliest tokens: {likeliest}, …")
    bound = min(found.values())
    pair = (bound if yes is None else yes, bound if no is None else no)
    if (yes is None or no is None) and (slack := no_probability(max(pair), min(pair))) >= _TOLERANCE:
        absent = "Yes" if yes is None else "No"
        raise SampleError(
            f"{absent} is not among the {len(listed)} likeliest tokens, and its share may be anything up to {slack:.3g}"
        )
    return pair


def _check_whole(completion: dict[str, Any], shape: tuple[int, ...], words: int) -> None:
    """Compare the server's count of prompt tokens with the fewest that frames ``[T, H, W, 3]`` and words make.

    Servers may drop frames (vLLM keeps 32 by default) or shrink them without an error.

    Raises:
        SampleError: the count is lower. A server that counts nothing cannot be checked.
    """
    usage = completion.get("usage")
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    least = shape[0] // 2 * (shape[1] // FACTOR) * (shape[2] // FACTOR) + words
    if isinstance(counted, int) and counted < least:
        raise SampleError(
            f"the server read {counted} tokens where {shape[0]} frames of {shape[2]} x {shape[1]} and the text make at "
            f"least {least}: it dropped or shrank frames, or its model is no Qwen2.5-VL. Start vLLM with "
            '--media-io-kwargs \'{"video": {"num_frames": -1}}\''
        )
