"""The fine-tuning trainer on points of the plane, where the best velocity is a closed form."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.data.items import Item, Readable
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.data.streams import MapStream
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config.validation_sets import list_validation_sets
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding
from cosmos_rl.policy.trainer.diffusers_trainer.noising import Noising
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SftParts, SFTTrainer
from cosmos_rl.policy.trainer.diffusers_trainer.validation import TestedSet
from tests.support.toy_models import Mixture, PlaneModel, PlaneNetwork
from tests.support.toy_tasks import POINT, toy_sft_config

TARGET = Mixture(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), 0.5)
"""What the data is drawn from; the model starts at another mixture."""
LEVELS = 1000


class PlaneSftModel(PlaneModel, DiffuserModel):
    """``DiffuserModel``'s own fine-tuning step without a pipeline; a point is its latent."""

    def __init__(self) -> None:
        super().__init__()
        self.model_str = "toy"
        self.config = toy_sft_config({"policy.diffusers.weighting_scheme": "none"}).policy.diffusers
        self.train_sampling_steps = LEVELS
        self.timestep_map = self.sigma_map = torch.linspace(0.001, 1.0, LEVELS)
        self.scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1))

    @staticmethod
    def supported_model_types() -> list[str]:
        return []

    def text_embedding(self, *_args: Any, **_kwargs: Any) -> dict[str, Tensor | None]:
        raise NotImplementedError

    def visual_embedding(self, *_args: Any, **_kwargs: Any) -> Tensor:
        raise NotImplementedError

    def encode_visuals(self, visuals: Sequence[Tensor], *_size: int, at_once: int | None = None) -> Tensor:
        return torch.stack(list(visuals))


def points(count: int, seed: int) -> Readable:
    drawn = TARGET.draw(count, torch.Generator().manual_seed(seed))
    return Readable([Item(point, POINT.prompt) for point in drawn], ())


def plane_sft(
    mini_batch: int, steps: int = 1, more: dict[str, Any] | None = None, tested: Sequence[dict[str, Any]] = ()
) -> SFTTrainer:
    """Batches of 128 points; ``tested``: what the validation sets hold."""
    tables = {
        "train.train_batch_per_replica": 128,
        "train.train_policy.mini_batch": mini_batch,
        "train.max_num_steps": steps,
        "train.optm_lr": 1e-2,
        "policy.diffusers.weighting_scheme": "none",
        "validation.enable": bool(tested),
        **(more or {}),
    }
    config = toy_sft_config(tables)
    model = PlaneSftModel()
    noising = Noising(model, Encoding(model, config), config)
    sets = [TestedSet(one, **own) for one, own in zip(list_validation_sets(config), tested, strict=True)]
    parts = SftParts(model, points(4096, 0), MapStream(4096, 128, 0), noising, validation=sets)
    trainer = SFTTrainer(config, Context(torch.device("cpu")), parts)
    trainer.start(0)
    return trainer


def ignore(_name: str, _data: dict[str, Any]) -> None:
    """A hook."""


def test_fine_tuning_finds_the_velocity_of_its_data() -> None:
    trainer = plane_sft(mini_batch=128, steps=80, tested=[{"pairs": points(512, 1)}])
    before = trainer.validate(0, ignore)
    for step in range(trainer.total_steps):
        trainer.train_step(step)
    after = trainer.validate(trainer.total_steps, ignore)
    trainer.model.transformer = PlaneNetwork(TARGET)  # the exact velocity
    with torch.no_grad():
        best = trainer.validate(trainer.total_steps, ignore).metrics["val/loss_mean"]
    assert before.objective is not None
    assert after.objective is not None
    assert before.objective > 1.3 * best
    assert after.objective - best < 0.25 * (before.objective - best)
    assert [image.prompt for image in after.images] == [POINT.prompt]


def test_the_gradient_of_a_step_is_that_of_the_mean_over_its_pairs() -> None:
    trainer = plane_sft(mini_batch=32)
    ((gradient,), report) = trainer.compute_gradients(0)
    positions = next(iter(trainer.stream.batches(0, 1)))
    ids = [position.sample_id for position in positions]
    pairs = points(4096, 0)
    clean = torch.stack([pairs[position.index].visual for position in positions])
    seed = toy_sft_config().train.seed
    noise = randomness.normal((2,), seed, "train/noise", 0, ids)
    index = (randomness.uniform(seed, "train/level", 0, ids).double() * LEVELS).long()
    sigma = trainer.model.sigma_map[index][:, None]
    network = PlaneNetwork(PlaneModel().transformer._mixture)
    network.load_state_dict(trainer.model.transformer.state_dict())
    found = network((1 - sigma) * clean + sigma * noise, sigma[:, 0], index)
    loss = ((found - (noise - clean)) ** 2).mean()
    loss.backward()
    assert report.metrics["train/loss_mean"] == pytest.approx(loss.item(), rel=1e-5)
    assert set(gradient) == {name for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_validation_prompts_give_images_and_no_loss() -> None:
    records = [PromptRecord("a point", {"seed": 3}), PromptRecord("another")]
    found = plane_sft(mini_batch=128, tested=[{"prompts": records}]).validate(0, ignore)
    assert (found.metrics, found.objective) == ({}, None)
    assert [image.prompt for image in found.images] == ["a point", "another"]


def test_several_sets_of_pairs_have_a_loss_each_and_the_first_is_the_objective() -> None:
    near, far = points(64, 1), points(96, 2)
    sets = [{"name": "near", "dataset": {"local_dir": "a"}}, {"name": "far", "dataset": {"local_dir": "b"}, "freq": 4}]
    tables = {"validation.sets": sets, "validation.freq": 2}
    prompts = {"prompts": [PromptRecord("a point")]}
    both = plane_sft(128, 6, tables, [{"pairs": near}, {"pairs": far}])
    found = both.validate(4, ignore)
    alone = [plane_sft(128, tested=[{"pairs": pairs}]).validate(0, ignore) for pairs in (near, far)]
    assert found.metrics == {
        key.replace("val/", f"val/{label}/"): value
        for label, one in zip(("near", "far"), alone, strict=True)
        for key, value in one.metrics.items()
    }
    assert found.metrics["val/near/loss_mean"] == found.objective != found.metrics["val/far/loss_mean"]
    assert [image.of_set for image in found.images] == ["near", "far"]
    assert [key for key in both.validate(2, ignore).metrics if "far" in key] == []
    mixed = plane_sft(128, 6, tables, [prompts, {"pairs": far}]).validate(0, ignore)
    assert mixed.objective is None
    assert mixed.metrics["val/far/loss_mean"] == found.metrics["val/far/loss_mean"]
