"""Any number of ranks gives the result of one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cosmos_rl.tracking.metrics import read_metrics
from tests.ranks import train_on_ranks

GLOBAL = ("--train.global_batch_size=8", "--train.train_policy.mini_batch=2", "--train.ema_enable=true")
VALIDATION = '[validation]\nenable = true\nfreq = 3\ndataset.local_dir = "{}"'


def trace(run: Path) -> np.ndarray:
    keys = ("train/loss_avg", "optimizer/grad_norm")
    return np.array([[line[key] for key in keys] for line in read_metrics(run / "metrics.jsonl")])


@pytest.mark.process
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_two_and_four_ranks_give_the_trace_the_pictures_and_the_export_of_one(
    write_toml: Callable[..., Path], picture_folder: Path, tmp_path: Path, lora: bool
) -> None:
    config = write_toml(VALIDATION.format(picture_folder), lora=lora)
    layouts = {"1": (1, ()), "2": (2, ()), "2x2": (4, ("--policy.parallelism.dp_replicate_size=2",))}
    runs = {
        name: train_on_ranks(count, config, tmp_path / name, *GLOBAL, *options, "--train.optm_lr=1e-3")
        for name, (count, options) in layouts.items()
    }
    reference = trace(runs["1"])
    assert len(reference) == 6
    names = "lora/model.safetensors" if lora else "transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(runs["1"] / "safetensors/step_6" / names)
    for name in ("2", "2x2"):
        # float32 sums in another order: well below what a wrong noise, weight or scale would give
        np.testing.assert_allclose(trace(runs[name]), reference, rtol=1e-6, atol=1e-6, err_msg=name)
        others = load_file(runs[name] / "safetensors/step_6" / names)
        assert others.keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(others[key], value, rtol=1e-4, atol=2e-5, msg=f"{name} {key}")
        held_out = [
            [line["val/avg_loss"] for line in read_metrics(run / "metrics.jsonl") if "val/avg_loss" in line]
            for run in (runs["1"], runs[name])
        ]
        np.testing.assert_allclose(held_out[1], held_out[0], rtol=1e-6, err_msg=name)
        folders = [run / "media/validation/step_6" for run in (runs["1"], runs[name])]
        files = [sorted(p.name for p in folder.glob("*.png")) for folder in folders]
        assert files[0] == files[1]
        assert len(files[0]) == 4
        for file in files[0]:
            one, other = (np.asarray(Image.open(folder / file), dtype=int) for folder in folders)
            assert np.abs(one - other).max() <= 1  # rounding to 8 bits


@pytest.mark.process
def test_four_then_two_then_one_rank_end_like_the_undisturbed_run(
    write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_toml(lora=False)
    options = (*GLOBAL, "--train.optm_lr=1e-3", "--train.ckpt.save_freq=2")
    calm = train_on_ranks(1, config, tmp_path / "calm", *options)
    folder = tmp_path / "moved"
    for count, last, resume in ((4, 2, 0), (2, 4, 2), (1, 6, 4)):
        train_on_ranks(count, config, folder, *options, f"--train.max_num_steps={last}", resume_step=resume)
    np.testing.assert_allclose(trace(folder), trace(calm), rtol=1e-6, atol=1e-6)
    file = "safetensors/step_6/transformer/diffusion_pytorch_model.safetensors"
    for key, value in load_file(calm / file).items():
        torch.testing.assert_close(load_file(folder / file)[key], value, rtol=1e-4, atol=2e-5, msg=key)
