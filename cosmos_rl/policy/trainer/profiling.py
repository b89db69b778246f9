"""A trace of a few steps by torch's profiler; imported only when ``profiler.enable_profiler`` asks for it."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import ProfilerConfig
from cosmos_rl.utils.logging import logger, warn_of_all

_TABLE_ROWS = 40
_MAX_DEPTH = 100_000


@contextlib.contextmanager
def record_profile(config: ProfilerConfig, folder: Path, context: Context, start: int) -> Iterator[Callable[[], None]]:
    """Record the steps of ``sub_profiler_config`` on the chosen ranks; yields what is to be called after each step.

    Written are ``step_<first>-<last>_rank_<r>.json``, a trace for chrome://tracing or ui.perfetto.dev, and a ``.txt``
    with the operations that took most time. The window is counted from the first step of this start of the run.
    """
    window, rank, on_gpu = config.sub_profiler_config, context.rank, context.device.type == "cuda"
    if rank not in (window.rank_filter or (0,)):
        yield _record_nothing
        return
    first = start + window.wait_steps + window.warmup_steps + 1
    name = f"step_{first}-{first + window.active_steps - 1}_rank_{rank}"
    written: list[Path] = []

    def write(profiler: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"{name}.json"
        profiler.export_chrome_trace(str(trace))
        by = "self_cpu_time_total"
        if on_gpu:
            by = "self_device_time_total"
        with _allow_deep_recursion():
            averages = profiler.key_averages(group_by_input_shape=window.record_shape)
        (folder / f"{name}.txt").write_text(averages.table(sort_by=by, row_limit=_TABLE_ROWS) + "\n", encoding="utf-8")
        written.append(trace)
        logger.info(f"profiler: {trace} and {name}.txt written")

    steps = schedule(wait=window.wait_steps, warmup=window.warmup_steps, active=window.active_steps, repeat=1)
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=steps,
        on_trace_ready=write,
        record_shapes=window.record_shape,
        profile_memory=window.profile_memory,
        with_stack=window.with_stack or window.with_modules,  # torch names modules in its stacks
    ) as profiler:
        yield profiler.step
    if not written:
        warn_of_all(f"profiler: nothing recorded, the run ended before step {first} (wait_steps + warmup_steps)")


@contextlib.contextmanager
def _allow_deep_recursion() -> Iterator[None]:
    """torch finds the root of each event by recursion, and nests the waiting frames of all threads in each other."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _MAX_DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _record_nothing() -> None:
    """Ranks that record nothing."""
