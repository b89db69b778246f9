"""Client of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...)."""

from __future__ import annotations

import base64
import io
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import numpy as np
from PIL import Image

from cosmos_rl_reward.handler import NotReady

_AGAIN = {408, 425, 429, 500, 502, 503, 504}
Answer = TypeVar("Answer")


class EndpointError(Exception):
    """The server cannot be reached, or refused a request; never contains the key."""


class ChatEndpoint:
    """Chat completions with bounded concurrency, time-outs and a few retries."""

    def __init__(self, url: str, key: str, model: str, *, timeout_s: float, retries: int, concurrency: int) -> None:
        self._base = url.rstrip("/").removesuffix("/chat/completions")
        self._model, self._retries = model, retries
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=concurrency)
        self._client = httpx.Client(headers=headers, timeout=timeout_s, limits=limits)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="chat")

    def check(self) -> None:
        """Ask the server for its models.

        Raises:
            NotReady: it does not answer, refuses the key, or serves other models.
        """
        try:
            answer = self._client.get(f"{self._base}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotReady(f"reward_args.endpoint_url: {self._base} does not answer ({error})") from error
        if answer.status_code in (401, 403):
            raise NotReady(f"reward_args.endpoint_api_key: {self._base} refuses it ({answer.status_code})")
        if answer.status_code == 404:
            return  # some servers have no list of models
        try:
            answer.raise_for_status()
            names = [entry["id"] for entry in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise NotReady(f"reward_args.endpoint_url: {self._base}/models gave no list of models ({error})") from error
        if self._model not in names:
            raise NotReady(f"options.model: {self._base} does not serve {self._model!r}; it serves {', '.join(names)}")

    def ask(self, content: list[dict[str, Any]], **parameters: Any) -> str:
        """The text that answers one user message.

        Raises:
            EndpointError: after the last try, or at once when the request itself was refused.
        """
        body = {"model": self._model, "messages": [{"role": "user", "content": content}], **parameters}
        failure = EndpointError(f"{self._base} was not asked")
        for attempt in range(self._retries + 1):
            try:
                answer = self._client.post(f"{self._base}/chat/completions", json=body)
            except httpx.HTTPError as error:
                failure = EndpointError(f"{self._base}: {type(error).__name__} {error}".rstrip())
            else:
                if answer.status_code == 200:
                    return _text(answer, self._base)
                failure = EndpointError(f"{self._base} answered {answer.status_code}: {answer.text[:200]}")
                if answer.status_code not in _AGAIN:
                    raise failure
            if attempt < self._retries:
                time.sleep(min(8.0, 0.25 * 2**attempt) * random.uniform(0.5, 1.0))
        raise failure

    def all_at_once(self, calls: list[Callable[[], Answer]]) -> list[Future[Answer]]:
        """Run calls, as many at a time as allowed, and wait for all of them."""
        futures = [self._pool.submit(call) for call in calls]
        for future in futures:
            future.exception()  # waits, and keeps the exception for whoever asks for the result
        return futures


def _text(answer: httpx.Response, base: str) -> str:
    try:
        text = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"{base}: the answer is no chat completion ({error!r})") from error
    return text or ""


def picture_part(picture: np.ndarray, size: int = 0) -> dict[str, Any]:
    """A uint8 ``[H, W, 3]`` picture as part of a message: PNG, scaled to ``size`` x ``size`` unless that is 0."""
    image = Image.fromarray(picture)
    if size:
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": uri}}
