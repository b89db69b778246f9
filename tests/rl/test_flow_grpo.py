"""FlowGRPO and DDRL by the shipped trainer on the plane: ratio, gradient, where they lead, what they run."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_grpo import TrustRegion
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import cross_check
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.trainer.rl.algorithm import MicroBatch, Rows
from cosmos_rl.policy.trainer.rl.flow_grpo import FlowGrpo
from cosmos_rl.policy.trainer.rl.meter import count_moving
from cosmos_rl.policy.trainer.rl.online import StartNoise
from cosmos_rl.reward import batch_reward
from tests.support.flow_grpo_plane import FLOW, JOB, LAGGED_LORA, LORA, Run, tables_of
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import (
    POINT,
    bump,
    measure_plane,
    plane_data_loss,
    plane_task,
    toy_config,
    toy_trainer,
)

POLICIES = pytest.mark.parametrize("lora", [{}, {"policy.lora": LORA}], ids=["all weights", "lora"])


@POLICIES
@pytest.mark.parametrize("options", [{}, {JOB + "kl_mask_threshold": 1e-9}, {JOB + "kl_beta": 0.1}])
def test_on_policy_the_ratio_is_exactly_1(lora: dict[str, Any], options: dict[str, Any]) -> None:
    run = Run(tables_of(**lora, **options))
    for step in range(3):
        report = run.trainer.train_step(step)
        assert report.applied
        assert report.metrics["train/ratio_deviation_max"] == 0.0
        assert report.metrics["train/step_kl_max"] == 0.0
        stopped = [value for key, value in report.metrics.items() if "clipped" in key or "masked" in key]
        assert stopped
        assert not any(stopped)
    assert set(run.recorded[0]) == {"state", "noise", "step", "g", "s", "next"}  # no velocities: nothing asks for them


@POLICIES
@pytest.mark.parametrize("trained", [range(9), (2, 5, 8)], ids=["all", "list"])
def test_the_first_gradient_is_that_of_the_log_probabilities(lora: dict[str, Any], trained: Sequence[int]) -> None:
    """``-sum A_i grad ln p(z' given z)`` over the recorded steps, mean over elements, in float64."""
    run = Run(tables_of(**lora, **{JOB + "steps": {"choose": "list", "indices": list(trained)}}))
    run.model.transformer.double()
    params = run.trainer.params

    def expected() -> tuple[Tensor, ...]:
        reward = bump(np.concatenate(run.media)).reshape(2, 8)
        advantage = torch.from_numpy((reward - reward.mean(1, keepdims=True)) / (reward.std() + 1e-4)).flatten()
        rows = {name: torch.cat([part[name] for part in run.recorded]).double() for name in ("state", "noise")}
        grid, total = (
            np.linspace(1.0, 0.0, 11, dtype=np.float32).astype(np.float64),
            torch.zeros((), dtype=torch.double),
        )
        for column, index in enumerate(trained):
            t, u = grid[index], grid[index + 1]
            a = 0.7 * np.sqrt(t / (1 - (u if t == 1 else t)))
            slope, std = (1 + a**2 * (1 - t) / (2 * t)) * (u - t), a * np.sqrt(t - u)
            state, noise = rows["state"][:, column], rows["noise"][:, column]
            sigma = torch.full((16,), t)
            velocity = run.model.transformer(state, sigma, torch.zeros(16, dtype=torch.long))
            error = std * noise - slope * (velocity - velocity.detach())  # of the recorded next state from the mean
            total = total + (advantage * (error**2).mean(1) / (2 * std**2)).sum() / (16 * len(trained))
        return torch.autograd.grad(total, list(params.values()))

    (found,), _ = run.trainer.compute_gradients(0)
    golden = dict(zip(params, expected(), strict=True))
    assert set(found) == set(golden)
    for name, wanted in golden.items():
        assert float((found[name] - wanted).norm()) <= 1e-6 * float(wanted.norm()), name
    assert any(float(wanted.norm()) > 1e-3 for wanted in golden.values())


@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("trained", [[1, 6], [2, 5, 8]], ids=["two steps", "three steps"])
def test_the_shares_of_the_steps_in_the_gradient_have_a_closed_form(trained: list[int], size: int) -> None:
    """On policy the gradient of a row with respect to its velocity is ``-A (g / s) xi`` over the number of elements, so
    its norm is ``|A| |g| |xi| / s`` but for what all rows share."""
    run = Run(tables_of(**{JOB + "steps": {"choose": "list", "indices": trained}, JOB + "mini_batch": size}))
    metrics = run.trainer.train_step(0).metrics
    reward = bump(np.concatenate(run.media)).reshape(2, 8)
    advantage = np.abs(reward - reward.mean(1, keepdims=True)).flatten()
    rows = {name: torch.cat([part[name] for part in run.recorded]).double().numpy() for name in run.recorded[0]}
    gains = np.abs(rows["g"] / rows["s"]) * np.linalg.norm(rows["noise"], axis=2)
    wanted = (advantage[:, None] * gains).sum(0)
    wanted /= wanted.sum()
    found = {key: value for key, value in metrics.items() if "gradient_share" in key}
    assert list(found) == [f"train/gradient_share/{step}" for step in trained]
    assert list(found.values()) == pytest.approx(wanted.tolist(), rel=1e-4)
    assert sum(found.values()) == pytest.approx(1.0)
    assert max(wanted) > 1.2 * min(wanted)


def test_the_shares_are_unknown_where_no_row_has_a_gradient() -> None:
    same = batch_reward(lambda media: np.ones(len(media)))
    trainer = toy_trainer(toy_config(tables_of()), PlaneModel(), [POINT] * 2, reward_fns={"same": same})
    shares = [value for key, value in trainer.train_step(0).metrics.items() if "gradient_share" in key]
    assert len(shares) == 9
    assert np.isnan(shares).all()


@pytest.mark.parametrize("size", [1, 3, 16])
def test_micro_batches_do_not_change_the_gradient(size: int) -> None:
    found = []
    for mini_batch in (8, size):
        tables = tables_of(**{JOB + "kl_beta": 0.1, JOB + "norm_penalty": 0.2})
        run = Run(tables)
        run.model.transformer.double()
        run.trainer._job = run.trainer._job.model_copy(update={"mini_batch": mini_batch})
        (gradients,), _ = run.trainer.compute_gradients(0)
        found.append(gradients)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-12)


