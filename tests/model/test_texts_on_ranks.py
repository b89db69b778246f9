"""Texts first, on several ranks: the encoders and the transformer's shards are never on the device together."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.tracking.metrics import read_metrics
from tests.support.family_runs import TrainedFamily, family_toml
from tests.support.nft_runs import prompt_file
from tests.support.ranks import train_on_ranks

pytestmark = [pytest.mark.zoo, pytest.mark.process]
CACHE = "--train.train_policy.cache.text=true"


def losses(run: Path) -> list[float]:
    return [line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl") if "train/loss_mean" in line]


def run_apart(folder: Path, config: Path, *options: str, resume_step: int = 0, ranks: int = 2) -> None:
    """Ranks train on the CPU and on a device that it plays: the same numbers, and what takes turns does so."""
    module = "tests.support.texts_on_ranks"
    train_on_ranks(ranks, config, folder, CACHE, *options, module=module, resume_step=resume_step)
    for rank in range(ranks):
        log = json.loads((folder / f"rank_{rank}.json").read_text())
        for called, *present in log:
            assert called in present
            assert len({name.startswith("text_encoder") for name in present}) == 1, (called, present)
        assert {"text_encoder", "transformer"} <= {called for called, *_ in log}
    runs = ["plain", "apart", "again"] if resume_step else ["plain", "apart"]
    plain, *others = (losses(folder / name) for name in runs)
    assert len(plain) == 2
    assert all(other == plain for other in others)


def test_encoders_and_shards_take_turns_while_training_too(tmp_path: Path, write_toml: Callable[..., Path]) -> None:
    """The prompts of validation images bring the encoders back between two steps; a resumed run is the same one."""
    prompts = prompt_file(tmp_path)
    images = ("--validation.enable=true", "--validation.freq=1", f'--validation.dataset.local_dir="{prompts}"')
    options = (*images, "--train.ema_enable=true", "--train.ckpt.save_freq=1", "--train.ckpt.max_keep=-1")
    run_apart(tmp_path, write_toml(lora=False), *options, resume_step=1)


def test_a_single_rank_whose_transformer_is_wrapped_moves_it_too(
    tmp_path: Path, write_toml: Callable[..., Path]
) -> None:
    options = ("--train.rank_invariant=true", "--train.optm_impl=foreach", "--train.train_policy.mini_batch=1")
    run_apart(tmp_path, write_toml(), *options, "--train.global_batch_size=4", ranks=1)


def test_a_whole_packed_base_and_a_frozen_expert_leave_too(tmp_path: Path) -> None:
    family = TrainedFamily("wan2.2", frames=("num_frames", 5), experts=("transformer", "transformer_2"))
    options = ('--policy.lora.quantize_base="int8"', '--policy.diffusers.trained_denoiser="transformer"')
    run_apart(tmp_path, family_toml(tmp_path, family, job="nft"), *options)
