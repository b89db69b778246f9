"""CPU time of the epoch that fills the caches of latents and text against an epoch without caches."""

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.images import write_images
from benchmarks.sft_step import BATCH, config_for
from cosmos_rl.data.cache import TensorCache
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.distributed.context import process_group
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SFTTrainer

IMAGES, ROUNDS = 8 * BATCH, 5


def epoch(trainer: SFTTrainer, number: int) -> float:
    """CPU seconds of an epoch."""
    began = time.process_time()
    for step in range(number * IMAGES // BATCH, (number + 1) * IMAGES // BATCH):
        trainer.train_step(step)
    return time.process_time() - began


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    ratios, warm = [], []
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as context:
        folder = Path(name)
        build("sd3", folder / "model", "digits", seed=0)
        write_images(folder / "data", IMAGES, 32)
        pairs = LocalPairs(folder / "data", 32, 32)
        plain = build_sft(config_for(folder, cached=False), context, dataset=pairs)
        cached = build_sft(config_for(folder, cached=True), context, dataset=pairs)
        for trainer in (plain, cached):
            trainer.start(0)
        for number in range(ROUNDS + 1):
            for kind in ("latent", "text"):
                empty = TensorCache(folder / f"cache{number}", kind, "", 2**30)
                setattr(cached.noising.encoding, f"{kind}_cache", empty)
            without, filling = epoch(plain, 2 * number), epoch(cached, 2 * number)
            again = epoch(plain, 2 * number + 1), epoch(cached, 2 * number + 1)
            if number:  # the first round warms up
                ratios.append(filling / without)
                warm.append(again[1] / again[0])
    what = f"SFT epoch of {IMAGES} images that fills the caches, against one without caches"
    result = f"{statistics.median(ratios):.3f} (filled: {statistics.median(warm):.3f})"
    return [(what, result, "<= 1.3")]
