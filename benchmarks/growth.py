"""CPU seconds of what a process does once for a large data set or a long run: all of it must grow like the number."""

import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from cosmos_rl.data.cache import TensorCache
from cosmos_rl.data.pair_files import scan_pairs
from cosmos_rl.data.prompts import digest_prompts, read_prompts
from cosmos_rl.data.streams import MapStream
from cosmos_rl.data.tar_files import index_tar
from cosmos_rl.tracking.metrics import MetricsFile
from cosmos_rl.tracking.report import write_report

COUNT = 100_000
ENTRIES = 10_000
METRICS = [f"train/metric_{i}" for i in range(24)]


def seconds(action: Callable[[], object]) -> str:
    """CPU seconds of one call."""
    began = time.process_time()
    action()
    return f"{time.process_time() - began:.3f} CPU-s"


def write_folder(folder: Path) -> Path:
    """Pairs whose images are empty files: nothing is decoded."""
    folder.mkdir()
    for number in range(COUNT):
        (folder / f"{number:06d}.json").write_text(json.dumps({"prompt": f"thing {number}"}), encoding="utf-8")
        (folder / f"{number:06d}.jpg").touch()
    return folder


def write_tars(folder: Path, pairs: Path) -> Path:
    """The pairs of a folder in ten tars."""
    folder.mkdir()
    files = sorted(pairs.iterdir())
    for number in range(10):
        with tarfile.open(folder / f"{number}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for file in files[number * len(files) // 10 : (number + 1) * len(files) // 10]:
                tar.add(file, file.name)
    return folder


def write_metrics(folder: Path) -> Path:
    """A run with a line for each step."""
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, COUNT + 1):
            row = {"step": step, **{name: (step * 7919 % 1009) / 1009 + i for i, name in enumerate(METRICS)}}
            file.write(json.dumps(row) + "\n")
    return folder


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, COSMOS_CACHE_DIR=f"{name}/indices"):
        root = Path(name)
        pairs, run = write_folder(root / "pairs"), write_metrics(root / "run")
        tars = write_tars(root / "tars", pairs)
        prompts = root / "prompts.txt"
        prompts.write_text("\n".join(f"a photo of thing {number}" for number in range(COUNT)), encoding="utf-8")
        records, stream = read_prompts(prompts), MapStream(COUNT, 96, seed=0)
        full = TensorCache(root / "cache", "latents", "", 2**40)
        for number in range(ENTRIES):
            full.put(str(number), {"latent": torch.zeros(4)})
        metrics = MetricsFile(run / "metrics.jsonl")
        rows = [
            (f"scan a folder of {COUNT:,} pairs", lambda: scan_pairs(pairs), "<= 2"),
            (f"read the headers of tars of {2 * COUNT:,} members", lambda: [*map(index_tar, tars.iterdir())], "<= 4"),
            (f"scan tars of {COUNT:,} pairs, whose headers are known", lambda: scan_pairs(tars), "<= 4"),
            (f"read {COUNT:,} prompts", lambda: read_prompts(prompts), "<= 1.5"),
            (f"digest of {COUNT:,} prompts, once a run", lambda: digest_prompts(records), "<= 1"),
            (f"positions of 100 steps of {COUNT:,}", lambda: list(map(stream.positions, range(100))), "<= 0.1"),
            (f"open a cache of {ENTRIES:,} entries", lambda: TensorCache(root / "cache", "latents", "", 1), "<= 0.01"),
            (f"report of {COUNT:,} steps", lambda: write_report(run), "<= 3"),
            (f"rewind {COUNT:,} steps by 10", lambda: metrics.rewind(COUNT - 10), "<= 0.05"),
        ]
        return [(what, seconds(action), target) for what, action, target in rows]
