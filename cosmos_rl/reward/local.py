"""Rewards from Python functions, called in a thread alongside training."""

import functools
import math
import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import LocalRewardConfig
from cosmos_rl.reward.combine import Reward, RewardSum, Scores
from cosmos_rl.reward.functions import LocalReward, build_keyword_picker
from cosmos_rl.reward.table import ScoringRequest
from cosmos_rl.utils.logging import logger

_BUGS = (TypeError, NameError, AttributeError, ImportError, SyntaxError, NotImplementedError)
"""Errors that are of the program rather than of a sample, as long as no call has succeeded."""
_CLOSE_S = 5.0


class LocalScorer:
    """Scores samples by functions, one request after the other. `submit` returns at once."""

    def __init__(self, rewards: Sequence[LocalReward], table: LocalRewardConfig) -> None:
        self.sum = RewardSum(
            tuple(Reward(r.name, r.weight, r.clip_min, r.clip_max, r.origin) for r in rewards),
            table.scale,
            table.reward_clip_min,
            table.reward_clip_max,
        )
        self._calls = [_Call(reward, table.batch_size) for reward in rewards]
        self._timeout_s = table.timeout_s
        self._requests: queue.SimpleQueue[tuple[ScoringRequest, Future[Scores]] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._closed = threading.Event()
        self._worker = Worker()
        # Daemons: a function that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._serve, name="local-rewards", daemon=True)
        self._thread.start()

    def submit(self, request: ScoringRequest) -> "Future[Scores]":
        """Begin to score; the future fails when a function is broken or does not return."""
        future: Future[Scores] = Future()
        future.set_running_or_notify_cancel()
        self._requests.put((request, future))
        return future

    def close(self) -> None:
        """End the threads; what has not been scored fails."""
        self._closed.set()
        self._requests.put(None)
        self._worker.end()
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        while (entry := self._requests.get()) is not None:
            request, future = entry
            try:
                settle = functools.partial(future.set_result, self._score(request))
            except BaseException as error:  # kept for all that follows: a broken function does not heal
                self._failed = self._failed or error
                settle = functools.partial(future.set_exception, error)
            del entry, request  # the media, which are large: gone before the scores are there
            settle()
            del future, settle
        while not self._requests.empty():
            if (entry := self._requests.get()) is not None:
                entry[1].set_exception(RuntimeError("the rewards have been closed"))

    def _score(self, request: ScoringRequest) -> Scores:
        values, reasons = {}, {}
        for call in (call for call in self._calls if request.asks(call.name)):
            rows = range(len(request.prompts))
            scores = torch.full((len(rows),), torch.nan, dtype=torch.float64)
            why: dict[int, str] = {}
            for first in range(0, len(rows), call.size):
                part = rows[first : first + call.size]
                self._check()
                task = functools.partial(call, request, part)
                found = self._worker.run(task, self._timeout_s, f"reward {call.name}")
                for row, one in zip(part, found, strict=True):
                    if isinstance(one, str):
                        why[row] = one
                    else:
                        scores[row] = one
            values[call.name], reasons[call.name] = scores, why
        return Scores(values, reasons)

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._closed.is_set():
            raise RuntimeError("the rewards have been closed")


class _Call:
    """One function, called for the samples of ``rows``; gives a score or the reason why it is missing for each."""

    def __init__(self, reward: LocalReward, batch_size: int) -> None:
        self.name = reward.name
        self.size = 1
        if reward.of_batches:
            self.size = batch_size
        self._function = reward.function
        self._of_batches = reward.of_batches
        self._picked = build_keyword_picker(reward.function, reward.name)
        self._has_worked = False
        self._has_warned = False

    def __call__(self, request: ScoringRequest, rows: range) -> list[float | str]:
        part = slice(rows.start, rows.stop)
        # A copy: a function may write into its image, which the gallery and other rewards need as it is.
        media = request.media[part].numpy().copy()
        prompts, metadata = list(request.prompts[part]), list(request.metadata[part])
        try:
            with torch.no_grad():
                if self._of_batches:
                    arguments = self._picked(prompts=prompts, metadata=metadata, fps=request.fps)
                    found = self._function(media, **arguments)
                else:
                    found = [self._function(media[0], **self._sample_arguments(prompts[0], metadata[0], request.fps))]
        except Exception as error:
            return [self._handle_error(error)] * len(rows)
        scores = [self._number(one) for one in self._to_list(found, len(rows))]
        self._has_worked = True
        return scores

    def _sample_arguments(self, prompt: str, metadata: Mapping[str, Any], fps: float | None) -> dict[str, Any]:
        return self._picked(reference=metadata.get("reference"), prompt=prompt, metadata=metadata, fps=fps)

    def _handle_error(self, error: Exception) -> str:
        """The reason for missing scores, unless the function never worked and looks broken."""
        text = f"{type(error).__name__}: {error}{_locate(error)}"
        if not self._has_worked and isinstance(error, _BUGS):
            raise UserError(f"reward {self.name}: the function cannot be used: {text}") from error
        if not self._has_warned:
            self._has_warned = True
            logger.warning("reward %s: no score, the first time with\n%s", self.name, traceback.format_exc().rstrip())
        return text

    def _to_list(self, found: Any, count: int) -> list[Any]:
        try:
            listed = list(found)
        except TypeError:
            raise UserError(
                f"reward {self.name}: gave {_describe(found)} for {count} samples, not {count} scores"
            ) from None
        if len(listed) != count:
            raise UserError(f"reward {self.name}: gave {len(listed)} scores for {count} samples")
        return listed

    def _number(self, found: Any) -> float | str:
        if found is None:
            return "the function gave None"
        try:
            number = float(found.item() if hasattr(found, "item") else found)
        except (TypeError, ValueError, RuntimeError):
            number = None
        if number is None or isinstance(found, (str, bytes)):
            raise UserError(f"reward {self.name}: gave {_describe(found)}, not a number or None")
        if not math.isfinite(number):
            return f"the function gave {number}"
        return number


class Worker:
    """A thread that runs functions one at a time, always the same one, as models and engines may need."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="reward-functions", daemon=True).start()

    def run(self, task: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """What ``task`` gives; ``what``: its name in the message.

        Raises:
            UserError: it has not returned after ``timeout_s`` seconds.
        """
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        if not wait([future], timeout_s).done:
            raise UserError(
                f"{what}: the function has not returned after {timeout_s:g} s "
                "(train.train_policy.local_reward.timeout_s); is it stuck?"
            )
        return future.result()

    def end(self) -> None:
        """End the thread after what it runs."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (entry := self._tasks.get()) is not None:
            task, future = entry
            try:
                settle = functools.partial(future.set_result, task())
            except BaseException as error:
                settle = functools.partial(future.set_exception, error)
            del entry, task  # what it holds is large
            settle()
            del future, settle


def _locate(error: BaseException) -> str:
    """Where in the user's file it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    if len(frames) < 2:  # the first is ours: the call itself failed
        return ""
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _describe(found: object) -> str:
    text = repr(found)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{type(found).__name__} {text}"