def test_several_optimiser_steps_compare_with_the_recorded_velocities() -> None:
    run = Run(tables_of(**{JOB + "batch_size_per_optimize": 8, JOB + "mu_iterations": 2}))
    report = run.trainer.train_step(0)
    assert "velocity" in run.recorded[0]
    assert report.metrics["optim/steps"] == 4
    assert 1e-4 < report.metrics["train/ratio_deviation_max"] < 1
    assert report.metrics["train/step_kl_max"] > 0
    assert report.metrics["train/step_kl_nats_mean"] == pytest.approx(2 * report.metrics["train/step_kl_mean"])


def test_the_recorded_velocities_are_those_of_training() -> None:
    """A weight that does not move leaves every ratio at 1, but for the last bits of another batch size."""
    run = Run(tables_of(**{JOB + "batch_size_per_optimize": 8, JOB + "mini_batch": 4, "train.optm_lr": 1e-12}))
    assert run.trainer.train_step(0).metrics["train/ratio_deviation_max"] < 1e-5


def test_a_mask_stops_rows_from_the_second_pass_on() -> None:
    options = {JOB + "mu_iterations": 4, JOB + "kl_mask_threshold": 1e-6}
    for passes, some in ((1, False), (4, True)):
        report = Run(tables_of(**{**options, JOB + "mu_iterations": passes})).trainer.train_step(0)
        masked = sum(report.metrics[f"train/masked_{sign}_mean"] for sign in ("positive", "negative"))
        assert (masked > 0) is some


