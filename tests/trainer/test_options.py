"""Training options: which parameters learn, how fast, and at which noise levels."""

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from safetensors.torch import load_file

from cosmos_rl.diffusion.schedule import density, loss_weight
from cosmos_rl.errors import UserError
from cosmos_rl.optim.classes import Hyperparameters
from cosmos_rl.optim.optimizer import Optimizer
from cosmos_rl.optim.schedule import LrSchedule
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.trainer_runs import train

FILE = "transformer/diffusion_pytorch_model.safetensors"


def changed(run: Path, base: Path) -> set[str]:
    """Names of the parameters that training changed."""
    before, after = load_file(base / FILE), load_file(run / "safetensors/step_2" / FILE)
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("option", "is_trained"),
    [
        ('--policy.freeze_pattern=["transformer_blocks.0", "pos_embed"]', lambda n: "blocks.0" not in n),
        ('--policy.trainable_pattern=["attn.to_q"]', lambda n: "attn.to_q" in n),
        ('--policy.trainable_map={".*" = false, "proj_out" = true}', lambda n: "proj_out" in n),
    ],
)
def test_patterns_decide_what_is_trained(
    write_toml: Callable[..., Path], tiny_sd3: Path, option: str, is_trained: Callable[[str], bool]
) -> None:
    names = changed(train(write_toml(lora=False), "--train.max_num_steps=2", option), tiny_sd3)
    assert names
    assert all(is_trained(name) for name in names)


def test_patterns_that_match_nothing_or_freeze_everything_are_refused(write_toml: Callable[..., Path]) -> None:
    config = write_toml(lora=False)
    with pytest.raises(UserError, match=r"policy.freeze_pattern: 'blocks\.99' matches no parameter"):
        train(config, '--policy.freeze_pattern=["blocks.99"]')
    with pytest.raises(UserError, match="nothing is left to train"):
        train(config, '--policy.freeze_pattern=[".*"]')


def test_learning_rates_by_name_follow_one_schedule() -> None:
    params = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("a.q", "a.k", "b")}
    schedule = LrSchedule.build(4, 0, None, "linear", 0.0, 0.0)
    settings = Hyperparameters("Adam", (0.9, 0.9), 1e-12, 0.0, "foreach", {})
    options = {"settings": settings, "lr": 1.0, "schedule": schedule, "max_grad_norm": 0.0}
    optimizer = Optimizer(params, lr_patterns={r"\.q$": 0.1, "^a": 0.01}, **options)  # type: ignore[arg-type]
    for step in range(2):
        for param in params.values():
            param.grad = torch.ones(1)
        optimizer.step(step)
    # Adam moves by the learning rate when the gradient is constant; factors are 1 and 0.75
    moved = {name: -float(param.detach()) for name, param in params.items()}
    assert moved == pytest.approx({"a.q": 0.175, "a.k": 0.0175, "b": 1.75}, rel=1e-5)
    with pytest.raises(UserError, match="no trained parameter has a name that matches 'c'"):
        Optimizer(params, lr_patterns={"c": 1.0}, **options)  # type: ignore[arg-type]


def test_learning_rate_tables_reach_the_optimiser(write_toml: Callable[..., Path], tiny_sd3: Path) -> None:
    options = (
        "--train.max_num_steps=2",
        "--train.optm_weight_decay=0",
        '--train.optm_lr={global = 1e-3, "to_q" = 1e-30}',
    )
    before = load_file(tiny_sd3 / FILE)
    after = load_file(train(write_toml(lora=False), *options) / "safetensors/step_2" / FILE)
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    assert max(value for name, value in moved.items() if "to_q" in name) == 0.0
    assert moved["proj_out.weight"] > 1e-4


def test_eight_bit_optimisers_say_what_they_need(
    write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)  # as where it is not installed
    with pytest.raises(UserError, match="needs torchao: pip install torchao"):
        train(write_toml(), '--train.optm_name="AdamW8bit"')


def test_densities_are_those_of_diffusers() -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(1000, generator=generator)
    theirs = compute_density_for_timestep_sampling(
        "mode", 1000, mode_scale=1.29, generator=torch.Generator().manual_seed(0)
    )
    np.testing.assert_allclose(density(uniform, "mode", mode_scale=1.29).numpy(), theirs.numpy(), atol=1e-6)
    for scheme in ("none", "sigma_sqrt", "cosmap"):
        assert torch.equal(density(uniform, scheme), uniform.double())


