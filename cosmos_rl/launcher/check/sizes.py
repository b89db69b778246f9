"""Memory and disk of a run in words. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.launcher import machine
from cosmos_rl.launcher.acceptance.accept import ModelFiles
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.machine import format_bytes, format_count
from cosmos_rl.policy.config import Config

UNKNOWN = "unknown, as the sizes are"


def memory_lines(memory: estimate.Memory | None, *, on_cpu: bool) -> Iterator[str]:
    """The memory of a rank, part by part. None: not known."""
    if memory is None:
        yield UNKNOWN
        return
    for label, size in memory.parts.items():
        yield f"{label:40} {format_bytes(size):>8}"
    for label, size in memory.phases.items():
        yield f"{'in all, while: ' + label:40} {format_bytes(size):>8}"
    yield f"{'peak':40} {format_bytes(memory.peak):>8}"
    if not on_cpu:
        yield f"{'and in host memory':40} {format_bytes(memory.host):>8}"
    if memory.recorded:
        yield f"{'of it, in host memory: recorded steps':40} {format_bytes(memory.recorded):>8}"
    yield "activations (of some families up to twice as much) and the VAE's work are rough"
    yield "libraries and the CUDA context come on top"
    yield from (f"unknown and left out: {what}" for what in memory.without)


@dataclass(frozen=True)
class DiskUse:
    """What a run writes into `train.output_dir`."""

    config: Config
    sizes: estimate.Disk
    kept: int | None
    """Steps that stay on the disk; None: unknown."""

    @classmethod
    def of_run(cls, config: Config, files: ModelFiles, saves: int | None) -> "DiskUse":
        """`saves`: how often the run saves, None where it is not known."""
        limits = [saves, config.train.ckpt.max_keep]
        if config.train.ckpt.max_keep < 0:
            limits = [saves]
        known = [limit for limit in limits if limit is not None]
        return cls(config, estimate.disk(config, files), min(known, default=None))

    def total(self, kept: int) -> int:
        """Bytes of so many steps."""
        ckpt, exports = self.config.train.ckpt, 1
        if ckpt.export_safetensors and ckpt.enable_checkpoint:
            exports = kept
        checkpoints = kept * ckpt.enable_checkpoint
        return checkpoints * self.sizes.checkpoint + exports * self.sizes.export + self.sizes.shared_export

    def lines(self) -> Iterator[str]:
        """Of one step and of all."""
        once, sizes = "", self.sizes
        if sizes.shared_export:
            once = f", and once {format_bytes(sizes.shared_export)} for the frozen parts"
        yield f"one checkpoint {format_bytes(sizes.checkpoint)}, one export {format_bytes(sizes.export)}{once}"
        if self.kept is None:
            yield "in all: unknown (train.ckpt.max_keep = -1 keeps everything, and the number of steps is unknown)"
        else:
            yield f"in all {format_bytes(self.total(self.kept))} for {format_count(self.kept, 'kept step')}"

    @property
    def free(self) -> int:
        """Bytes on the disk."""
        return machine.free_disk(Path(self.config.train.output_dir))

    def warnings(self) -> Iterator[str]:
        """That the whole run may not fit."""
        if self.kept is not None and self.total(self.kept) > self.free:
            written = format_bytes(self.total(self.kept))
            yield f"warning: the run may write {written}; lower train.ckpt.max_keep or raise save_freq"

    def problems(self) -> Iterator[str]:
        """That not even one checkpoint and one export fit."""
        if self.total(1) > self.free:
            free, needed = format_bytes(self.free), format_bytes(self.total(1))
            yield f"train.output_dir: {free} free, one checkpoint and its export need {needed}"
