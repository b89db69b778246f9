"""Client of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...)."""

from __future__ import annotations

import base64
import io
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import numpy as np
from PIL import Image

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady

JPEG_QUALITY = 95
ENDPOINT_OPTIONS: dict[str, Any] = {"timeout_s": 60.0, "retries": 3, "concurrency": 8}
"""Options, with their defaults, of every reward that asks such a server; ``model`` is another."""

_AGAIN = {408, 425, 429, 500, 502, 503, 504}
Answer = TypeVar("Answer")


class EndpointError(Exception):
    """The server cannot be reached, or refused a request; never contains the key or a password in the URL."""


class ChatEndpoint:
    """Chat completions with bounded concurrency, time-outs and a few retries.

    Attributes:
        address: the server's URL without user, password and query, for messages and records.
    """

    def __init__(self, reward: BaseRewardHandler) -> None:
        """The server that a reward's configuration names (``model`` and ``ENDPOINT_OPTIONS`` are among its options).

        Raises:
            NotReady: see ``check``.
        """
        options = reward.options
        self._base = reward.endpoint_url.rstrip("/").removesuffix("/chat/completions")
        self.address = re.sub(r"//[^/]*@", "//", self._base).partition("?")[0]
        self._model, self._retries = options["model"], int(options["retries"])
        headers, concurrency = {}, int(options["concurrency"])
        if reward.endpoint_api_key:
            headers = {"Authorization": f"Bearer {reward.endpoint_api_key}"}
        limits = httpx.Limits(max_connections=concurrency)
        self._client = httpx.Client(headers=headers, timeout=float(options["timeout_s"]), limits=limits)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="chat")
        self.check()

    def check(self) -> None:
        """Ask the server for its models.

        Raises:
            NotReady: it does not answer, refuses the key, or serves other models.
        """
        try:
            answer = self._client.get(f"{self._base}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotReady(f"reward_args.endpoint_url: {self.address} does not answer ({error})") from error
        if answer.status_code in (401, 403):
            raise NotReady(f"reward_args.endpoint_api_key: {self.address} refuses it ({answer.status_code})")
        if answer.status_code == 404:
            return  # some servers have no list of models
        if answer.status_code != 200:
            raise NotReady(f"reward_args.endpoint_url: {self.address}/models answered {answer.status_code}")
        try:
            names = [entry["id"] for entry in answer.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise NotReady(
                f"reward_args.endpoint_url: {self.address}/models gave no list of models ({error})"
            ) from error
        if self._model not in names:
            raise NotReady(
                f"options.model: {self.address} does not serve {self._model!r}; it serves {', '.join(names)}"
            )

    def ask(self, content: list[dict[str, Any]], **parameters: Any) -> str:
        """The text that answers one user message.

        Raises:
            EndpointError: see ``complete``.
        """
        completion = self.complete([{"role": "user", "content": content}], **parameters)
        try:
            return completion["choices"][0]["message"]["content"] or ""
        except (KeyError, TypeError) as error:
            raise EndpointError(f"{self.address}: the answer is no chat completion ({error!r})") from error

    def complete(self, messages: list[dict[str, Any]], **parameters: Any) -> dict[str, Any]:
        """The whole answer to messages, with at least one entry under ``choices``.

        Raises:
            EndpointError: after the last try, or at once when the request itself was refused.
        """
        body = {"model": self._model, "messages": messages, **parameters}
        failure = EndpointError(f"{self.address} was not asked")
        for attempt in range(self._retries + 1):
            try:
                answer = self._client.post(f"{self._base}/chat/completions", json=body)
            except httpx.HTTPError as error:
                failure = EndpointError(f"{self.address}: {type(error).__name__} {error}".rstrip())
            else:
                if answer.status_code == 200:
                    return _completion(answer, self.address)
                failure = EndpointError(f"{self.address} answered {answer.status_code}: {answer.text[:200]}")
                if answer.status_code not in _AGAIN:
                    raise failure
            if attempt < self._retries:
                time.sleep(min(8.0, 0.25 * 2**attempt) * random.uniform(0.5, 1.0))
        raise failure

    def run_concurrently(self, calls: list[Callable[[], Answer]]) -> list[Future[Answer]]:
        """Run calls, as many at a time as allowed, and wait for all of them."""
        futures = [self._pool.submit(call) for call in calls]
        for future in futures:
            future.exception()  # waits; the exception is raised again by ``result``
        return futures


def _completion(answer: httpx.Response, address: str) -> dict[str, Any]:
    try:
        completion = answer.json()
        completion["choices"][0]  # one there is
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"{address}: the answer is no chat completion ({error!r})") from error
    return completion


def image_part(pixels: np.ndarray, size: int = 0) -> dict[str, Any]:
    """A uint8 ``[H, W, 3]`` image as part of a message: PNG, scaled to ``size`` x ``size`` unless that is 0."""
    image = Image.fromarray(pixels)
    if size:
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + _encode_image(image, format="PNG")}}


def video_part(frames: np.ndarray) -> dict[str, Any]:
    """Frames, uint8 ``[T, H, W, 3]``, as part of a message: JPEGs one after the other, which vLLM takes as a video."""
    jpegs = [_encode_image(Image.fromarray(f), format="JPEG", quality=JPEG_QUALITY, subsampling=0) for f in frames]
    return {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(jpegs)}}


def _encode_image(image: Image.Image, **how: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, **how)
    return base64.b64encode(buffer.getvalue()).decode()
