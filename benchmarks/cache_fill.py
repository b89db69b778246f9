"""CPU time of the epoch that fills the cache of latents against an epoch without caches; texts are encoded before."""

import statistics
import tempfile
from pathlib import Path

from benchmarks.images import write_images
from benchmarks.sft_step import BATCH, config_for
from benchmarks.timing import cpu_seconds
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.distributed.context import process_group
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SFTTrainer

IMAGES, ROUNDS = 8 * BATCH, 5


def epoch(trainer: SFTTrainer, number: int) -> float:
    """CPU seconds of an epoch."""
    steps = range(number * IMAGES // BATCH, (number + 1) * IMAGES // BATCH)
    return cpu_seconds(lambda: [trainer.train_step(step) for step in steps])


def with_empty_cache(folder: Path, name: str) -> Config:
    """Settings with caches of their own, which are empty."""
    config = config_for(folder, cached=True)
    cache = config.train.train_policy.cache.model_copy(update={"dir": str(folder / name)})
    job = config.train.train_policy.model_copy(update={"cache": cache})
    return config.model_copy(update={"train": config.train.model_copy(update={"train_policy": job})})


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    ratios, warm = [], []
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as context:
        folder = Path(name)
        build("sd3", folder / "model", "digits", seed=0)
        write_images(folder / "data", IMAGES, 32)
        pairs = LocalPairs(folder / "data", 32, 32)
        for number in range(ROUNDS + 1):
            configs = (config_for(folder, cached=False), with_empty_cache(folder, f"cache{number}"))
            plain, cached = (build_sft(config, context, dataset=pairs) for config in configs)
            for trainer in (plain, cached):
                trainer.start(0)
            without, filling = epoch(plain, 0), epoch(cached, 0)
            again = epoch(plain, 1), epoch(cached, 1)
            if number:  # the first round warms up
                ratios.append(filling / without)
                warm.append(again[1] / again[0])
    what = f"SFT epoch of {IMAGES} images that fills the cache of latents, against one without caches"
    result = f"{statistics.median(ratios):.3f} (filled: {statistics.median(warm):.3f})"
    return [(what, result, "<= 1.3")]
