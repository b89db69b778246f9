"""GARDO in the trainer's step: the gate on the distance to the reference, and advantages by how samples differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import cross_check
from cosmos_rl.policy.trainer.rl.gardo import KlGate
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.reward import batch_reward
from cosmos_rl.reward.features import thumbnails
from tests.support.nft_runs import record_rows
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, toy_config, toy_trainer

JOB = "train.train_policy."
FLOW = {
    JOB + "trainer_type": "flow_grpo",
    JOB + "on_policy": True,
    "policy.diffusers.sample": {"num_steps": 5, "guidance_scale": 1.0, "solver": "flow", "noise_level": 0.7},
}
NFT = {"policy.diffusers.sample.num_steps": 5}
HERE = "tests.rl.test_gardo:"
FEATURES = np.array([[1.0, 0, 0], [0.8, 0.6, 0], [0, 1, 0], [0, 0, 1]])


@batch_reward
def height(media: np.ndarray) -> np.ndarray:
    return media[:, 1].astype(np.float64)


@batch_reward
def leftwards(media: np.ndarray) -> np.ndarray:
    return -media[:, 0].astype(np.float64)


@batch_reward
def golden_rewards(media: np.ndarray) -> list[float]:
    return [0.9, 0.8, 0.2, 0.1] * (len(media) // 4)


def golden_features(media: np.ndarray) -> np.ndarray:
    return np.concatenate([FEATURES * scale for scale in range(1, len(media) // 4 + 1)])


def one_number(media: np.ndarray) -> np.ndarray:
    return media[:, 0]


def not_finite(media: np.ndarray) -> np.ndarray:
    return media * np.nan


def failing(media: np.ndarray) -> np.ndarray:
    raise RuntimeError("no weights here")


def trainer_of(tables: dict[str, Any], rewards: dict[str, Any]) -> OnlineTask:
    common = {
        "train.train_batch_per_replica": 16,
        "rollout.n_generation": 8,
        JOB + "mini_batch": 8,
        JOB + "kl_beta": 0.5,
        **tables,
    }
    task = toy_trainer(toy_config(common), PlaneModel(), [POINT] * 2, reward_fns=rewards)

    def load() -> None:
        torch.nn.init.normal_(task.model.transformer.residual[-1].weight, std=0.3)

    task.policies.load_reference(load)
    return task


GATED = {JOB + "kl_gate": {"rewards": ["height", "leftwards"], "share": 0.2}, JOB + "teacher": "given by the test"}
REWARDS = {"bump": bump, "height": (height, 0.0), "leftwards": (leftwards, 0.0)}


@pytest.mark.parametrize("trainer", [NFT, FLOW], ids=["velocities", "steps"])
def test_the_distance_counts_for_the_most_uncertain_samples_alone(trainer: dict[str, Any]) -> None:
    """The gradient of the gated distance is that of all rows' distances with the gate as their factors; its rows are
    found again from the media by NumPy."""
    gated, free = (
        trainer_of({**trainer, **GATED}, REWARDS),
        trainer_of({**trainer, **GATED, JOB + "kl_gate": {}}, REWARDS),
    )
    kept: dict[OnlineTask, list[Any]] = {gated: [], free: []}
    for task, micros in kept.items():
        inner = task.algorithm

        class Keeping:
            def __getattr__(self, name: str, inner: Any = inner) -> Any:
                return getattr(inner, name)

            def loss(self, velocity: Any, micro: Any, *more: Any, inner: Any = inner, micros: Any = micros) -> Any:
                loss, terms = inner.loss(velocity, micro, *more)
                micros.append((micro, terms["kl_loss"]))
                return loss, terms

        task.algorithm = Keeping()  # pyright: ignore[reportAttributeAccessIssue]
    reports = {task: task.train_step(0) for task in kept}
    weight = torch.cat([micro.kl_weight for micro, _ in kept[gated]])
    own, whole = (torch.cat([kl for _, kl in kept[task]]) for task in (gated, free))
    torch.testing.assert_close(own, whole * weight)
    assert reports[gated].metrics["train/kl_loss_mean"] == pytest.approx(float((whole * weight).mean()))
    assert reports[gated].metrics["train/kl_gated_ratio"] == pytest.approx(3 / 16)  # round(0.2 * 16)
    assert "train/kl_gated_ratio" not in reports[free].metrics
    assert float(weight.sum()) * 16 == 3 * len(weight)

    scored = gated_batch(trainer)
    ranks = {name: values.argsort().argsort() / 15 for name, values in scored.items()}
    uncertainty = ranks["bump"] - (ranks["height"] + ranks["leftwards"]) / 2
    chosen = np.flatnonzero(weight[:16])  # rows are one of every sample, then the next one
    assert sorted(uncertainty[chosen]) == pytest.approx(sorted(uncertainty)[-3:])  # equal ones may take turns


def gated_batch(trainer: dict[str, Any]) -> dict[str, np.ndarray]:
    """The scores of the first step, sample by sample."""
    media: list[np.ndarray] = []

    @batch_reward
    def keeping(given: np.ndarray) -> np.ndarray:
        media.append(given)
        return np.zeros(len(given))

    trainer_of({**trainer, **GATED}, {**REWARDS, "keeping": (keeping, 0.0)}).train_step(0)
    every: dict[str, Callable[..., Any]] = {"bump": bump, "height": height, "leftwards": leftwards}
    return {name: np.asarray(function(np.concatenate(media))) for name, function in every.items()}


def test_the_gradient_of_the_gated_distance_is_that_of_its_rows() -> None:
    """With rewards that are all equal there is no other loss."""

    @batch_reward
    def constant(media: np.ndarray) -> np.ndarray:
        return np.full(len(media), 0.5)

    rewards = {"constant": constant, "height": (height, 0.0), "leftwards": (leftwards, 0.0)}
    task = trainer_of({**FLOW, **GATED}, rewards)
    rows = record_rows(task)
    ((found, *_), _) = task.compute_gradients(0)
    (row,) = rows
    assert row.kl_weight is not None
    assert 0 < row.kl_weight.sum() < len(row.kl_weight)
    other = trainer_of({**FLOW, **GATED}, rewards)
    micro = other.algorithm.micro_batch(row, slice(None), torch.device("cpu"))
    cond = other.model.encode_prompts([POINT.prompt] * len(row.prompts))
    with torch.no_grad(), other.policies.using("reference"):
        reference = other.model.velocity(micro.state, micro.level, cond)
    velocity = other.model.velocity(micro.state, micro.level, cond)
    distance_R = ((micro.data["g"][:, None] * (velocity - reference)) ** 2).mean(1) / (2 * micro.data["s"] ** 2)
    (0.5 * (distance_R * row.kl_weight).mean()).backward()
    for name, param in other.params.items():
        assert param.grad is not None
        torch.testing.assert_close(found[name], param.grad, rtol=2e-4, atol=1e-7)


def test_golden_features_and_rewards_have_their_golden_advantages_in_a_step() -> None:
    """The numbers of the paper's formula, centred; the length of a feature does not count."""
    tables = {
        **NFT,
        JOB + "diversity_features": HERE + "golden_features",
        "rollout.n_generation": 4,
        JOB + "kl_beta": 0.0,
    }
    task = toy_trainer(
        toy_config({"train.train_batch_per_replica": 8, JOB + "mini_batch": 8, **tables}),
        PlaneModel(),
        [POINT] * 2,
        reward_fns={"golden": golden_rewards},
    )
    rows = record_rows(task)
    metrics = task.train_step(0).metrics
    paper = np.array([0.177778, 0.133333, -0.3, -0.4])
    centred = np.tile(paper - paper.mean(), 2)
    assert rows[0].value[:8].tolist() == pytest.approx(list(centred / 10 + 0.5), abs=1e-6)  # r of DiffusionNFT
    assert metrics["adv/nearest_distance"] == pytest.approx((0.2 + 0.2 + 0.4 + 1.0) / 4)
    assert metrics["adv/mean"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (HERE + "one_number", r"gave an array \[8\] for 8 samples; allowed: finite \[8, D\]"),
        (HERE + "not_finite", "numbers that are not finite"),
        (HERE + "failing", "RuntimeError: no weights here"),
        (HERE + "absent", 'has no function "absent"'),
    ],
)
def test_features_that_cannot_be_used_end_the_run(function: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        sizes = {"train.train_batch_per_replica": 8, "rollout.n_generation": 2}
        config = toy_config({**NFT, **sizes, JOB + "diversity_features": function})
        toy_trainer(config, PlaneModel(), [POINT] * 4, reward_fns={"bump": bump}).train_step(0)
    assert "train.train_policy.diversity_features" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({**GATED, JOB + "kl_beta": 0.0, JOB + "teacher": ""}, "kl_beta"),
        ({JOB + "kl_gate": {"rewards": ["height"], "share": 0.5}}, "kl_gate.share"),
        ({JOB + "trainer_type": "online_dpo", JOB + "kl_gate": {"rewards": ["height"]}}, "kl_gate.rewards"),
        ({JOB + "trainer_type": "online_dpo", JOB + "diversity_features": HERE + "failing"}, "diversity_features"),
        ({JOB + "normalise_rewards": "each", JOB + "diversity_features": HERE + "failing"}, "normalise_rewards"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(changes: dict[str, Any], key: str) -> None:
    sizes = {"train.train_batch_per_replica": 8, "rollout.n_generation": 2}
    config = toy_config({JOB + "kl_beta": 0.1, "policy.diffusers.weight_copy_decay_type": 0, **sizes, **changes})
    assert [line.partition(":")[0] for line in cross_check(config)] == [JOB + key]


def test_an_auxiliary_reward_is_measured_and_not_trained_on() -> None:
    for name in ("bump", "unknown"):
        with pytest.raises(UserError, match=f'kl_gate.rewards: found "{name}"; allowed: .*"height", "leftwards"'):
            trainer_of({**NFT, JOB + "kl_gate": {"rewards": [name]}}, REWARDS)


def test_the_share_of_the_gate_is_continued() -> None:
    task = trainer_of({**NFT, **GATED}, REWARDS)
    task.train_step(0)
    state = task.state_dict()
    assert len(state["kl_gate"]["means"]) == 1
    gate = KlGate(task._job, task._scoring.rewards)
    gate.load_state_dict({"share": 0.07, "means": [0.1, 0.2]})
    assert gate.state_dict() == {"share": 0.07, "means": [0.1, 0.2]}


def test_a_gate_that_a_checkpoint_did_not_have_begins_with_its_own_share() -> None:
    saved = trainer_of(NFT, REWARDS).state_dict()["kl_gate"]
    task = trainer_of({**NFT, **GATED}, REWARDS)
    gate = KlGate(task._job, task._scoring.rewards)
    gate.load_state_dict({**saved, "share": 0.1})
    assert gate.state_dict() == {"share": 0.2, "means": []}


def test_thumbnails_differ_by_colour_and_place_and_not_by_brightness(tmp_path: Path) -> None:
    media = np.zeros((3, 20, 30, 3), dtype=np.uint8)
    media[0, :10] = 200
    media[1, :10] = 255
    media[1, 10:] = 55  # the first one, brighter
    media[2, 10:] = 200
    found = thumbnails(media)
    assert found.shape == (3, 192)
    np.testing.assert_allclose(found[1], found[0], atol=1e-9)
    cosine = found[0] @ found[2] / np.linalg.norm(found[0]) / np.linalg.norm(found[2])
    assert cosine < -0.5
    assert thumbnails(np.repeat(media[:, None], 4, axis=1)).shape == (3, 4 * 192)
