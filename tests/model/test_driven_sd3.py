"""SD3 by the driver against the class written by hand: the same numbers in training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from tests.support.family_runs import SD3, TEXTS, DrivenSD3, family_toml
from tests.support.nft_runs import nft_trainer

MODELS = {"driven": DrivenSD3, "written": SD3Model}


def build(folder: Path, kind: str, use_model: Callable[[type], type], images: Path) -> DiffuserModel:
    use_model(MODELS[kind])
    config = load_config(family_toml(folder, SD3, job="sft", images=images), [])
    model: Any = build_model(config, Context(torch.device("cpu")), rest_on_cpu=False)
    assert isinstance(model, DrivenModel) == (kind == "driven")
    return model


def loss_and_gradient(model: DiffuserModel) -> tuple[Tensor, dict[str, Tensor]]:
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    clean = model.encode_visuals(list(pixels), 32, 32)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(2))
    with model.eval_mode():
        cond = model.encode_prompts(TEXTS)
        total, weight = model.training_sft_step(clean, cond, timestep=torch.tensor([50, 500, 999]), noise=noise)
    (total / weight).backward()
    params = model.trainable_parameters()
    return total.detach() / weight, {name: p.grad for name, p in params.items() if p.grad is not None}


def test_fine_tuning_has_the_same_loss_and_gradient(
    tmp_path: Path, image_folder: Path, use_model: Callable[[type], type]
) -> None:
    (loss, gradient), (other_loss, other) = (
        loss_and_gradient(build(tmp_path, kind, use_model, image_folder)) for kind in MODELS
    )
    assert float(loss) == pytest.approx(float(other_loss), rel=1e-6)
    assert gradient.keys() == other.keys()
    largest = max(float(value.abs().max()) for value in other.values())
    assert largest > 0
    assert max(float((gradient[name] - other[name]).abs().max()) for name in other) <= 1e-6 * largest


def test_levels_and_velocities_with_guidance_are_the_same(
    tmp_path: Path, image_folder: Path, use_model: Callable[[type], type]
) -> None:
    found: list[Any] = []
    for kind in MODELS:
        model = build(tmp_path, kind, use_model, image_folder)
        levels, x = model.sampling_levels(9), torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(3))
        with torch.no_grad(), model.eval_mode():
            cond = model.encode_prompts(TEXTS, "blurred")
            level = levels.rows(torch.tensor([0, 4, 8]))
            found.append((levels, [model.velocity(x, level, cond, guidance=value) for value in (1.0, 4.0)]))
    (levels, velocities), (other_levels, others) = found
    assert torch.equal(levels.t, other_levels.t)
    assert torch.equal(levels.sigma, other_levels.sigma)
    for ours, theirs in zip(velocities, others, strict=True):
        assert float((ours - theirs).abs().max()) <= 2e-6 * float(theirs.abs().max())


def test_reinforcement_learning_takes_the_same_steps(tmp_path: Path, use_model: Callable[[type], type]) -> None:
    losses, weights = [], []
    for kind in MODELS:
        use_model(MODELS[kind])
        trainer = nft_trainer(family_toml(tmp_path, SD3, job="nft"), "--train.optm_lr=1e-3")
        steps = [trainer.train_step(step).metrics for step in range(2)]
        names = ("train/loss_mean", "optim/grad_norm", "train/kl_loss_mean")
        losses.append([metrics[name] for metrics in steps for name in names])
        weights.append({name: p.detach().clone() for name, p in trainer.params.items()})
    # rewards are of bytes of media, and a byte may be rounded to its other side
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-7)
    assert weights[0].keys() == weights[1].keys()
    apart = [float((value - weights[1][name]).abs().max()) for name, value in weights[0].items()]
    assert max(apart) <= 1e-5
