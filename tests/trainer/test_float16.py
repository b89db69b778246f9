"""float16: gradients keep their direction at real sizes, an overflow costs one step, a gradient of zeros is no step."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from cosmos_rl.checkpoint import layout
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.optim.loss_scale import LossScale
from cosmos_rl.optim.optimizer import Refusal
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SFTTrainer
from cosmos_rl.policy.trainer.rl.batch import Learnable, ScoredBatch
from cosmos_rl.policy.trainer.rl.meter import Meter
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.rollout.sampler import Rollouts
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.nft_runs import nft_toml, nft_trainer
from tests.support.optimizers import optimizer
from tests.support.states import assert_same_state, saved_state
from tests.support.toy_models import ToyModel
from tests.support.toy_tasks import POINT, bump, toy_config, toy_trainer
from tests.support.trainer_runs import train, train_task

SHAPE = (16, 64, 64)
"""65,536 numbers: the latents of SD3 at 512 px."""
SAMPLES, LEVELS, OWN = 1152, 9, 4
"""The samples and noise levels of a published step, 10,368 pairs; the samples of the rank that is looked at."""


# ---- the gradient at the size of SD3, 512 px, 1152 samples ---------------------------------------------------------


class Layer(nn.Module):
    """One convolution by autocast, as the driver of a pipeline runs its transformer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.mix = nn.Conv2d(SHAPE[0], SHAPE[0], 1)
        self._dtype = dtype
        nn.init.normal_(self.mix.weight, std=0.2, generator=torch.Generator().manual_seed(0))

    def forward(self, latents: Tensor, _sigma: Tensor, _labels: Tensor) -> Tensor:
        with torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32):
            return self.mix(latents).to(latents.dtype)


class LayerModel(ToyModel):
    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        super().__init__(Layer(dtype), [POINT.prompt], SHAPE)

    def decode(self, latents: Tensor) -> Tensor:
        return latents


class OneOfMany(Context):
    """One of so many ranks that each has four samples; what the others would add is left out."""

    @property
    def dp_size(self) -> int:
        return SAMPLES // OWN


def applied_gradient(dtype: str) -> tuple[Tensor, bool]:
    """What the optimiser is given for this rank's share of a step of 1152 samples at 9 levels, and whether it is."""
    tables = {
        "train.param_dtype": dtype,
        "train.train_batch_per_replica": SAMPLES,
        "rollout.n_generation": 24,
        "train.train_policy.mini_batch": OWN,
        "policy.diffusers.timesteps_fraction": LEVELS / 10,
    }
    trainer = toy_trainer(
        toy_config(tables), LayerModel(getattr(torch, dtype)), [POINT] * 48, reward_fns={"bump": bump}
    )
    trainer._context = OneOfMany(torch.device("cpu"))
    found: list[Tensor] = []
    params = list(trainer.params.values())
    trainer.optimizer.torch_optimizer.step = lambda: found.append(  # type: ignore[method-assign,assignment]
        torch.cat([p.grad.flatten() for p in params if p.grad is not None])
    )
    samples = trainer._samples(0)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3))
    advantage_N = torch.linspace(-1.0, 1.0, SAMPLES).double()[order]
    scored = ScoredBatch(
        samples=tuple(samples),
        own=cast(Rollouts, None),
        first=0,
        reward_N=torch.zeros(SAMPLES),
        scores={},
        advantage_N=advantage_N,
        used_N=advantage_N,
        kept_N=torch.ones(SAMPLES, dtype=torch.bool),
    )
    latents = {i: randomness.normal(SHAPE, 0, "latents", 0, [i])[0] for i in range(OWN)}
    learnable = Learnable({"clean": torch.stack(list(latents.values()))}, {i: i for i in range(OWN)})
    draws, conditions, meter = trainer._draws(0), trainer._new_conditions(), Meter(())
    result = trainer._optimizer_step(draws, 0, list(range(SAMPLES)), scored, learnable, conditions, meter)
    return torch.cat(found), result.applied


def test_the_gradient_of_a_published_step_survives_float16() -> None:
    exact, _ = applied_gradient("float32")
    for dtype in ("float16", "bfloat16"):
        found, applied = applied_gradient(dtype)
        assert applied
        assert float(torch.cosine_similarity(found, exact, dim=0)) > 0.99, dtype
        assert float(found.norm()) == pytest.approx(float(exact.norm()), rel=0.02), dtype


# ---- the loss scale ------------------------------------------------------------------------------------------------


def test_the_scale_is_halved_by_an_overflow_and_doubled_after_a_long_time() -> None:
    scale = LossScale(growth_interval=3)
    assert scale.value == 2.0**16
    assert scale.lower()
    for _ in range(2):
        scale.record_success()
    assert scale.value == 2.0**15
    again = LossScale(growth_interval=3)
    again.restore(json.loads(json.dumps(scale.state())))
    again.record_success()
    assert again.value == 2.0**16
    steps = 0
    while scale.lower():
        steps += 1
    assert (scale.value, steps) == (2.0**-8, 23)


def test_the_scale_is_divided_out_before_the_norm_is_clipped() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = optimizer(weight, loss_scale=LossScale(), max_grad_norm=10.0, weight_decay=0.0, name="Adam")
    weight.grad = torch.tensor([3.0, 4.0]) * 72 * opt.loss_factor
    result = opt.step(0, scale=1 / 72)
    assert result.grad_norm == pytest.approx(5.0)
    assert opt.torch_optimizer.state[weight]["exp_avg"].tolist() == pytest.approx([0.3, 0.4])  # not clipped to 10


