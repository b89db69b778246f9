"""Saves whole steps, in the background if wanted, and keeps the newest ones."""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from cosmos_rl.checkpoint import layout
from cosmos_rl.checkpoint.state import StateDict
from cosmos_rl.storage import atomic
from cosmos_rl.storage.disk import report_full_disk
from cosmos_rl.utils.logging import logger

WriteExport = Callable[[], None]
"""Writes the export of a step from weights that it owns; runs in the background thread."""


@dataclass(frozen=True)
class SaveJob:
    """One step to be written."""

    step: int
    state: StateDict | None
    """Resumable state; None when only the export is wanted."""
    trainer_state: dict[str, Any]
    export: WriteExport | None
    best: bool = False
    """Whether the link ``best`` next to the checkpoints shall point to this step once it is whole."""


class CheckpointManager:
    """Writes ``checkpoints/step_<N>/policy`` (and its export), one step at a time.

    A step is built aside and renamed once everything is on the disk, its marker last. An error of the background
    writer is raised by the next ``save`` or by ``wait``.
    """

    def __init__(
        self, checkpoints: Path, exports: Path, *, background: bool, max_keep: int, is_main: bool = True
    ) -> None:
        """``max_keep`` newest steps stay (-1: all), and the one that ``best`` leads to; an older step leaves together
        with its export.

        All ranks make a manager and save together; ``is_main`` is true on the one that makes and renames folders.
        """
        self._is_main = is_main
        self._checkpoints = checkpoints
        self._exports = exports
        self._best = checkpoints.parent / "best"
        self._best_step: int | None = None  # known also where the disk has no links
        self._background = background
        self._max_keep = max_keep
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._buffers: StateDict = {}
        # a group of its own: the writer's collectives must not mix with those of the training loop
        self._group: Any = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        if is_main:
            for folder in (checkpoints, exports):
                layout.remove_staged(folder)

    def save(self, job: SaveJob, *, block: bool = False) -> None:
        """Write one step; in the background from a private copy unless ``block`` (or the manager) says otherwise."""
        self.wait()
        if self._background and not block:
            if job.state is not None:
                job = replace(job, state=self._copy_to_cpu(job.state))
            self._pending = self._pool.submit(self._write, job)
        else:
            self._write(job)

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            Exception: what the background writer met.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait and end the background thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def link_best(self, step: int) -> bool:
        """Let ``best`` lead to the checkpoint of ``step``, or to its export where there is no checkpoint.

        Returns whether there is one of them.
        """
        folders = (layout.step_dir(folder, step) for folder in (self._checkpoints, self._exports))
        target = next((folder for folder in folders if folder.is_dir()), None)
        if target is None:
            return False
        self._best_step = step
        if self._is_main:
            atomic.replace_link(self._best, target)
        return True

    def remove_steps_after(self, step: int) -> None:
        """Remove saved steps later than ``step`` and their exports: a resume must not find them."""
        if not self._is_main:
            return
        for later in (s for s in layout.list_whole_steps(self._checkpoints) if s > step):
            atomic.remove(layout.step_dir(self._checkpoints, later))
            atomic.remove(layout.step_dir(self._exports, later))
            logger.info(f"[Policy] Step: {later}, checkpoint and export removed")
        if self._is_main and self._best.is_symlink() and not self._best.exists():  # it led to one of them
            self._best.unlink()
        if self._group is not None:
            dist.barrier(group=self._group)

    def _copy_to_cpu(self, state: StateDict) -> StateDict:
        """A private copy on the CPU: the loop continues to change the live tensors.

        The memory is kept for the next save, since asking the system for it again takes longer than the copy itself.
        """
        old, self._buffers = self._buffers, {}
        for key, value in state.items():
            buffer = old.pop(key, None)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = value.detach().to("cpu", copy=True)
            else:
                buffer.copy_(value.detach())
            self._buffers[key] = buffer
        return dict(self._buffers)

    def _write(self, job: SaveJob) -> None:
        if job.export is not None:
            with report_full_disk(layout.step_dir(self._exports, job.step)):
                job.export()
        if job.state is not None:
            with report_full_disk(layout.step_dir(self._checkpoints, job.step)):
                self._write_state(job.step, job.state, job.trainer_state)
        if job.best:
            self.link_best(job.step)
        if job.state is not None and self._is_main:
            self._prune()

    def _write_state(self, step: int, state: StateDict, trainer_state: dict[str, Any]) -> None:
        final = layout.step_dir(self._checkpoints, step)
        policy = atomic.staging_path(final) / "policy"
        if self._is_main:
            atomic.begin(final)
            policy.mkdir()
        if self._group is not None:
            dist.barrier(group=self._group)
        dcp.save(state, checkpoint_id=policy, process_group=self._group, no_dist=self._group is None)
        if not self._is_main:
            return
        (policy / layout.TRAINER_STATE).write_text(json.dumps(trainer_state, indent=1), encoding="utf-8")
        (policy / layout.COMMIT_MARKER).write_text(layout.build_marker_text(policy), encoding="utf-8")
        atomic.commit(final)
        where = layout.policy_dir(self._checkpoints, step).absolute()
        logger.info(f"[Policy] Step: {step}, checkpoint saved successfully at {where}.")

    def _prune(self) -> None:
        if self._max_keep < 0:
            return
        for step in layout.list_whole_steps(self._checkpoints)[: -self._max_keep]:
            if step == self._best_step:
                continue
            atomic.remove(layout.step_dir(self._checkpoints, step))
            atomic.remove(layout.step_dir(self._exports, step))
            logger.info(
                f"[Policy] Step: {step}, checkpoint and export removed (train.ckpt.max_keep = {self._max_keep})"
            )


def read_trainer_state(policy: Path) -> dict[str, Any]:
    """The ``trainer_state.json`` of a checkpoint."""
    state: dict[str, Any] = json.loads((policy / layout.TRAINER_STATE).read_text(encoding="utf-8"))
    return state
