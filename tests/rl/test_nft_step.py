"""One training step of the shipped trainer on the plane: its gradient, where it leads, and how much network it runs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.reward import batch_reward
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, toy_config, toy_trainer

LORA = {"r": 4, "lora_alpha": 8.0, "lora_names": ["default", "old"], "init_lora_weights": "gaussian"}


class Recorder:
    """What went through a trainer: the media that were scored, and the network's inputs where a gradient was wanted."""

    def __init__(self, tables: dict[str, Any]) -> None:
        self.config = toy_config({"train.optm_lr": 1e-2, "train.max_num_steps": 2, **tables})
        self.model = PlaneModel(lora=self.config.policy.lora)
        torch.nn.init.normal_(self.model.transformer.residual[-1].weight, std=0.1)
        self.media: list[np.ndarray] = []
        self.noised: list[Tensor] = []
        self.sigma: list[Tensor] = []
        self.model.transformer.register_forward_hook(self._record)
        self.trainer: OnlineTask = toy_trainer(self.config, self.model, [POINT] * 2, reward_fns={"bump": self._score()})

    def _score(self) -> Any:
        @batch_reward
        def recording(media: np.ndarray) -> np.ndarray:
            self.media.append(media)
            return bump(media)

        return recording

    def _record(self, _module: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        if output.requires_grad:
            self.noised.append(inputs[0])
            self.sigma.append(inputs[1])


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize("bounds", [5.0, 20.0])
def test_first_gradient_is_advantage_weighted_matching(lora: dict[str, Any] | None, bounds: float) -> None:
    """From ``v = v_old`` the step goes along ``sum A_i / w_i grad |x_t - t v - x_0|^2``, for any beta and any bound."""
    tables: dict[str, Any] = {
        "train.train_batch_per_replica": 24,
        "rollout.n_generation": 12,
        "train.train_policy.mini_batch": 8,
        "train.train_policy.advantage_low": -bounds,
        "train.train_policy.advantage_high": bounds,
        "policy.diffusers.nft_beta": 0.3,
        "policy.diffusers.timesteps_fraction": 0.5,
        **({} if lora is None else {"policy.lora": lora}),
    }
    run = Recorder(tables)
    run.model.transformer.double()
    params = run.trainer.params

    def expected() -> tuple[Tensor, ...]:
        clean = np.concatenate(run.media)
        reward = bump(clean).reshape(2, 12)  # two groups of one text: they are not compared with each other
        advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std() + 1e-4)
        noised, sigma = torch.cat(run.noised).double(), torch.cat(run.sigma).double()
        levels = len(noised) // 24  # rows: one level of every sample, then the next
        target = torch.from_numpy(np.tile(clean, (levels, 1))).double()
        weight = torch.from_numpy(np.tile(advantage.flatten(), levels))
        velocity = run.model.transformer(noised, sigma, torch.zeros(len(noised), dtype=torch.long))
        error = noised - sigma[:, None] * velocity - target
        size = error.detach().abs().mean(1)
        return torch.autograd.grad((weight * (error**2).mean(1) / size).mean(), list(params.values()))

    (found,), _ = run.trainer.compute_gradients(0)
    assert set(found) == set(params)
    golden = dict(zip(params, expected(), strict=True))
    for name, wanted in golden.items():
        assert float((found[name] - wanted).norm()) <= 1e-6 * float(wanted.norm()), name
    assert any(float(wanted.norm()) > 1e-3 for wanted in golden.values())


@pytest.mark.slow
def test_many_passes_lead_to_the_sampled_optimum() -> None:
    """Without the weights ``w`` the velocity becomes ``v_old + E[(2 r - 1) (v - v_old) given x_t] / beta``.

    That is ``v_old + (2 / beta) Cov(r, v)`` where ``v_old`` is the mean of ``v``; over a finite set of samples it is a
    sum over them.
    """
    count, beta, high = 256, 0.7, 2.0
    tables: dict[str, Any] = {
        "train.train_batch_per_replica": count,
        "rollout.n_generation": count,
        "train.optm_lr": 1e-2,
        "train.train_policy.mini_batch": count,
        "train.train_policy.batch_size_per_optimize": count,
        "train.train_policy.mu_iterations": 400,
        "train.train_policy.advantage_low": -high,
        "train.train_policy.advantage_high": high,
        "policy.diffusers.nft_beta": beta,
        "policy.diffusers.sample.num_steps": 2,
    }
    run = Recorder(tables)
    trainer, model = run.trainer, run.model
    trainer.algorithm = replace(trainer.algorithm, adaptive_weight=False)  # type: ignore[type-var]
    # levels 1 and 1/2, where the samples that can have led to a point are many
    before = {name: value.clone() for name, value in model.transformer.state_dict().items()}
    trainer.train_step(0)
    clean = np.concatenate(run.media).astype(np.float64)
    reward = bump(clean)
    r = ((reward - reward.mean()) / (reward.std() + 1e-4)).clip(-high, high) / (2 * high) + 0.5
    for level, bound in ((1.0, 0.02), (0.5, 0.08)):
        x = (1 - level) * clean + level * np.random.default_rng(0).standard_normal(clean.shape)
        at = (torch.from_numpy(x).float(), torch.full((count,), level), torch.zeros(count, dtype=torch.long))
        with torch.no_grad():
            old = torch.func.functional_call(model.transformer, before, at).double().numpy()
            new = model.transformer(*at).double().numpy()
        gap = ((x[:, None] - (1 - level) * clean) ** 2).sum(-1) / (2 * level**2)
        share = np.exp(-gap) / np.exp(-gap).sum(1, keepdims=True)
        velocity = (x[:, None] - clean) / level
        move = (share[..., None] * (2 * r - 1)[:, None] * (velocity - old[:, None])).sum(1) / beta
        assert np.square(move).mean() > 0.03  # a move worth finding
        assert np.square(new - old - move).sum() <= bound * np.square(move).sum(), level