def test_an_overflow_changes_nothing_and_is_not_taken_for_a_broken_run() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    opt = optimizer(weight, loss_scale=LossScale())

    def stepped(gradient: float, loss: float = 1.0) -> Refusal | None:
        weight.grad = torch.tensor([gradient])
        return opt.step(0, loss=loss).refusal

    assert stepped(math.inf) is stepped(math.nan) is Refusal.OVERFLOW
    assert opt.loss_factor == 2.0**14
    assert stepped(1.0, loss=math.nan) is Refusal.NOT_FINITE  # of the forward pass: no smaller scale helps
    assert opt.loss_factor == 2.0**14
    refusals = [stepped(math.inf) for _ in range(30)]
    assert refusals == [Refusal.OVERFLOW] * 22 + [Refusal.NOT_FINITE] * 8
    assert weight.tolist() == [1.0]
    assert not opt.torch_optimizer.state
    assert stepped(1.0) is None


def test_a_gradient_of_zeros_is_applied_only_where_it_can_be_right() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    opt = optimizer(weight)
    for expected, moves in ((True, False), (False, True)):
        weight.grad = torch.tensor([0.0])
        result = opt.step(0, expects_gradient=expected)
        assert result.refusal is (Refusal.ZERO if expected else None)
        assert (weight.item() != 1.0) == moves  # by the weight decay


def kept(run: Path, step: int) -> dict[str, Any]:
    return json.loads((layout.policy_dir(run / "checkpoints", step) / layout.TRAINER_STATE).read_text())["task"]


def compared(run: Path) -> list[Mapping[str, Any]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in line.items() if "time" not in k} for line in lines]


@pytest.mark.slow
def test_overflows_at_the_start_end_no_run_and_a_resume_has_the_same_scale(
    write_toml: Callable[..., Path],
) -> None:
    class LargeScale(SFTTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.optimizer.loss_scale = LossScale(start=2.0**27, growth_interval=3)

    options = ("--train.param_dtype=float16", "--train.max_nonfinite_steps=2", "--train.max_num_steps=12")
    options += ("--train.ckpt.save_freq=4", "--train.ckpt.max_keep=-1", "--train.ema_enable=true")
    config = write_toml()
    run, _ = train_task(functools.partial(build_sft, trainer=LargeScale), config, *options)
    lines, state, progress = compared(run), saved_state(run, 12), kept(run, 12)
    scales = [line["optim/loss_scale"] for line in lines]
    skipped = sum(line["optim/grad_norm"] is None for line in lines)
    assert skipped > 2  # more than may be not finite
    assert 0 < progress["optimizer_steps"] == 12 - skipped
    assert progress["loss_scale"][0] == scales[-1] < 2.0**27
    train_task(functools.partial(build_sft, trainer=LargeScale), config, *options, resume=(run, 4))
    assert compared(run) == lines
    assert kept(run, 12) == progress
    assert_same_state(saved_state(run, 12), state)


def test_steps_whose_gradient_is_zero_are_named_and_end_the_run(
    write_toml: Callable[..., Path],
    use_model: Callable[[type], type],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    @use_model
    class WithoutGradient(SD3Model):
        def training_sft_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            total, weight = super().training_sft_step(*args, **kwargs)
            return 0.0 * total + total.detach(), weight

    monkeypatch.setattr("cosmos_rl.utils.logging.logger.propagate", True)
    config = write_toml()
    with pytest.raises(FloatingPointError, match="the gradient was zero everywhere in 3 steps in a row"):
        train(config, "--train.max_nonfinite_steps=3")
    assert "Step 1: the gradient is zero everywhere although the losses differ" in caplog.text
    run = max(p for p in (config.parent / "out").iterdir() if p.name.isdigit())
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["optim/zero_gradients"] for line in lines] == [1.0, 1.0]


class Deaf(ToyModel):
    """Its output does not depend on its weights, but has a gradient: of zeros."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), [POINT.prompt], (2,))

    def predict(self, latents: Tensor, timestep: Tensor, cond: Any) -> Tensor:
        return latents + 0.0 * self.transformer(latents)

    def decode(self, latents: Tensor) -> Tensor:
        return latents

    def to_media(self, visuals: Tensor) -> Tensor:
        return visuals


def test_nft_reports_a_gradient_of_zeros_unless_all_rewards_are_equal() -> None:
    tables = {"train.train_batch_per_replica": 8, "rollout.n_generation": 8, "train.train_policy.mini_batch": 8}
    for reward, wanted in ((bump, Refusal.ZERO), (lambda media: 1.0, None)):
        trainer = toy_trainer(toy_config(tables), Deaf(), [POINT], reward_fns={"reward": reward})
        report = trainer.train_step(0)
        assert report.refusal is wanted
        assert report.metrics["optim/zero_gradients"] == float(wanted is not None)
        assert report.metrics["optim/steps"] == float(wanted is None)


@pytest.mark.slow
def test_nft_with_real_samples_trains_in_float16_as_in_float32(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path
) -> None:
    data = f'--train.train_policy.data_term={{beta = 0.5, local_dir = "{image_folder}", batch_size = 4}}'
    found = {}
    for dtype in ("float32", "float16"):
        trainer: OnlineTask = nft_trainer(nft_toml(tmp_path, tiny_sd3), data, f"--train.param_dtype={dtype}")
        start = {name: p.detach().clone() for name, p in trainer.params.items()}
        report = trainer.train_step(0)
        assert report.applied
        found[dtype] = report.metrics["optim/grad_norm"]
        assert any(not torch.equal(p.detach(), start[name]) for name, p in trainer.params.items())
    assert found["float16"] == pytest.approx(found["float32"], rel=0.05)
