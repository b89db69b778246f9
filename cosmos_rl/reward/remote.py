"""Rewards from the reward service, asked for in a thread with an event loop of its own."""

import asyncio
import math
import threading
import uuid
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx
import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import RemoteRewardConfig
from cosmos_rl.reward.access import read_service_access
from cosmos_rl.reward.combine import Reward, RewardSum, Scores
from cosmos_rl.reward.metadata import MAX_LINE, describe_excess
from cosmos_rl.reward.protocol import (
    Asked,
    build_line,
    build_reward_fn,
    list_requested_scores,
    list_terms,
    read_scores,
    request_body,
)
from cosmos_rl.reward.service import Forgotten, Lost, ServiceClient
from cosmos_rl.reward.table import ScoringRequest
from cosmos_rl.utils.logging import logger

_BREAKER = 5
"""Requests in a row without any result after which the run stops."""
_SENDINGS = 3
"""How often a request is sent that the service forgets."""
_MAX_BYTES, _MAX_DECODED_BYTES = 2**28 - 2**20, 2**32
"""Of the arrays in a request, and of the pixels that they stand for: what the service takes by default."""
_START_S = _CLOSE_S = 5.0

T = TypeVar("T")
Answers = Mapping[str, Mapping[str, Any] | Lost]
"""Reward type -> its result, or why there is none."""


