"""What hurts users of such tools, by report number, where no other file has it. See also the files named below.

A01-A05 test_config, test_recipes, test_tracking, test_export · A08, A11 test_data · A25 test_ranks · A26 test_optim
and test_training · A29, A31 test_export, test_lora · A32, A33 test_data · A34, A35, A37 test_resume, test_kill ·
A52 test_lora
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.tracking.metrics import read_metrics
from tests.checkpoint.test_resume import assert_same_state, saved_state
from tests.support.trainer_runs import train


def trace(run: Path) -> np.ndarray:
    keys = ("train/loss_mean", "optim/grad_norm")
    return np.array([[line[key] for key in keys] for line in read_metrics(run / "metrics.jsonl")])


def lora_weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"safetensors/step_{step}/lora/model.safetensors")


def test_a05_state_is_not_mistaken_for_a_pipeline(write_toml: Callable[..., Path]) -> None:
    run = train(write_toml(), "--train.max_num_steps=1")
    config = load_config(write_toml(), [f"--policy.model_name_or_path={run}/checkpoints/step_1/policy"])
    with pytest.raises(UserError, match="exported pipelines are under safetensors/step_<N>"):
        ModelRegistry.build_diffusers_model(config)


@pytest.mark.slow
def test_a24_weights_computed_in_bf16_move_like_those_in_fp32(write_toml: Callable[..., Path]) -> None:
    moved = {}
    for dtype in ("float32", "bfloat16"):
        options = (f"--train.param_dtype={dtype}", "--train.optm_lr=1e-4", "--train.max_num_steps=50")
        run = train(write_toml(), *options, "--train.ckpt.save_freq=25")
        state = saved_state(run, 50)
        assert {value.dtype for key, value in state.items() if not key.endswith(".step")} == {torch.float32}
        start = train(write_toml(), *options, "--train.max_num_steps=1", "--train.optm_lr=1e-30")
        before = saved_state(start, 1)
        moved[dtype] = float(
            torch.stack([(state[k] - before[k]).abs().mean() for k in state if k.startswith("model.")]).mean()
        )
    assert moved["bfloat16"] == pytest.approx(moved["float32"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a27_micro_batches_and_checkpointing_give_one_trace(write_toml: Callable[..., Path], lora: bool) -> None:
    def run(*options: str) -> np.ndarray:
        common = ("--train.train_batch_per_replica=6", "--train.optm_lr=1e-4", "--train.max_num_steps=5")
        return trace(train(write_toml(lora=lora), *common, *options))

    reference = run("--train.train_policy.mini_batch=6", "--policy.model_gradient_checkpointing=false")
    for size in (6, 3, 2, 1):
        found = run(f"--train.train_policy.mini_batch={size}")
        np.testing.assert_allclose(found, reference, rtol=1e-6, atol=1e-6, err_msg=str(size))  # float32 sums


def test_a30_every_key_of_an_export_is_one_of_a_pair(write_toml: Callable[..., Path]) -> None:
    for names in ('["default"]', '["default", "old"]'):
        weights = lora_weights(train(write_toml(), "--train.max_num_steps=1", f"--policy.lora.lora_names={names}"), 1)
        assert all(re.fullmatch(r"transformer\.[\w.]+\.lora_[AB]\.weight", key) for key in weights)
        assert not any(part in key for key in weights for part in ("default", "old", "_orig_mod", "_fsdp"))
        assert len(weights) == 2 * 2 * 4  # two matrices, two blocks, four layers


def test_a36_a_changed_order_of_targets_and_untouched_parameters_resume(write_toml: Callable[..., Path]) -> None:
    # the text side of the last block's attention has no path to the output, so its projections get no gradient
    targets = ["attn.to_q", "attn.add_q_proj", "attn.to_add_out"]
    config, options = write_toml(), ("--train.ckpt.save_freq=2", '--train.optm_lr={global = 1e-2, "to_q" = 1e-3}')
    first = f"--policy.lora.target_modules={targets}".replace("'", '"')
    other = f"--policy.lora.target_modules={targets[::-1]}".replace("'", '"')
    calm = train(config, *options, first)
    run = train(config, *options, first, "--train.max_num_steps=2")
    train(config, *options, other, resume=(run, 2))
    assert_same_state(saved_state(run, 6), saved_state(calm, 6))