@pytest.mark.parametrize("lora", [{}, {"policy.lora": LAGGED_LORA}], ids=["all weights", "lora"])
def test_a_lagging_policy_makes_the_samples(lora: dict[str, Any]) -> None:
    """The schedule of type 1 lets the old policy fall behind little by little; the ratio is not 1 any more."""
    run = Run(tables_of(**{"policy.diffusers.weight_copy_decay_type": 1, **lora}))
    deviations = [run.trainer.train_step(step).metrics["train/ratio_deviation_max"] for step in range(8)]
    assert deviations[0] < 1e-5
    assert deviations[-1] > 1e-3
    on_policy = Run(tables_of(**{"policy.diffusers.weight_copy_decay_type": 1, JOB + "on_policy": True, **lora}))
    assert [on_policy.trainer.train_step(step).metrics["train/ratio_deviation_max"] for step in range(3)] == [0.0] * 3


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_the_number_of_function_evaluations(guidance: float, kl_beta: float) -> None:
    """Per trained step forwards 1, backwards 2 and the reference 1; all twice with guidance, in training too."""
    steps = {"choose": "window", "size": 3, "elsewhere": "euler"}
    sample = {**FLOW, "guidance_scale": guidance}
    run = Run(tables_of(**{"policy.diffusers.sample": sample, JOB + "kl_beta": kl_beta, JOB + "steps": steps}))
    nfe = run.trainer.train_step(0).metrics["train/nfe"]
    assert nfe == run.model.units == (16 * 10 + 16 * 3 * (3 + (kl_beta > 0))) * (2 if guidance > 1 else 1)
    plan = plan_online(run.config)
    assert (plan.sigmas, plan.pairs, plan.old_forwards, plan.keeps_old) == (3, 48, 0, False)
    assert plan.forwards == (1 + (kl_beta > 0)) * 3 * 16 // 8


@pytest.mark.parametrize(
    "steps",
    [
        {"choose": "window", "size": 2, "within": 0.5},
        {"choose": "list", "indices": [0, -1, -1]},
        {"choose": "random"},
    ],
    ids=["window", "list", "random"],
)
def test_chosen_steps_differ_from_step_to_step_and_not_from_sample_to_sample(steps: dict[str, Any]) -> None:
    """Of all chunks of a step, and in every run of one seed, wherever it begins."""
    chunks = {"rollout.n_generation_mini_batch": 4, "policy.diffusers.timesteps_fraction": 0.4}
    tables = tables_of(**{JOB + "steps": steps, **chunks})
    runs = [Run(tables), Run(tables)]
    chosen = []
    for run, first in zip(runs, (0, 3), strict=True):
        for step in range(first, 6):
            run.trainer.train_step(step)
        parts = [set(map(tuple, recorded["step"].tolist())) for recorded in run.recorded]
        assert len(parts) == 4 * (6 - first)
        chosen.append([set.union(*parts[start : start + 4]) for start in range(0, len(parts), 4)])
    assert all(len(one) == 1 for one in chosen[0])
    assert len(set.union(*chosen[0])) > 1
    assert chosen[1] == chosen[0][3:]


def test_samples_of_a_group_may_start_from_one_noise() -> None:
    run = Run(tables_of(**{"policy.diffusers.sample": {**FLOW, "same_initial_noise": True}}))
    run.trainer.train_step(0)
    start = torch.cat([recorded["state"] for recorded in run.recorded])[:, 0].reshape(2, 8, 2)
    assert torch.equal(start, start[:, :1].expand_as(start))
    assert not torch.equal(start[0], start[1])
    assert len(np.unique(np.concatenate(run.media), axis=0)) == 16


@pytest.mark.parametrize(
    "options",
    [
        {},
        {JOB + "logprob_weight": "guard"},
        {JOB + "kl_mask_threshold": 1e-3, JOB + "mu_iterations": 2},
        {"policy.diffusers.sample": {**FLOW, "solver": "cps", "noise_level": 0.8}},
    ],
    ids=["clip", "guard", "mask", "cps"],
)
@pytest.mark.slow
def test_the_reward_rises(options: dict[str, Any]) -> None:
    tables = tables_of(
        **{
            "train.train_batch_per_replica": 128,
            "rollout.n_generation": 64,
            JOB + "mini_batch": 128,
            **options,
        }
    )
    run = Run(tables)
    rewards = [run.trainer.train_step(step).metrics["reward/mean"] for step in range(8)]
    assert rewards[-1] > rewards[0] + 0.1, rewards


