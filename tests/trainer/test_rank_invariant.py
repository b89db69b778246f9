"""With ``train.rank_invariant`` fine-tuning has the same bits on any number of ranks. Reinforcement learning:
`tests/rl/test_bits_on_ranks.py`."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import load_config
from tests.support.kills import newest_step
from tests.support.nft_runs import Job, forked, run_forked
from tests.support.pairs import marked_folder
from tests.support.patience import wait_until
from tests.support.states import assert_same_bits
from tests.support.trainer_runs import train
from tests.trainer.test_sft_plane import plane_sft

SIZES = [(96, 32), (32, 96), (32, 32), (96, 32), (32, 128), (32, 96), (96, 32), (32, 32), (32, 96), (96, 32)]
"""Four tall, four wide and two square pictures."""
INVARIANT = (
    "--train.rank_invariant=true",
    "--train.optm_impl=foreach",
    "--train.train_policy.mini_batch=1",
    "--train.global_batch_size=4",
)
BUCKETS = "--policy.diffusers.buckets={sizes = [[32, 32], [96, 32], [32, 96]]}"
OF_A_RANK = "train/loss_max"
"""The largest of the ranks' mean losses."""


def test_the_gradient_of_a_step_is_the_one_without_it() -> None:
    ((expected,), report) = plane_sft(mini_batch=1).compute_gradients(0)
    ((found,), same) = plane_sft(mini_batch=1, more={"train.rank_invariant": True}).compute_gradients(0)
    assert same.metrics["train/loss_mean"] == report.metrics["train/loss_mean"]
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--train.train_policy.mini_batch=2", "train.train_policy.mini_batch: found 2; allowed with train.rank_invar"),
        ("--train.global_batch_size=none", "train.global_batch_size: missing; with train.rank_invariant the samples"),
        ("--train.optm_impl=fused", 'train.optm_impl: found "fused"; allowed with train.rank_invariant: "foreach" or'),
        ("--train.optm_name=Muon", 'train.optm_name: found "Muon"; allowed with train.rank_invariant: "AdamW" or'),
        ("--train.fsdp_reduce_dtype=bfloat16", 'train.fsdp_reduce_dtype: found "bfloat16"; allowed with train.rank_'),
        ("--policy.parallelism.dp_shard_size=6", "found true on 6 data parallel ranks; allowed on 1, 2, 4, 8, …"),
        ("--policy.parallelism.cp_size=2", "found true with policy.parallelism.cp_size = 2; allowed: 1"),
        ("--validation.batch_size=2", "validation.batch_size: found 2; allowed with train.rank_invariant: 1"),
    ],
)
def test_what_would_depend_on_the_ranks_is_refused(write_toml: Callable[..., Path], option: str, message: str) -> None:
    config = write_toml('[validation]\nenable = true\ndataset.local_dir = "held_out"')
    options = [*INVARIANT, "--train.global_batch_size=12"]
    load_config(config, options)
    with pytest.raises(UserError) as error:
        load_config(config, [*options, option])
    assert message in str(error.value)


def test_a_run_leaves_torch_as_it_was(write_toml: Callable[..., Path], tmp_path: Path) -> None:
    """Threads and kernels are those of the whole process, in which others compute as well."""
    threads, seen = torch.get_num_threads(), []

    def note(*_: object) -> None:
        seen.append((torch.get_num_threads(), torch.get_deterministic_debug_mode()))

    torch.set_num_threads(2)
    try:
        train(write_toml(), *options_for(tmp_path / "marked", 1), custom_logger_fns=[note])
        note()
        assert seen == [(1, 1), (2, 0)]
    finally:
        torch.set_num_threads(threads)


def options_for(folder: Path, steps: int) -> tuple[str, ...]:
    """Settings of all runs; an epoch is a step on tall and one on wide pictures, in every other one on square ones."""
    data = f'--train.train_policy.dataset.local_dir="{marked_folder(folder, SIZES)}"'
    saves = (f"--train.max_num_steps={steps}", "--train.ckpt.export_safetensors=false", "--train.ema_enable=true")
    return (*INVARIANT, BUCKETS, data, *saves)


@pytest.mark.zoo
@pytest.mark.process
def test_shards_and_replicas_have_the_bits_of_one_rank(write_toml: Callable[..., Path], tmp_path: Path) -> None:
    """All weights in float32, an adapter with dropout in bfloat16, and preferences."""
    held_out = marked_folder(tmp_path / "held_out", SIZES[:3])
    rejected = marked_folder(tmp_path / "rejected", [(width, height) for height, width in SIZES])
    validation = f'[validation]\nenable = true\nfreq = 3\nn_generation = 1\ndataset.local_dir = "{held_out}"'
    configs = {
        "all": (write_toml(validation, lora=False), ()),
        "adapter": (
            write_toml(name="lora.toml"),
            ("--train.param_dtype=bfloat16", "--policy.lora.lora_dropout=0.25"),
        ),
        "dpo": (
            write_toml(name="dpo.toml"),
            ("--train.train_policy.type=dpo", f"--train.train_policy.dataset.rejected_dir={rejected}"),
        ),
    }
    options, steps = options_for(tmp_path / "marked", 3), 3

    def job(what: str, ranks: str, replicas: int = 1) -> Job:
        config, own = configs[what]
        sizes = (f"--policy.parallelism.dp_replicate_size={replicas}",)
        return Job(config, tmp_path / f"{what}_{ranks}", (*options, *own, *sizes))

    run_forked([job(what, "1") for what in configs], 1, tmp_path)
    run_forked([job(what, "2") for what in configs], 2, tmp_path)
    run_forked([job("all", "4"), job("all", "2x2", 2), job("adapter", "4x1", 4)], 4, tmp_path)
    compared = [("all", "2"), ("all", "4"), ("all", "2x2"), ("adapter", "2"), ("adapter", "4x1"), ("dpo", "2")]
    for what, ranks in compared:
        assert_same_bits(tmp_path / f"{what}_{ranks}", tmp_path / f"{what}_1", steps, OF_A_RANK)


@pytest.mark.zoo
@pytest.mark.process
def test_killed_on_two_ranks_in_an_epoch_both_two_and_one_end_with_the_bits_of_one(
    write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    steps, config = 10, write_toml(lora=False)
    saves = ("--train.ckpt.save_freq=3", "--train.ckpt.save_mode=sync")
    options = (*options_for(tmp_path / "marked", steps), *saves)
    calm, killed, moved = (tmp_path / name for name in ("calm", "killed", "moved"))
    run_forked([Job(config, calm, options)], 1, tmp_path)
    first, second = forked([Job(config, killed, options, killed_after=5)], 2, tmp_path)
    wait_until(lambda: first.exitcode is not None, "the end of rank 0")
    assert first.exitcode == -signal.SIGKILL
    second.kill()
    second.join()
    saved = newest_step(killed)
    assert saved == 3  # inside an epoch: these end after 2, 5, 7 and 10 steps
    shutil.copytree(killed, moved)
    run_forked([Job(config, killed, options, saved)], 2, tmp_path)
    run_forked([Job(config, moved, options, saved)], 1, tmp_path)
    for run in (killed, moved):
        assert_same_bits(run, calm, steps, OF_A_RANK)
