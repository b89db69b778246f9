"""The front inside the test's own process, on a queue and an event bus in memory."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from cosmos_rl_reward.config import ServiceConfig, build
from cosmos_rl_reward.front.app import create_app, server_settings
from cosmos_rl_reward.front.state import Front

ABOUT = {"media_types": ["image", "video"], "score_keys": [], "required_metadata": [], "warning": "", "provenance": {}}


class MemoryQueue:
    """Remembers what was queued."""

    def __init__(self) -> None:
        self.jobs: dict[str, list[str]] = {}
        self.broken = False

    async def put(self, queue: str, job_ids: Sequence[str]) -> None:
        if self.broken:
            raise ConnectionError("the broker is away")
        mine = self.jobs.setdefault(queue, [])
        mine.extend(job_id for job_id in job_ids if job_id not in mine)

    async def unknown(self, queue: str, job_ids: Sequence[str]) -> list[str]:
        return [job_id for job_id in job_ids if job_id not in self.jobs.get(queue, [])]

    async def consume(self, queue: str, run: Any, concurrency: int, control: Any) -> None:
        raise AssertionError("a front never takes jobs")


class MemoryEventBus:
    """States that a test sets."""

    def __init__(self) -> None:
        self.rewards: dict[str, dict[str, Any]] = {}
        self.name = "one"
        self.published: list[dict[str, Any]] = []

    def set(self, reward: str, state: str, reason: str = "", **about: Any) -> None:
        """Set the state of a reward."""
        self.rewards[reward] = {
            "state": state,
            "reason": reason,
            "replicas": int(state == "ready"),
            "restarts": 0,
            "last_success": 0.0,
            "about": {**ABOUT, **about},
        }

    async def publish(self, events: list[dict[str, Any]]) -> None:
        self.published.extend(events)

    async def statuses(self) -> dict[str, dict[str, Any]]:
        return {"host": dict(self.rewards)} if self.rewards else {}

    async def epoch(self) -> str:
        return self.name

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        await asyncio.Event().wait()
        yield {}


class FrontInMemory:
    """What a test gets."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config, self.queue, self.bus = config, MemoryQueue(), MemoryEventBus()
        for args in config.enabled:
            self.bus.set(args.reward_type, "ready")

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[tuple[Any, Any]]:
        yield self.queue, self.bus

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator["FrontInMemory"]:
        """Start it."""
        app = create_app(self.config, self._connect)
        async with app.router.lifespan_context(app):
            self.app, self.front = app, app.state.front
            transport = httpx.ASGITransport(app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=70) as self.client:
                yield self

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        """Let it listen, with the real server's settings; the port."""
        server = uvicorn.Server(server_settings(self.config, self.app))
        server.config.lifespan = "off"  # it runs already
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve([listener]))
            try:
                async with asyncio.timeout(30):
                    while not server.started:
                        await asyncio.sleep(0.01)
                yield listener.getsockname()[1]
            finally:
                server.should_exit = server.force_exit = True
                await serving

    front: Front

    async def enqueue(self, content: Any, **headers: str) -> httpx.Response:
        return await self.client.post("/api/reward/enqueue", content=content, headers=headers)


def front_in_memory(folder: Path, **config: Any) -> FrontInMemory:
    """A front with the rewards ``a`` and ``b`` that are ready."""
    rewards = config.pop("rewards", ["a", "b"])
    args = [{"reward_type": name} for name in rewards]
    return FrontInMemory(build({"state_dir": str(folder), "reward_args": args, **config}, "test"))