@pytest.mark.zoo
def test_a_window_of_two_steps_learns_with_less_than_half_of_the_evaluations() -> None:
    """Flow-GRPO-Fast: 200 steps from a reward of 0.2, the other steps without noise; measured by the ODE."""
    tables = {
        "policy.diffusers.sample": FLOW,
        JOB + "trainer_type": "flow_grpo",
        JOB + "steps": {"choose": "window", "size": 2, "within": 0.5, "elsewhere": "euler"},
        JOB + "epsilon_low": 0.05,
        JOB + "kl_beta": 0.0,
        JOB + "mini_batch": 512,
        JOB + "batch_size_per_optimize": 512,
    }
    task, model = plane_task(0, 200, tables)
    reports = [task.train_step(step) for step in range(200)]
    assert reports[-1].metrics["train/nfe"] == model.units == 512 * 200 * (10 + 2 * 3)
    assert model.units < 0.5 * 512 * 200 * (10 + 9 * 3)  # all nine steps with noise
    assert measure_plane(model).reward >= 0.8


@pytest.mark.zoo
def test_a_distance_to_the_reference_keeps_the_samples_near_it() -> None:
    ends = []
    for kl_beta in (0.0, 1.0):
        tables = tables_of(
            **{
                "train.train_batch_per_replica": 256,
                "rollout.n_generation": 128,
                "train.optm_lr": 4e-3,
                "train.max_num_steps": 40,
                JOB + "mini_batch": 256,
                JOB + "kl_beta": kl_beta,
            }
        )
        model, config = PlaneModel(), toy_config(tables)
        trainer = toy_trainer(config, model, [POINT] * 2, reward_fns={"bump": bump})
        for step in range(40):
            trainer.train_step(step)
        ends.append(measure_plane(model))
    free, held = ends
    assert free.to_base > 1.0
    assert held.to_base < 0.6 * free.to_base
    assert held.to_tilt < free.to_tilt


def test_ddrl_takes_data_in_place_of_a_reference() -> None:
    """Its data term is part of the loss, and a transform makes weights of the advantages."""
    tables = tables_of(
        **{
            JOB + "trainer_type": "ddrl",
            JOB + "data_term": {"beta": 0.5, "local_dir": "pairs"},
            JOB + "advantage_transform": "centred_exp_reward",
        }
    )
    run = Run(tables)
    data = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    shares: list[float] = []

    def data_loss(step: int, number: int, levels: Level, start: StartNoise) -> Iterator[Tensor]:
        assert torch.equal(levels.sigma, run.trainer._sampler.trained_levels().sigma[:9])
        level = run.model.training_level(torch.full((64,), 0.5))
        velocity = run.model.velocity(0.5 * data, level, run.model.encode_prompts(["a point"] * 64))
        loss = ((velocity + data) ** 2).mean()
        shares.append(float(loss.detach()))
        yield loss

    run.trainer._data_loss = data_loss
    report = run.trainer.train_step(0)
    assert run.trainer.algorithm.name == "DDRL"
    found = report.metrics
    assert found["train/data_loss_mean"] == pytest.approx(shares[0])
    assert found["train/loss_mean"] == pytest.approx(found["train/policy_loss_mean"] + 0.5 * shares[0], rel=1e-6)
    reward = bump(run.media[0]).reshape(2, 8)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std() + 1e-4)
    assert found["train/policy_loss_mean"] == pytest.approx(-np.clip(1 - np.exp(-advantage), -5, 5).mean(), abs=1e-5)


