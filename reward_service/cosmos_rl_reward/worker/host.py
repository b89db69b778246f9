"""The host process: takes jobs from the broker and has them scored by the replicas it runs."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import uuid
from collections.abc import Sequence
from typing import Any

from cosmos_rl_reward.broker.event_bus import EventBus
from cosmos_rl_reward.broker.queue import Control, StreamQueue
from cosmos_rl_reward.clock import uptime
from cosmos_rl_reward.config import RESTARTS_VARIABLE, RewardArgs, ServiceConfig
from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.live_table import report_progress
from cosmos_rl_reward.progress import RewardProgress, Snapshot
from cosmos_rl_reward.store import add_threads, open_spool
from cosmos_rl_reward.worker import process_tree
from cosmos_rl_reward.worker.pool import Pool
from cosmos_rl_reward.worker.replica import Replica
from cosmos_rl_reward.worker.spec import DECODE_QUEUE, HOST, PoolSpec

logger = logging.getLogger(__name__)
_REAP_S = 30.0


def make_reward_spec(args: RewardArgs, max_attempts: int) -> PoolSpec:
    """How to run one configured reward."""
    kwargs = {
        name: getattr(args, name)
        for name in ("model_path", "device", "dtype", "download_path", "endpoint_url", "endpoint_api_key", "options")
    }
    if args.endpoint_api_key_env:
        kwargs["endpoint_api_key"] = os.environ.get(args.endpoint_api_key_env, "")
    message = {
        "op": "score",
        "name": args.reward_type,
        "reward_class": args.reward_class,
        "function": args.function,
        "self_test": args.self_test,
        "video_frames": args.video_frames,
        "kwargs": kwargs,
    }
    return PoolSpec(args.reward_type, message, args, max_attempts, args.max_batch, args.max_wait_ms / 1000)


def make_decode_spec(config: ServiceConfig) -> PoolSpec:
    """How to run the latent decoder."""
    args = config.decode_args
    kwargs = {name: getattr(args, name) for name in ("model_path", "wan2pt2_model_path", "dtype", "device")}
    kwargs["max_decoded_bytes"] = config.max_decoded_bytes
    return PoolSpec(DECODE_QUEUE, {"op": "decode", "kwargs": kwargs}, args, config.max_attempts, lazy=True)


class Host:
    """Pools of this machine and their consumers."""

    def __init__(self, config: ServiceConfig, broker_url: str, only: list[str]) -> None:
        chosen = [args for args in config.enabled if not only or args.reward_type in only]
        if missing := [name for name in only if name not in {DECODE_QUEUE, *(args.reward_type for args in chosen)}]:
            raise UserError(f"--reward {missing[0]}: not an enabled reward of the configuration")
        self.config, self.broker_url = config, broker_url
        self.name = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.spool = open_spool(config)
        self._specs = [make_reward_spec(args, config.max_attempts) for args in chosen]
        if not config.no_latent_decoder and (not only or DECODE_QUEUE in only):
            self._specs.append(make_decode_spec(config))
        self._controls: dict[str, Control] = {}
        self.restarts = int(os.environ.get(RESTARTS_VARIABLE, "0"))

    async def run(self, report: bool = False) -> None:
        """Serve until SIGTERM or SIGINT; then finish running jobs within ``drain_s`` and requeue the rest.

        Args:
            report: show progress on standard error; where a front runs on this machine, that does it.
        """
        add_threads(self.spool)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _kill_everything)
        process_tree.become_subreaper()
        if left := await asyncio.to_thread(process_tree.kill_leftovers):
            logger.warning("killed processes left by rewards of an earlier run: PIDs %s", left)
        async with EventBus(self.broker_url) as bus, StreamQueue(self.broker_url) as queue:

            async def requeue(name: str, job_id: str) -> None:
                await queue.put(name, [job_id])

            events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

            pools = [Pool(spec, self.spool, events.put, requeue) for spec in self._specs]
            parts = [self._publish_status(bus, pools), _publish_events(bus, events), _reap()]
            background = [asyncio.create_task(part) for part in (*parts, *(pool.serve() for pool in pools))]
            consumers = [asyncio.create_task(self._consume(queue, pool, stop)) for pool in pools]
            reporting: list[asyncio.Task[None]] = []
            if report:
                showing = report_progress(lambda: _look(pools), self.config.log_interval_s)
                reporting.append(asyncio.create_task(showing))
            stopping = asyncio.create_task(stop.wait())
            try:
                tasks = {stopping, *background, *consumers}
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopping}:
                    task.result()  # only the signal ends them: raise any other reason
            finally:
                await self._drain(consumers)
                await _end([stopping, *background, *reporting])
                await asyncio.to_thread(process_tree.kill_descendants)

    async def _drain(self, consumers: list[asyncio.Task[None]]) -> None:
        for control in self._controls.values():
            control.stop.set()
        await asyncio.wait(consumers, timeout=self.config.drain_s)
        for control in self._controls.values():
            control.end()
        await asyncio.wait(consumers, timeout=2)
        await _end(consumers)

    async def _consume(self, queue: StreamQueue, pool: Pool, stop: asyncio.Event) -> None:
        """Take jobs while the pool can score them."""
        while not stop.is_set():
            if not await _wait_for_either(pool.available, stop):
                return
            control = self._controls[pool.spec.name] = Control()
            taking = asyncio.create_task(queue.consume(pool.spec.name, pool.run, pool.concurrency, control))
            while not taking.done() and pool.available.is_set():
                await asyncio.wait({taking}, timeout=0.5)
            control.end()
            await taking

    async def _publish_status(self, bus: EventBus, pools: list[Pool]) -> None:
        """Publish the pools' health; start the decoder when a reward needs it."""
        last: list[dict[str, Any]] = []
        shown = 0.0
        loop = asyncio.get_running_loop()
        while True:
            states = [pool.status() for pool in pools]
            news = [{**state, "last_success": 0.0} for state in states]  # that alone may wait a second
            if news != last or loop.time() - shown > 1:
                status: dict[str, Any] = {pool.spec.name: state for pool, state in zip(pools, states, strict=True)}
                status[HOST] = {"machine": socket.gethostname(), "restarts": self.restarts}
                with contextlib.suppress(Exception):  # the broker is unavailable: retried
                    await bus.set_status(self.name, status)
                    last, shown = news, loop.time()
            if any(pool.health.about.get("needs_latent_decoder") for pool in pools):
                for pool in pools:
                    if pool.spec.lazy and pool.health.state == "idle":
                        pool.wanted.set()
            await asyncio.sleep(0.1)


def _look(pools: Sequence[Pool]) -> Snapshot:
    found = {}
    for pool in pools:
        found[pool.spec.name] = RewardProgress(pool.health.state, pool.health.reason, None, pool.totals)
    return Snapshot(uptime(), found)


async def _publish_events(bus: EventBus, queue: asyncio.Queue[dict[str, Any]]) -> None:
    """Publish events, several in one message when they are close together."""
    while True:
        events = [await queue.get()]
        while not queue.empty():
            events.append(queue.get_nowait())
        with contextlib.suppress(Exception):  # events are optional: fronts also look into the spool
            await bus.publish(events)


async def _reap() -> None:
    while True:
        await asyncio.sleep(_REAP_S)
        await asyncio.to_thread(process_tree.reap_orphans, Replica.running)


def _kill_everything() -> None:
    """The service's root process has exited: no process of a reward may stay."""
    logger.error("the service's root process has exited; all processes of the rewards are killed")
    process_tree.kill_descendants()
    logging.shutdown()
    os._exit(1)


async def _wait_for_either(event: asyncio.Event, stop: asyncio.Event) -> bool:
    """Wait for either event; True when it was the first."""
    waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return not stop.is_set()


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