CASES = {
    "no old, no reference": ({}, [3, 3]),
    "no old": ({"train.train_policy.kl_beta": 0.1}, [4, 4]),
    "no reference": ({"policy.diffusers.weight_copy_decay_type": 1}, [3, 4]),
    "both": ({"policy.diffusers.weight_copy_decay_type": 1, "train.train_policy.kl_beta": 0.1}, [4, 5]),
}


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("case", CASES)
def test_the_number_of_function_evaluations(case: str, guidance: float, lora: dict[str, Any] | None) -> None:
    """Rollout: one per sample and step, twice with guidance. Training, per pair: forwards 1, backwards 2, and the old
    policy and the reference 1 each where they are not the trained policy or not wanted."""
    tables, units = CASES[case]
    tables = {
        "train.train_batch_per_replica": 8,
        "rollout.n_generation": 4,
        "train.train_policy.mini_batch": 4,
        "policy.diffusers.timesteps_fraction": 0.3,
        "policy.diffusers.sample.guidance_scale": guidance,
        **tables,
        **({} if lora is None else {"policy.lora": lora}),
    }
    run = Recorder(tables)
    total = 0
    for step, per_pair in enumerate(units):
        nfe = run.trainer.train_step(step).metrics["train/nfe"]
        total += 8 * 10 * (2 if guidance > 1 else 1) + 8 * 3 * per_pair
        assert nfe == run.model.units == total


def test_the_number_of_function_evaluations_of_several_optimiser_steps() -> None:
    """After the first optimiser step of a round the old policy is another one."""
    tables = {
        "train.train_batch_per_replica": 8,
        "rollout.n_generation": 4,
        "train.train_policy.mini_batch": 2,
        "train.train_policy.batch_size_per_optimize": 4,
        "train.train_policy.mu_iterations": 2,
        "train.train_policy.kl_beta": 0.1,
    }
    run = Recorder(tables)
    per_step = 8 * 10 + 10 * (4 * 4 + 3 * 4 * 5)
    for step in range(2):
        nfe = run.trainer.train_step(step).metrics["train/nfe"]
        assert nfe == run.model.units == (step + 1) * per_step


def test_the_evaluations_of_the_guard_are_counted_too() -> None:
    tables = {
        "train.train_batch_per_replica": 8,
        "rollout.n_generation": 8,
        "train.train_policy.mini_batch": 8,
        "train.train_policy.reward_hacking_guard.enable": True,
        "train.train_policy.reward_hacking_guard.freq": 2,
        "train.train_policy.reward_hacking_guard.samples": 6,
        "policy.diffusers.sample.eval_num_steps": 20,
    }
    run = Recorder(tables)
    run.trainer.start(0)
    look = 6 * 4 + 4 * 10  # held-out samples at 4 levels, and 4 samples whose diversity is measured
    start, step = 6 * 20 + look, 8 * 10 + 8 * 10 * 3
    nfe = [run.trainer.train_step(i).metrics["train/nfe"] for i in range(2)]
    assert nfe == [start + step, start + 2 * step + look]
    assert nfe[-1] == run.model.units


def test_norms_relative_to_the_reference_cost_no_pass() -> None:
    """With a KL term each step has them by quarter of the levels; 1 while the policy is the reference."""
    tables = {"train.train_batch_per_replica": 8, "rollout.n_generation": 8, "train.train_policy.mini_batch": 3}
    run = Recorder({**tables, "train.train_policy.kl_beta": 0.1, "train.optm_lr": 0.1})
    first, second = (run.trainer.train_step(step).metrics for step in range(2))
    quarters = ["0.125", "0.375", "0.625", "0.875"]
    norms = {f"train/velocity_norm_ratio{part}/{level}" for part in ("", "_p90") for level in quarters}
    assert {key for key in first if "norm_ratio" in key} == norms
    assert {first[key] for key in norms} == {1.0}
    assert all(second[f"train/velocity_norm_ratio_p90/{level}"] != 1.0 for level in quarters)
    assert first["train/nfe"] == 8 * 10 + 8 * 10 * (3 + 1)  # rollout, both ways, reference


def test_a_loss_that_is_not_finite_is_named_with_prompt_and_sigma(capsys: pytest.CaptureFixture[str]) -> None:
    tables = {"train.train_batch_per_replica": 8, "rollout.n_generation": 8, "train.train_policy.mini_batch": 8}
    run = Recorder(tables)
    velocity, calls = run.trainer.model.velocity, []

    def poisoned(latents: Tensor, level: Level, cond: Cond, **given: Any) -> Tensor:
        found = velocity(latents, level, cond, **given)
        if found.requires_grad:
            calls.append(float(level.sigma[5]))
            found = found * torch.where(torch.arange(len(found)) == 5, torch.nan, 1.0)[:, None]
        return found

    run.trainer.model.velocity = poisoned
    assert not run.trainer.train_step(0).applied
    printed = capsys.readouterr().out
    assert f"step 1: the loss is not finite, first for 'a point' at noise level {calls[0]:.3g}; " in printed
