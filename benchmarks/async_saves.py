"""Wall time that saving takes from training: background saves against blocking ones, over the same 20 steps."""

import tempfile
import time
from pathlib import Path

import torch

from cosmos_rl.checkpoint.manager import CheckpointManager, SaveJob
from cosmos_rl.distributed.context import process_group

STATE_MB, STEPS, SAVE_EVERY = 400, 20, 5


def training(manager: CheckpointManager | None, state: dict[str, torch.Tensor], work: torch.Tensor) -> float:
    """Wall seconds of 20 steps of about half a second of arithmetic, saving every fifth, the last writer awaited."""
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        for _ in range(12):
            torch.mm(work, work)
        for value in state.values():
            value.add_(1e-3)
        if manager is not None and step % SAVE_EVERY == 0:
            manager.save(SaveJob(step, state, {"step": step}, None))
    if manager is not None:
        manager.wait()
    return time.perf_counter() - began


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    state = {f"w{i}": torch.randn(STATE_MB * 250_000 // 8) for i in range(8)}
    work = torch.randn(1100, 1100)
    added: dict[bool, list[float]] = {True: [], False: []}
    training(None, state, work)
    with tempfile.TemporaryDirectory() as name, process_group("cpu"):
        for attempt in range(3):
            for background in (True, False):
                root = Path(name) / f"{attempt}{background}"
                manager = CheckpointManager(root / "c", root / "e", background=background, max_keep=1)
                plain = training(None, state, work)
                added[background].append(training(manager, state, work) - plain)
                manager.close()
    ratio = sorted(added[True])[1] / sorted(added[False])[1]
    what = f"added wall time of background saves over {STEPS} steps, {STATE_MB} MB, against blocking saves"
    return [(what, f"{ratio:.3f} ({sorted(added[False])[1]:.2f} s blocking)", "<= 0.5")]