@pytest.mark.parametrize("transform", ["identity", "centred_exp_reward"])
def test_the_reward_rises_with_data_in_place_of_a_reference(transform: str) -> None:
    tables = tables_of(
        **{
            "train.train_batch_per_replica": 128,
            "rollout.n_generation": 64,
            "policy.diffusers.sample": {**FLOW, "num_steps": 6},
            JOB + "mini_batch": 128,
            JOB + "trainer_type": "ddrl",
            JOB + "data_term": {"beta": 0.02, "local_dir": "pairs", "batch_size": 64},
            JOB + "advantage_transform": transform,
        }
    )
    run = Run(tables)
    run.trainer._data_loss = functools.partial(plane_data_loss, run.model, 0, 64)
    rewards = [run.trainer.train_step(step).metrics["reward/mean"] for step in range(8)]
    assert rewards[-1] > rewards[0] + 0.1, rewards


def test_settings_become_those_of_the_loss() -> None:
    config = toy_config(
        tables_of(**{JOB + "epsilon_low": 1e-3, JOB + "epsilon_high": 2e-3, JOB + "logprob_weight": "guard"})
    )
    algorithm = FlowGrpo.from_config(config)
    assert algorithm.region == TrustRegion(1e-3, 2e-3, scale="guard")
    tables = tables_of()
    del tables[JOB + "epsilon_low"]
    assert FlowGrpo.from_config(toy_config(tables)).region == TrustRegion(1e-4, 1e-4)


def test_advantages_are_transformed_and_then_bounded() -> None:
    changes = {JOB + "advantage_transform": "centred_exp_reward", JOB + "advantage_low": -4.0}
    found = FlowGrpo.from_config(toy_config(tables_of(**changes))).values(torch.tensor([-3.0, -1.0, 0.0, 6.0]))
    assert found.tolist() == pytest.approx([-4.0, 1 - np.e, 0.0, 1 - np.exp(-6.0)])


@pytest.mark.parametrize("scale", ["normalised", "unit", "ve", "guard"])
def test_the_distance_to_the_reference_has_the_weight_of_its_step(scale: str) -> None:
    """``<(g d)^2>`` over ``2 s^2``, as it is, or in coordinates of exploding variance; without advantages it is all."""
    algorithm = FlowGrpo.from_config(toy_config(tables_of(**{JOB + "logprob_weight": scale})))
    draw = np.random.default_rng(0).normal(size=(3, 4, 2))
    state, velocity, reference, noise = (torch.from_numpy(part).float() for part in draw.transpose(1, 0, 2))
    g, s, following = np.array([-0.1, -0.2, -0.3]), np.array([0.5, 0.4, 0.3]), np.array([0.8, 0.5, 0.2])
    data = {name: torch.tensor(value) for name, value in {"g": g, "s": s, "next": following}.items()}
    level = PlaneModel().training_level(torch.tensor([0.9, 0.7, 0.5]))
    weight = torch.tensor([1.0, 2.0, 0.0])
    micro = MicroBatch(
        state,
        level,
        weight,
        torch.zeros(3),
        [POINT.prompt] * 3,
        {**data, "noise": noise},
        frozen={"reference": reference},
    )
    loss, terms = algorithm.loss(velocity, micro, None, 0.3)
    moved = (g[:, None] * (velocity - reference).numpy()) ** 2
    factor = {"normalised": 1 / (2 * s**2), "guard": 1 / (2 * s**2), "unit": 1.0, "ve": 1 / (1 - following) ** 2}
    expected = moved.mean(1) * factor[scale]
    np.testing.assert_allclose(terms["kl_loss"].numpy(), expected, rtol=1e-5)
    assert float(loss) == pytest.approx(0.3 * float((expected * weight.numpy()).sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"policy.diffusers.sample": {**FLOW, "deterministic_sampling": True}}, "learns from the noise of the steps"),
        ({JOB + "steps": {"choose": "list", "indices": [3, 9]}}, "different ones from 0 to 8, or -1"),
        ({JOB + "steps": {"choose": "list"}}, "found 0 trained steps"),
        ({JOB + "steps": {"choose": "window", "size": 10}}, "found 10 trained steps; allowed: 1 to 9"),
        ({JOB + "trainer_type": "ddrl"}, "data_term.beta: found 0.0; allowed: more than 0"),
        ({JOB + "trainer_type": "diffusion_nft", JOB + "on_policy": True}, "on_policy: found true; allowed: false"),
        ({"policy.lora": LORA, "policy.diffusers.weight_copy_decay_type": 1}, '"old", which samples'),
        ({JOB + "reset_optimizer_with_reference": True}, "false without a reference that moves"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], problem: str) -> None:
    assert any(problem in line for line in cross_check(toy_config(tables_of(**changes))))