class RemoteScorer:
    """Asks the reward service. `submit` returns at once; arrays are written out and sent in the background."""

    def __init__(self, table: RemoteRewardConfig, names: Collection[str] = (), keys: Collection[str] = ()) -> None:
        """
        Args:
            names: of the scores to ask for, as metrics show them; empty: all.
            keys: of the metadata that any prompt of the run has. They are in every request, so that it does not depend
                on which samples travel together whether a reward gets them.

        Raises:
            UserError: the environment does not say where the service is.
        """
        self._table = table
        self._keys = keys
        self._access = read_service_access()
        asked = list_requested_scores(table, names)
        self._asked = [one for one in asked if one is not None]
        self._reward_fn = build_reward_fn(table)
        rewards = []
        for entry, one in zip(table.reward_fns, asked, strict=True):
            if not entry.is_asked:
                logger.info("reward %s has weight 0 and is not requested", entry.name)
            if one is None:
                continue
            origin = f"{entry.name} of the reward service"
            rewards.append(Reward(one.name, entry.weight, entry.lower, entry.upper, origin))
            if entry.has_wide_clip:
                message = "reward %s: its scores are wide, so clip_min = %g and clip_max = %g are taken; set your own"
                logger.warning(message, entry.name, entry.lower, entry.upper)
        for term in list_terms(self._asked):
            origin = f"{term.reward} of the reward service"
            rewards.append(Reward(term.name, 0.0, -math.inf, math.inf, origin, is_term=True))
            self._asked.append(term)
        self.sum = RewardSum(tuple(rewards), table.scale, table.reward_clip_min, table.reward_clip_max)
        self._lost_in_a_row = 0
        self._failed: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="remote-rewards", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_S):
            raise RuntimeError("the thread for remote rewards does not start")

    def submit(self, request: ScoringRequest) -> "Future[Scores]":
        """Begin to score; the future fails when the service refuses us or has failed several requests in a row."""
        if not self._thread.is_alive():
            raise RuntimeError("the rewards have been closed")
        return asyncio.run_coroutine_threadsafe(self._score(request), self._loop)

    def close(self) -> None:
        """End thread and connections; what has not been scored fails."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._slots = asyncio.Semaphore(self._table.max_in_flight)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=2 * self._table.max_in_flight)
        async with httpx.AsyncClient(limits=limits) as http:
            self._client = ServiceClient(self._access, http)
            self._started.set()
            await self._closing.wait()

    async def _score(self, request: ScoringRequest) -> Scores:
        asked, count = self._find_asked(request), len(request.prompts)
        size = await asyncio.to_thread(self._count_per_request, request, self._weigh(asked))
        parts = [range(first, min(first + size, count)) for first in range(0, count, size)]
        columns = await _gather_or_cancel(*(self._part(request, rows, asked) for rows in parts))
        values, reasons = {}, {}
        for index, one in enumerate(asked):
            found = [score for column in columns for score in column[index]]
            scores = [torch.nan if isinstance(score, str) else score for score in found]
            values[one.name] = torch.tensor(scores, dtype=torch.float64)
            reasons[one.name] = {row: score for row, score in enumerate(found) if isinstance(score, str)}
        return Scores(values, reasons)

    def _find_asked(self, request: ScoringRequest) -> list[Asked]:
        """The scores that a request asks for, with the terms of those that are sums."""
        types = {one.reward for one in self._asked if not one.optional and request.asks(one.name)}
        return [one for one in self._asked if one.reward in types and (one.optional or request.asks(one.name))]

    def _weigh(self, asked: Sequence[Asked]) -> dict[str, float]:
        """The ``reward_fn`` of a request for these scores."""
        types = {one.reward for one in asked}
        return {name: weight for name, weight in self._reward_fn.items() if name in types}

    async def _part(self, request: ScoringRequest, rows: range, asked: Sequence[Asked]) -> list[list[float | str]]:
        """For each asked score those of ``rows``, which travel in one request."""
        async with self._slots:
            try:
                if self._failed is not None:
                    raise self._failed
                reward_fn = self._weigh(asked)
                body = await asyncio.to_thread(self._body, request, rows, reward_fn)
                answers = await self._answers(body, list(reward_fn))
                self._count_lost(answers)
                found = []
                for one in asked:
                    answer = answers[one.reward]
                    if isinstance(answer, Lost):
                        found.append([str(answer)] * len(rows))
                    else:
                        found.append(read_scores(answer, one, len(rows)))
                return found
            except Exception as error:  # wrong token, unknown reward: the next request would fare no better
                self._failed = self._failed or error
                raise

    def _count_per_request(self, request: ScoringRequest, reward_fn: Mapping[str, float]) -> int:
        """Samples that travel together: as many as `batch_size` and the service's limits allow, at least one."""
        sent, decoded = self._array(request)[0].nbytes, request.media[0].nbytes
        fitting = MAX_LINE // self._measure_longest(request, reward_fn)
        return max(1, min(self._table.batch_size, _MAX_BYTES // sent, _MAX_DECODED_BYTES // decoded, fitting))

    def _measure_longest(self, request: ScoringRequest, reward_fn: Mapping[str, float]) -> int:
        """Bytes of the longest line of JSON that a sample alone would have."""
        longest = 0
        for prompt, metadata in zip(request.prompts, request.metadata, strict=True):
            size = len(build_line([prompt], [metadata], reward_fn, "latent", request.fps, self._keys))
            if size > MAX_LINE:
                what = f'the prompt "{prompt[:60]}" and its metadata'
                raise UserError(f"{what} are {describe_excess(size, {'prompt': prompt, **metadata})}")
            longest = max(longest, size)
        return longest

    def _array(self, request: ScoringRequest) -> torch.Tensor:
        if self._table.payload == "pixels":
            return request.media
        if request.latents is None:
            raise RuntimeError("latents are to be sent, and the request has none")
        return request.latents

    def _body(self, request: ScoringRequest, rows: range, reward_fn: Mapping[str, float]) -> bytearray:
        part = slice(rows.start, rows.stop)
        media = self._array(request)[part].numpy()
        about = request.prompts[part], request.metadata[part]
        return request_body(media, *about, reward_fn, request.fps, self._keys)

    async def _answers(self, body: bytearray, rewards: Sequence[str]) -> Answers:
        """Send one request and wait for all its rewards at once, up to the deadline."""
        until = self._loop.time() + self._table.timeout_s
        key = uuid.uuid4().hex
        found: dict[str, Mapping[str, Any] | Lost] = {}
        for _ in range(_SENDINGS):
            open_rewards = [name for name in rewards if isinstance(found.get(name, Forgotten()), Forgotten)]
            if not open_rewards:
                break
            try:
                ticket = await self._client.enqueue(body, key, until)
            except Lost as error:
                return {**found, **dict.fromkeys(open_rewards, error)}
            results = await _gather_or_cancel(
                *(_catch_lost(self._client.result(ticket, name, until)) for name in open_rewards)
            )
            found.update(zip(open_rewards, results, strict=True))
        return found

    def _count_lost(self, answers: Answers) -> None:
        lost = [answer for answer in answers.values() if isinstance(answer, Lost)]
        self._lost_in_a_row += 1
        if len(lost) < len(answers):
            self._lost_in_a_row = 0
        if self._lost_in_a_row >= _BREAKER:
            raise UserError(
                f"the reward service ({self._access.names['ENQUEUE_URL']}) has given no result for {_BREAKER} requests "
                f"in a row, the last error: {lost[-1]}; is it running, and does it have the rewards "
                f"{', '.join(answers)}?"
            )


async def _catch_lost(work: Coroutine[Any, Any, T]) -> T | Lost:
    try:
        return await work
    except Lost as error:
        return error


async def _gather_or_cancel(*work: Coroutine[Any, Any, T]) -> list[T]:
    """All results in order; the first error ends the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