def test_loss_weights_are_those_of_diffusers() -> None:
    sigma = torch.linspace(0.01, 1.0, 50)
    for scheme in ("sigma_sqrt", "cosmap"):
        ours = loss_weight(sigma, scheme)
        assert ours is not None
        torch.testing.assert_close(ours, compute_loss_weighting_for_sd3(scheme, sigma))
    assert loss_weight(sigma, "logit_normal") is None


@pytest.mark.parametrize("scheme", ["mode", "sigma_sqrt", "cosmap", "none"])
def test_every_weighting_scheme_trains(write_toml: Callable[..., Path], scheme: str) -> None:
    run = train(write_toml(), f'--policy.diffusers.weighting_scheme="{scheme}"', "--train.max_num_steps=2")
    values = [line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl")]
    assert all(math.isfinite(value) and value > 0 for value in values)


def test_test_size_holds_out_the_first_samples(write_toml: Callable[..., Path]) -> None:
    config = write_toml("[validation]\nenable = true\nfreq = 1\n")
    run = train(config, "--train.train_policy.dataset.test_size=4", "--train.max_num_steps=3")
    lines = read_metrics(run / "metrics.jsonl")
    assert all(math.isfinite(line["val/loss_mean"]) for line in lines)
    assert [line["train/epoch"] for line in lines] == [0, 0, 1]  # eight samples are left, four per step
    with pytest.raises(UserError, match="takes 12 of 12 samples"):
        train(config, "--train.train_policy.dataset.test_size=12")
    for given in (["a prompt"], lambda config: ["a prompt"]):
        with pytest.raises(UserError, match="test_size = 4 holds out training samples, and the script gives"):
            train(config, "--train.train_policy.dataset.test_size=4", val_dataset=given)


@pytest.mark.slow
def test_an_unreadable_validation_image_is_left_out_named_and_counted(
    write_toml: Callable[..., Path], image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def validated(broken: set[str], removed: set[str], name: str) -> dict[str, float]:
        folder = tmp_path / name
        shutil.copytree(image_folder, folder)
        for stem in broken:
            (folder / f"{stem}.png").write_bytes(b"not an image")
        for stem in removed:
            (folder / f"{stem}.png").unlink()
            (folder / f"{stem}.json").unlink()
        table = f'[validation]\nenable = true\nfreq = 1\nbatch_size = 1\ndataset.local_dir = "{folder}"\n'
        run = train(write_toml(table), "--train.max_num_steps=1", "--train.train_policy.max_skipped_frac=0.2")
        return read_metrics(run / "metrics.jsonl")[-1]

    # the last ones: noise is keyed by the position, so that the others keep theirs when these are not there at all
    found, reference = validated({"010", "011"}, set(), "broken"), validated(set(), {"010", "011"}, "whole")
    assert found["val/loss_mean"] == pytest.approx(reference["val/loss_mean"], rel=1e-6)
    assert (found["val/skipped"], reference["val/skipped"]) == (2, 0)
    assert capsys.readouterr().out.count("left out, validation continues without: ") == 2
    assert math.isfinite(validated({"000"}, set(), "the first")["val/loss_mean"])
    with pytest.raises(UserError, match=r"3 of 12 samples cannot be read, more than"):
        validated({"000", "001", "002"}, set(), "too many")


def test_broken_images_are_counted_in_the_metrics(
    write_toml: Callable[..., Path], image_folder: Path, tmp_path: Path
) -> None:

    folder = tmp_path / "some_broken"
    shutil.copytree(image_folder, folder)
    (folder / "003.png").write_bytes(b"")
    options = (f'--train.train_policy.dataset.local_dir="{folder}"', "--train.train_policy.max_skipped_frac=0.1")
    lines = read_metrics(train(write_toml(), *options) / "metrics.jsonl")
    assert lines[-1]["data/skipped"] == 1
    (folder / "005.png").write_bytes(b"")
    with pytest.raises(UserError, match="2 of 12 samples cannot be read"):
        train(write_toml(), *options)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--train.global_batch_size=14",
            r"one step takes 14 \(train.global_batch_size\) .* lower train.global_batch_size",
        ),
        (
            "--train.train_batch_per_replica=14",
            r"14 \(train.train_batch_per_replica x ranks\) .* lower train.train_batch_per_replica",
        ),
    ],
)
def test_a_batch_that_is_too_large_is_named_by_the_key_that_sets_it(
    write_toml: Callable[..., Path], option: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(write_toml(), option)
