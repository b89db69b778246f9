"""Offline DPO by the shipped trainer on points of the plane, where it is a logistic regression."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmos_rl.data.items import Item, Readable
from cosmos_rl.data.streams import MapStream
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.validation_sets import ValidationSet
from cosmos_rl.policy.trainer.diffusers_trainer.dpo_trainer import DpoTrainer
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding
from cosmos_rl.policy.trainer.diffusers_trainer.noising import Noising
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SftParts
from cosmos_rl.policy.trainer.diffusers_trainer.validation import TestedSet
from tests.support.toy_tasks import POINT, toy_sft_config
from tests.trainer.test_sft_plane import PlaneSftModel, ignore

REWARD = np.array([1.2, -0.6])
"""A point is chosen over another with the probability ``sigmoid(REWARD . (x - x'))``."""
BETA, COUNT = 8.0, 256


class OneVelocity(nn.Module):
    """The same velocity everywhere, 0 at the start: its error less the reference's is ``|w|^2 / 2 - w . u`` for the
    target ``u = noise - clean``, so that the margin of two points with one noise is ``w . (chosen - rejected)``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, latents: Tensor, _sigma: Tensor, _labels: Tensor) -> Tensor:
        return self.w.expand_as(latents)


def preferences(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Chosen and rejected points, ``[COUNT, 2]`` each."""
    rng = np.random.default_rng(seed)
    one, other = rng.normal(size=(2, COUNT, 2))
    wins = rng.random(COUNT) < 1 / (1 + np.exp(-(one - other) @ REWARD))
    return np.where(wins[:, None], one, other), np.where(wins[:, None], other, one)


def items_of(chosen: np.ndarray, rejected: np.ndarray) -> Readable:
    found = []
    for pair in zip(chosen, rejected, strict=True):
        better, worse = (Item(torch.tensor(point, dtype=torch.float32), POINT.prompt) for point in pair)
        found.append(Item(better.visual, POINT.prompt, rejected=worse))
    return Readable(found, ())


def plane_dpo(mini_batch: int = COUNT, auto: dict[str, Any] | None = None, **more: Any) -> DpoTrainer:
    """Full batches of all preferences."""
    tables = {
        "train.train_policy.dpo_auto_beta": auto or {},
        "train.train_policy.type": "dpo",
        "train.train_policy.dpo_beta": BETA,
        "train.train_policy.mini_batch": mini_batch,
        "train.train_batch_per_replica": COUNT,
        "train.max_num_steps": 150,
        "train.optm_lr": 5e-2,
        "train.optm_decay_type": "linear",
        "policy.diffusers.weighting_scheme": "none",
    }
    config, model = toy_sft_config(tables), PlaneSftModel()
    model.transformer = OneVelocity()
    held_out = more.get("held_out")
    parts = SftParts(
        model,
        more.get("data", items_of(*preferences(0))),
        MapStream(COUNT, COUNT, 0),
        Noising(model, Encoding(model, config), config),
        validation=[] if held_out is None else [TestedSet(ValidationSet(config), held_out)],
    )
    trainer = DpoTrainer(config, Context(torch.device("cpu")), parts)
    trainer.start(0)
    return trainer


def logistic_regression(gaps: np.ndarray) -> np.ndarray:
    """The ``w`` that minimises the mean of ``log(1 + exp(BETA / 2 w . gap))``, by Newton's method."""
    w, half = np.zeros(2), BETA / 2
    for _ in range(30):
        p = 1 / (1 + np.exp(-half * gaps @ w))
        gradient = half * (p[:, None] * gaps).mean(0)
        hessian = half**2 * np.einsum("n,ni,nj->ij", p * (1 - p), gaps, gaps) / len(gaps)
        w = w - np.linalg.solve(hessian, gradient)
    return w


def test_the_optimum_is_that_of_the_logistic_regression_and_near_the_reward() -> None:
    trainer = plane_dpo(held_out=items_of(*preferences(1)))
    first = trainer.train_step(0).metrics
    assert first["train/loss_mean"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["train/gradient_factor_mean"] == pytest.approx(0.5)
    before = trainer.validate(1, ignore)
    for step in range(1, trainer.total_steps):
        last = trainer.train_step(step).metrics
    chosen, rejected = preferences(0)
    expected = logistic_regression(chosen - rejected)
    found = trainer.params["w"].detach().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-3)
    # the model's samples move along -w; a margin of -2 / BETA counts as a reward of 1
    np.testing.assert_allclose(-0.5 * BETA * found, REWARD, atol=0.35)
    margin = (chosen - rejected) @ found
    assert last["train/margin_mean"] == pytest.approx(margin.mean(), abs=1e-3)
    assert last["train/accuracy_mean"] == pytest.approx((margin < 0).mean(), abs=0.01)
    after = trainer.validate(trainer.total_steps, ignore)
    assert after.objective is not None
    assert before.objective is not None
    assert after.objective < before.objective
    assert after.metrics["val/accuracy_mean"] > 0.7
    assert [image.prompt for image in after.images] == [POINT.prompt]


def test_a_beta_that_follows_keeps_the_wanted_gradient_and_is_continued() -> None:
    """On the plane the mean size of the margins is that of ``w . gap``."""
    auto = {"target_factor": 0.2, "least": 0.01, "most": 1e6}
    trainer = plane_dpo(64, auto=auto, held_out=items_of(*preferences(1)))
    seen = [trainer.train_step(step).metrics for step in range(3)]
    assert [line["train/dpo_beta_mean"] for line in seen[:2]] == [BETA, BETA]
    first = seen[1]["train/margin_size_mean"]
    assert first > 0.0
    assert seen[2]["train/dpo_beta_mean"] == pytest.approx(2 * np.log(4) / first)
    chosen, rejected = preferences(0)
    sizes = np.abs((chosen - rejected) @ trainer.params["w"].detach().numpy())
    assert trainer.train_step(3).metrics["train/margin_size_mean"] == pytest.approx(sizes.mean(), rel=1e-4)
    state = trainer.state_dict()
    again = plane_dpo(64, auto=auto, held_out=items_of(*preferences(1)))
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.params["w"].data.copy_(trainer.params["w"].data)
    one, other = (task.train_step(4).metrics["train/dpo_beta_mean"] for task in (trainer, again))
    assert one == other
    w = again.params["w"].detach().numpy()
    better, worse = preferences(1)
    fixed = np.log1p(np.exp(BETA / 2 * (better - worse) @ w)).mean()  # validations are compared with each other
    assert again.validate(5, ignore).metrics["val/loss_mean"] == pytest.approx(fixed, rel=1e-5)


def test_neither_micro_batches_nor_the_reference_change_the_gradient() -> None:
    gradients = []
    for size in (COUNT, 32):
        trainer = plane_dpo(size)
        with torch.no_grad():
            trainer.params["w"].copy_(torch.tensor([0.1, 0.2]))
        gradients.append(trainer.compute_gradients(0)[0][0]["w"])
        assert trainer.params["w"].tolist() == pytest.approx([0.1, 0.2])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)
    chosen, rejected = preferences(0)
    gaps = chosen - rejected
    p = 1 / (1 + np.exp(-BETA / 2 * gaps @ np.array([0.1, 0.2])))
    np.testing.assert_allclose(gradients[0], BETA / 2 * (p[:, None] * gaps).mean(0), rtol=1e-4)


def test_a_data_set_without_rejected_ones_is_refused() -> None:
    data = Readable([Item(torch.zeros(2), POINT.prompt, name="three")] * COUNT, ())
    with pytest.raises(UserError, match="sample three: has no rejected image"):
        plane_dpo(data=data).train_step(0)