def test_a_sampler_of_a_users_own_cannot_be_recorded() -> None:
    class Own(PlaneModel):
        def pipeline_with_logprob(self, **keywords: Any) -> Any:
            return super().pipeline_with_logprob(**keywords)

    trainer = toy_trainer(toy_config(tables_of()), Own(), [POINT] * 2, reward_fns={"bump": bump})
    with pytest.raises(UserError, match="Own has a pipeline_with_logprob of its own, whose steps cannot be recorded"):
        trainer.train_step(0)


def test_the_algorithm_is_data() -> None:
    algorithm = FlowGrpo.from_config(toy_config(tables_of()))
    assert replace(algorithm, guidance=2.0).guidance == 2.0
    assert algorithm.rollout_policy == "default"
    assert replace(algorithm, lagged=True).rollout_policy == "old"


@pytest.mark.parametrize("trainer", ["flow_grpo", "diffusion_nft"])
@POLICIES
def test_the_reference_is_renewed(trainer: str, lora: dict[str, Any]) -> None:
    """Every two steps it becomes the trained policy: the distance to it begins at 0 again."""
    changes = {JOB + "kl_beta": 0.1, JOB + "reference_reset_interval": 2, JOB + "trainer_type": trainer}
    if trainer == "diffusion_nft":
        quiet = {**FLOW, "solver": "euler", "deterministic_sampling": True}
        changes["policy.diffusers.sample"] = quiet
        lora = dict.fromkeys(lora, LAGGED_LORA)
    run = Run(tables_of(**changes, **lora))
    distances = [run.trainer.train_step(step).metrics["train/kl_loss_mean"] for step in range(5)]
    assert [distance == 0.0 for distance in distances] == [True, False, True, False, True]
    kept = run.trainer.extra_tensors()["reference"]
    assert kept.keys() == run.trainer.params.keys()
    fresh = Run(tables_of(**{**changes, JOB + "reference_reset_interval": 3}, **lora))
    before = {name: value.clone() for name, value in fresh.trainer.extra_tensors()["reference"].items()}
    fresh.trainer.train_step(0)
    assert all(torch.equal(before[name], value) for name, value in fresh.trainer.extra_tensors()["reference"].items())


def test_the_moments_may_be_forgotten_with_the_reference() -> None:
    changes = {JOB + "kl_beta": 0.1, JOB + "reference_reset_interval": 2, JOB + "reset_optimizer_with_reference": True}
    run = Run(tables_of(**changes))
    kept = []
    for step in range(3):
        run.trainer.train_step(step)
        kept.append(bool(run.trainer.optimizer.torch_optimizer.state))
    assert kept == [True, False, True]


def test_rows_that_a_trust_region_stops_are_no_reason_to_expect_a_gradient() -> None:
    rows = Rows(
        prompts=[POINT.prompt] * 4,
        level=PlaneModel().training_level(torch.full((4,), 0.5)),
        weight=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        value=torch.tensor([0.0, 2.0, -1.0, 3.0]),
        data={},
    )
    assert count_moving({}, rows, 0.0) == 2
    assert count_moving({"clipped": torch.tensor([0.0, 1.0, 0.0, 0.0])}, rows, 0.0) == 1
    masked = {"masked_positive": torch.tensor([0.0, 1.0, 0.0, 0.0]), "masked_negative": torch.tensor([0.0, 0, 1.0, 0])}
    assert count_moving(masked, rows, 0.0) == 0
    assert count_moving({}, rows, 2.0) == 2
