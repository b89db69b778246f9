"""What ``train.rank_invariant`` costs steps of fine-tuning and of DiffusionNFT: with and without it, taken in turn."""

import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.images import write_images
from benchmarks.sft_step import BATCH, ROUNDS, STEPS, config_for, steps_of
from benchmarks.timing import median_ratio, take_turns
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.distributed.context import process_group
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from tests.support.nft_runs import nft_toml, nft_trainer

_SIZES = {"with it": (1, True), "samples one by one": (1, False), "samples together": (BATCH, False)}
"""Samples of a forward pass, and whether the key is set."""
_MADE = 16
"""Samples of a training step of DiffusionNFT."""


def with_settings(config: Config, mini_batch: int, *, invariant: bool) -> Config:
    """The same with this micro-batch."""
    job = config.train.train_policy.model_copy(update={"mini_batch": mini_batch})
    own = {"optm_impl": "foreach", "global_batch_size": BATCH, "rank_invariant": invariant, "train_policy": job}
    return config.model_copy(update={"train": config.train.model_copy(update=own)})


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as context:
        folder = Path(name)
        build("sd3", folder / "model", "digits", seed=0)
        write_images(folder / "data", 64, 32)
        pairs, base = LocalPairs(folder / "data", 32, 32), config_for(folder, cached=True)
        loops = {
            key: steps_of(build_sft(with_settings(base, size, invariant=on), context, dataset=pairs))
            for key, (size, on) in _SIZES.items()
        }
        rows = _compare(f"SFT step of {BATCH}", loops)
        config = nft_toml(folder, folder / "model", lora=False)
        made = {key: _nft_steps(config, min(size, _MADE), invariant=on) for key, (size, on) in _SIZES.items()}
        return [*rows, *_compare(f"NFT step of {_MADE} samples at 2 noise levels", made)]


def _nft_steps(config: Path, size: int, *, invariant: bool) -> Callable[[], object]:
    """DiffusionNFT's training steps, one a call."""
    options = (f"--train.train_policy.mini_batch={size}", f"--rollout.n_generation_mini_batch={min(size, 4)}")
    own = (
        f"--train.rank_invariant={str(invariant).lower()}",
        "--train.optm_impl=foreach",
        "--train.max_num_steps=1000",
    )
    task, numbers = nft_trainer(config, *options, *own), itertools.count()
    return lambda: task.train_step(next(numbers))


def _compare(what: str, loops: Mapping[str, Callable[[], object]]) -> list[tuple[str, str, str]]:
    times = take_turns(loops, ROUNDS, calls=STEPS)
    return [
        (
            f"{what} on one rank with rank_invariant, against {key} without it",
            f"{median_ratio(times['with it'], times[key]):.2f}",
            "none",
        )
        for key in ("samples one by one", "samples together")
    ]
