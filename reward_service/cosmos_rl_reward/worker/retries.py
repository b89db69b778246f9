"""Calls of the spool with retries, because a full disk is emptied and a store becomes available again."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from cosmos_rl_reward.spool import Spool

logger = logging.getLogger(__name__)
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between tries to read or write jobs and results; the last one repeats


class RetryingSpool:
    """Calls functions of a spool until they succeed. ``name`` is for the log."""

    def __init__(self, spool: Spool, name: str) -> None:
        self.spool, self._name = spool, name

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Read from the spool; a folder is read at once. That a job does not exist (any more) is a valid answer."""
        try:
            if not self.spool.remote:
                return function(*arguments)
        except FileNotFoundError:
            raise
        except OSError as error:  # a full disk has no room for a folder either
            logger.debug("%s: %s", self._name, error)
        return await self.retry(function, *arguments, missing_is_final=True)

    async def retry(self, function: Callable[..., Any], *arguments: Any, missing_is_final: bool = False) -> Any:
        """Call the spool in a thread, until it succeeds."""
        for number in itertools.count():
            try:
                return await asyncio.to_thread(function, *arguments)
            except OSError as error:
                if missing_is_final and isinstance(error, FileNotFoundError):
                    raise
                logger.error("%s: jobs or results cannot be read or written: %s", self._name, error)
            await asyncio.sleep(_PAUSES_S[min(number, len(_PAUSES_S) - 1)])
