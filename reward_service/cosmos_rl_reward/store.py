"""Which spool a service has, and how an event loop asks it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cosmos_rl_reward.config import STORE_URL, ServiceConfig
from cosmos_rl_reward.spool import Spool

T = TypeVar("T")
_THREADS = 32  # requests to a store at a time


def open_spool(config: ServiceConfig) -> Spool:
    """The spool that ``blob_store`` names: a folder, or a bucket with a folder of this process before it.

    Raises:
        UserError: the library for stores is missing, or its settings are wrong.
    """
    found = STORE_URL.fullmatch(config.blob_store)
    if found is None:
        return Spool(config.spool_dir)
    from cosmos_rl_reward.bucket import Bucket
    from cosmos_rl_reward.s3 import S3Spool, make_process_folder

    folder, lock = make_process_folder(config.state / "store")
    limits = (config.max_spool_bytes, config.min_free_bytes)
    return S3Spool(folder, Bucket(found[1], (found[2] or "").strip("/")), limits, lock)


async def call_spool(spool: Spool, function: Callable[..., T], *arguments: object) -> T:
    """Call the spool from an event loop: a folder answers at once, a store in a thread."""
    return await asyncio.to_thread(function, *arguments) if spool.remote else function(*arguments)


def add_threads(spool: Spool) -> None:
    """Let the running event loop wait for many answers of a store; a folder needs no more threads than usual."""
    if spool.remote:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
