"""Messages between processes through the broker: new results, and the health of the rewards."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from cosmos_rl_reward.broker.queue import connect

logger = logging.getLogger(__name__)
_PREFIX = "cosmos_rl_reward:"
_EVENTS = f"{_PREFIX}events"
_STATUS_TTL_S = 6
_LISTEN_S = 10.0  # after so long without an event the connection is checked


class EventBus:
    """Use as an async context manager; it connects at the first call."""

    def __init__(self, url: str) -> None:
        self._redis: Any = connect(url)  # the library's own annotations take its calls for synchronous ones

    async def __aenter__(self) -> "EventBus":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._redis.aclose()

    async def publish(self, events: list[dict[str, Any]]) -> None:
        """Send events to all listeners."""
        await self._redis.publish(_EVENTS, msgspec.json.encode(events).decode())

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Events as they arrive. Those sent while the broker is unavailable are lost: read the spool as well."""
        while True:
            try:
                async for event in self._listen():
                    yield event
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.debug("events: %r, connecting again", error)
            await asyncio.sleep(0.2)

    async def _listen(self) -> AsyncIterator[dict[str, Any]]:
        """Events until the connection ends."""
        async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(_EVENTS)
            while True:
                message = await channel.get_message(timeout=_LISTEN_S)
                if message is not None:
                    for event in msgspec.json.decode(message["data"]):
                        yield event

    async def set_status(self, host: str, status: dict[str, Any]) -> None:
        """Publish the health of this host's rewards; it expires a few seconds after the last call."""
        await self._redis.set(f"{_PREFIX}status:{host}", msgspec.json.encode(status).decode(), ex=_STATUS_TTL_S)
        await self._redis.sadd(f"{_PREFIX}hosts", host)

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """The latest status of every running host."""
        alive: dict[str, dict[str, Any]] = {}
        for host in await self._redis.smembers(f"{_PREFIX}hosts"):
            text = await self._redis.get(f"{_PREFIX}status:{host}")
            if text is None:
                await self._redis.srem(f"{_PREFIX}hosts", host)
            else:
                alive[str(host)] = msgspec.json.decode(str(text))
        return alive

    async def epoch(self) -> str:
        """A name for the broker's present contents: it changes when they were lost."""
        key = f"{_PREFIX}epoch"
        current = await self._redis.get(key)
        if current is None:
            await self._redis.setnx(key, uuid.uuid4().hex)
            current = await self._redis.get(key)
        return str(current)
