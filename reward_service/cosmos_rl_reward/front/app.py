"""The web application."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.requests import ClientDisconnect

from cosmos_rl_reward import __version__
from cosmos_rl_reward.broker.event_bus import EventBus
from cosmos_rl_reward.broker.queue import StreamQueue
from cosmos_rl_reward.config import ServiceConfig
from cosmos_rl_reward.errors import StoreUnavailable
from cosmos_rl_reward.front import v1, v2
from cosmos_rl_reward.front.auth import Auth
from cosmos_rl_reward.front.connections import make_protocol
from cosmos_rl_reward.front.direct import DirectApp
from cosmos_rl_reward.front.job_tracker import JobTracker
from cosmos_rl_reward.front.local_only import LocalOnly
from cosmos_rl_reward.front.metrics import Metrics
from cosmos_rl_reward.front.reconciler import Reconciler
from cosmos_rl_reward.front.state import Front
from cosmos_rl_reward.front.uploads import UploadReceiver, discard_body
from cosmos_rl_reward.live_table import report_progress
from cosmos_rl_reward.payload.errors import Refused
from cosmos_rl_reward.store import add_threads, open_spool

logger = logging.getLogger(__name__)
router = APIRouter()
Connect = Callable[[], AbstractAsyncContextManager[tuple[StreamQueue, EventBus]]]


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """200 when all required rewards are ready and jobs are taken, else 503; with the state of each reward."""
    front = Front.from_request(request)
    rewards = front.describe()["rewards"]
    states = {name: {k: r[k] for k in ("state", "queued", "last_success")} for name, r in rewards.items()}
    ready = not front.draining and all(r["state"] == "ready" for r in rewards.values() if r["required"])
    return JSONResponse({"ready": ready, "draining": front.draining, "rewards": states}, 200 if ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    front = Front.from_request(request)
    front.allow(request, "read")
    return Response(front.metrics.render(), media_type="text/plain; version=0.0.4")


@router.get("/api/reward/rewards")
@router.get("/v2/rewards")
async def rewards(request: Request) -> Response:
    """Names, states, score keys, versions and limits."""
    front = Front.from_request(request)
    front.allow(request, "read")
    return JSONResponse(front.describe())


@router.get("/")
async def page() -> Response:
    """The page for people; it asks ``/api/reward/rewards`` with the token typed into it."""
    return HTMLResponse(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


async def _reject(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    front, headers = Front.from_request(request), {}
    if error.status in (401, 403):
        front.metrics.denied.inc()
    else:
        front.metrics.rejected.labels(str(error.status)).inc()
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    elif error.status in (429, 503, 507):
        headers = {"Retry-After": str(front.tracker.retry_after())}
    await discard_body(request)
    return JSONResponse({"message": str(error), "error": str(error)}, error.status, headers=headers)


async def _report_store_unavailable(request: Request, error: Exception) -> Response:
    front = Front.from_request(request)
    front.metrics.rejected.labels("503").inc()
    text = f"the object store does not answer: {error}"
    return JSONResponse({"message": text, "error": text}, 503, headers={"Retry-After": "5"})


async def _ignore_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # the client has disconnected


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a part of the front has failed", exc_info=error)


def create_app(config: ServiceConfig, connect: Connect, report: bool = False) -> FastAPI:
    """The application; ``connect`` opens the queue and the event bus while it runs.

    Args:
        report: show progress on standard error.

    Raises:
        UserError: tokens are wrong or missing.
    """
    auth = Auth(config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with connect() as (queue, bus):
            numbers = Metrics()
            tracker = JobTracker(config, open_spool(config), queue, bus, numbers)
            add_threads(tracker.spool)
            await asyncio.to_thread(tracker.load)
            app.state.front = Front(config, tracker, UploadReceiver(tracker), auth, numbers)
            reconciler = Reconciler(tracker)
            with contextlib.suppress(Exception):  # the broker may come later
                await reconciler.refresh()
            background = [asyncio.create_task(reconciler.run())]
            if report:
                background.append(asyncio.create_task(report_progress(tracker.look, config.log_interval_s)))
            for task in background:
                task.add_done_callback(_log_failure)
            if threading.current_thread() is threading.main_thread():
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, app.state.front.drain)
            yield
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    # ``/docs`` and ``/redoc`` would have browsers load scripts from foreign hosts; ``/openapi.json`` stays
    app = DirectApp(
        title="cosmos-rl reward service", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    if auth.open:
        app.add_middleware(LocalOnly)
    for part in (router, v1.router, v2.router):
        app.include_router(part)
    errors = {
        Refused: _reject,
        StoreUnavailable: _report_store_unavailable,
        ClientDisconnect: _ignore_disconnect,
    }
    for kind, answer in errors.items():
        app.add_exception_handler(kind, answer)
    often = {"/api/reward/enqueue": v1.enqueue, "/api/reward/pull": v1.pull, "/v2/score": v2.score}
    app.serve_directly(often, errors, local=auth.open)
    return app


def run_front(config: ServiceConfig, broker_url: str, listener: socket.socket) -> None:
    """Serve until SIGTERM; SIGUSR1 rejects new jobs while results are still returned.

    Raises:
        UserError: tokens are wrong or missing.
    """

    @contextlib.asynccontextmanager
    async def connect() -> AsyncIterator[tuple[StreamQueue, EventBus]]:
        async with EventBus(broker_url) as bus, StreamQueue(broker_url) as queue:
            yield queue, bus

    uvicorn.Server(server_settings(config, create_app(config, connect, report=True))).run(sockets=[listener])


def server_settings(config: ServiceConfig, app: FastAPI) -> uvicorn.Config:
    """How the application is served."""
    tls: dict[str, Any] = {}
    if config.tls_cert:
        tls = {"ssl_certfile": config.tls_cert, "ssl_keyfile": config.tls_key or None}
    quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False}
    limits: dict[str, Any] = {"http": make_protocol(config.max_connections), "ws": "none", "timeout_keep_alive": 75}
    return uvicorn.Config(app, timeout_graceful_shutdown=5, **limits, **quiet, **tls)
