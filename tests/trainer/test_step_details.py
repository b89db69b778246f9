"""What a training step does, part by part, against formulas of its own: a bug that both sides of a resume or all ranks
share shows only here."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cosmos_rl.data.items import Item
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.optim.optimizer import Refusal
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.diffusers_trainer.noising import Noising
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SFTTrainer
from cosmos_rl.policy.trainer.rl.algorithm import Draws, Rows, Share
from cosmos_rl.policy.trainer.rl.nft import DiffusionNft
from cosmos_rl.policy.trainer.rl.online import OnlineTask, StartNoise
from cosmos_rl.tools.dataset.diffusers_dataset import training_pairs, validation_data
from tests.support.nft_runs import nft_toml, nft_trainer, record_rows
from tests.support.toy_models import TEXT, PlaneModel, ToyModel
from tests.support.toy_tasks import POINT, bump, toy_config, toy_trainer

LORA = {"r": 4, "lora_alpha": 8.0, "lora_names": ["default", "old"], "init_lora_weights": "gaussian"}
EIGHT = {"train.train_batch_per_replica": 8, "rollout.n_generation": 8, "train.train_policy.mini_batch": 4}


def plane_trainer(tables: dict[str, Any]) -> OnlineTask:
    config = toy_config({"train.optm_lr": 1e-2, **EIGHT, **tables})
    model = PlaneModel(lora=config.policy.lora)
    nn.init.normal_(model.transformer.residual[-1].weight, std=0.1)
    return toy_trainer(config, model, [POINT], reward_fns={"bump": bump})


def weights_of(trainer: OnlineTask | SFTTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.params.values()]).double()


def recorded_weights(trainer: OnlineTask | SFTTrainer) -> list[Tensor]:
    """The weights now, and after each step that is applied."""
    found, step = [weights_of(trainer)], trainer.optimizer.torch_optimizer.step

    def note() -> None:
        step()
        found.append(weights_of(trainer))

    trainer.optimizer.torch_optimizer.step = note  # type: ignore[method-assign,assignment]
    return found


def average_by_hand(weights: Sequence[Tensor], bound: float) -> Tensor:
    """Of the start and what followed: step ``k`` keeps ``min((1 + k) / (10 + k), bound)`` of the average."""
    average = weights[0]
    for k, now in enumerate(weights[1:]):
        keep = min((1 + k) / (10 + k), bound)
        average = keep * average + (1 - keep) * now
    return average


def recording_noise(noises: list[Tensor]) -> type[SD3Model]:
    """A model that keeps the noise of each sample of its flow-matching loss."""

    class Recording(SD3Model):
        def training_sft_step(self, *args: Any, noise: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
            noises.extend(noise.clone())
            return super().training_sft_step(*args, noise=noise, **kwargs)

    return Recording


def sft_trainer(config: Path, *options: str) -> SFTTrainer:
    loaded = load_config(config, list(options))
    given = {"dataset": training_pairs, "val_dataset": validation_data}
    trainer = build_sft(loaded, Context(torch.device("cpu")), **given)
    trainer.start(0)
    return trainer


# ---- weights and averages ------------------------------------------------------------------------------------------


def test_the_average_of_a_reinforced_run_is_that_of_its_weights() -> None:
    trainer = plane_trainer({"train.ema_enable": True, "train.ema_decay": 0.2, "train.train_policy.mu_iterations": 2})
    weights = recorded_weights(trainer)
    for step in range(2):
        trainer.train_step(step)
    assert len(weights) == 5
    assert trainer.ema is not None
    found = torch.cat([value.flatten() for value in trainer.ema.shadow.values()]).double()
    torch.testing.assert_close(found, average_by_hand(weights, 0.2), rtol=0, atol=1e-7)
    assert (found - weights[-1]).abs().max() > 1e-3


def test_fine_tuning_averages_follows_the_warm_up_validates_the_average_and_draws_fresh_noise(
    write_toml: Callable[..., Path],
    image_folder: Path,
    use_model: Callable[[type], type],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noises: list[Tensor] = []
    use_model(recording_noise(noises))
    config = write_toml(f'[validation]\nenable = true\ndataset.local_dir = "{image_folder}"')
    trainer = sft_trainer(config, "--train.ema_enable=true", "--train.optm_warmup_steps=4")
    weights, grads = recorded_weights(trainer), []
    clip = torch.nn.utils.clip_grad_norm_

    def note_clipped(params: list[nn.Parameter], bound: float) -> Tensor:
        norm = clip(params, bound)
        grads.append(torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in params]))
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", note_clipped)
    reported = [trainer.train_step(step).metrics["optim/learning_rate"] for step in range(3)]
    assert trainer.ema is not None
    found = torch.cat([value.flatten() for value in trainer.ema.shadow.values()]).double()
    torch.testing.assert_close(found, average_by_hand(weights, 0.9999), rtol=0, atol=1e-7)

    rates = [0.0, 1e-2 / 3, 2e-2 / 3]
    assert reported == pytest.approx(rates)
    expected = adamw_by_hand(weights[0].numpy(), [grad.double().numpy() for grad in grads], rates, 1e-6, 0.01)
    np.testing.assert_allclose(weights[-1].numpy(), expected, rtol=0, atol=1e-6)
    assert np.abs(expected - weights[0].numpy()).max() > 5e-3

    assert len({row.numpy().tobytes() for row in noises}) == len(noises) == 12

    def silent(name: str, data: dict[str, Any]) -> None:
        pass

    with torch.no_grad(), trainer.model.eval_mode():
        live = trainer.validators[0].held_out_metrics(silent)["val/loss_mean"]
        with trainer.ema.average_parameters():
            averaged = trainer.validators[0].held_out_metrics(silent)["val/loss_mean"]
    assert trainer.validate(3, silent).metrics["val/loss_mean"] == averaged != live


def adamw_by_hand(
    start: np.ndarray, grads: Sequence[np.ndarray], rates: Sequence[float], eps: float, decay: float
) -> np.ndarray:
    """Kingma and Ba 2015, algorithm 1, with decoupled weight decay (Loshchilov and Hutter 2019), betas 0.9, 0.999."""
    weight, mean, square = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for number, (grad, rate) in enumerate(zip(grads, rates, strict=True), 1):
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        weight -= rate * decay * weight
        weight -= rate * (mean / (1 - 0.9**number)) / (np.sqrt(square / (1 - 0.999**number)) + eps)
    return weight


# ---- dropout and modes ---------------------------------------------------------------------------------------------


def test_dropout_acts_in_the_trained_policy_alone_and_is_seeded() -> None:
    grads = []
    for state in (1, 2):
        trainer = plane_trainer({"policy.lora": {**LORA, "lora_dropout": 0.5}, "train.train_policy.kl_beta": 0.1})
        with torch.no_grad():
            for param in trainer.params.values():
                param.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
        model, seen = trainer.model, []
        model.transformer.register_forward_hook(
            lambda module, inputs, output, seen=seen: (
                seen.append((module.training, inputs, output.detach()))
                if output.requires_grad
                else seen.append((module.training, None, None))
            )
        )
        held: list[Tensor] = []
        trainer.optimizer.torch_optimizer.step = lambda held=held, trainer=trainer: held.append(  # type: ignore[method-assign,assignment]
            torch.cat([p.grad.flatten() for p in trainer.params.values() if p.grad is not None])
        )
        torch.manual_seed(state)
        trainer.train_step(0)
        grads.append(held[0])
        trained = [entry for entry in seen if entry[1] is not None]
        frozen = [entry for entry in seen if entry[1] is None]
        assert trained
        assert all(training for training, _, _ in trained)
        assert len(frozen) >= len(trained)
        assert not any(training for training, _, _ in frozen)
        with torch.no_grad(), model.eval_mode():
            for _, inputs, output in trained:
                assert (model.transformer(*inputs) - output).abs().mean() > 1e-3
    assert torch.equal(*grads)  # whatever was drawn before


def test_dropout_acts_in_fine_tuning_and_is_seeded(write_toml: Callable[..., Path]) -> None:
    config, second = write_toml(), []
    for state, dropout in ((1, 0.5), (2, 0.5), (1, 0.0)):
        trainer = sft_trainer(config, f"--policy.lora.lora_dropout={dropout}")
        torch.manual_seed(state)
        second.append([trainer.train_step(step).metrics["train/loss_mean"] for step in range(2)][1])
    assert second[0] == second[1]  # whatever was drawn before
    assert second[2] != second[0]


def test_guidance_goes_from_the_negative_to_the_positive() -> None:
    class Labelled(ToyModel):
        def predict(self, latents: Tensor, timestep: Tensor, cond: Cond) -> Tensor:
            return latents * cond.text[TEXT][:, None]

        def decode(self, latents: Tensor) -> Tensor:
            return latents

    model = Labelled(nn.Linear(1, 1), ["zero", "one", "two"], (2,))  # the empty prompt is 3
    latents = torch.ones(2, 2)
    found = model.velocity(
        latents, model.training_level(torch.ones(2)), model.encode_prompts(["one", "two"], ""), guidance=5.0
    )
    assert found[:, 0].tolist() == [3 + 5 * (1 - 3), 3 + 5 * (2 - 3)]


# ---- draws ---------------------------------------------------------------------------------------------------------


class Encoder:
    """Latents and conditions without a model."""

    def latents(self, items: Sequence[Item]) -> Tensor:
        return torch.zeros(len(items), 1, 2, 2)

    def conditions(self, prompts: Sequence[str]) -> Cond:
        self.prompts = list(prompts)
        return Cond(text={TEXT: torch.zeros(len(prompts), 1)})


def noising(**diffusers: Any) -> tuple[Noising, Encoder]:
    config = Config.from_dict({"policy": {"is_diffusers": True, "diffusers": diffusers}, "train": {"seed": 5}})
    encoder = Encoder()
    return Noising(
        cast(Any, SimpleNamespace(conditional_frames=(0, 0), train_sampling_steps=1000)), cast(Any, encoder), config
    ), encoder


def test_sigmas_are_those_of_numpy() -> None:
    ids = list(range(4000))
    items = [Item(torch.zeros(3, 2, 2), f"number {i}") for i in ids]
    normal = randomness.scalar_normal(5, "train/level", 3, ids).numpy()
    uniform = randomness.uniform(5, "train/level", 3, ids).numpy()
    cases = {
        "logit_normal": ({"logit_mean": 0.4, "logit_std": 0.3}, 1 / (1 + np.exp(-(0.4 + 0.3 * normal)))),
        "none": ({}, uniform),
        "mode": (
            {"mode_scale": 1.0},
            1 - uniform - 1.0 * (np.cos(np.pi / 2 * uniform) ** 2 - 1 + uniform),
        ),
    }
    for scheme, (options, u) in cases.items():
        made = noising(weighting_scheme=scheme, **options)[0].prepare("train", 3, ids, items, 0.0)
        assert np.array_equal(made.index.numpy(), np.clip(np.floor(u * 1000), 0, 999)), scheme
    index = noising(weighting_scheme="logit_normal", logit_mean=0.4, logit_std=0.3)[0]
    level = (index.prepare("train", 3, ids, items, 0.0).index.double() + 0.5) / 1000
    logit = torch.log(level / (1 - level))
    assert float(logit.mean()) == pytest.approx(0.4, abs=4 * 0.3 / 4000**0.5)
    assert float(logit.std()) == pytest.approx(0.3, abs=4 * 0.3 / 8000**0.5 + 1e-3)


def test_captions_are_dropped_with_the_given_share_and_noise_depends_on_step_and_sample() -> None:
    ids = list(range(2000))
    items = [Item(torch.zeros(3, 2, 2), f"number {i}") for i in ids]
    made, encoder = noising()
    one = made.prepare("train", 0, ids, items, 0.1)
    share = encoder.prompts.count("") / 2000
    assert share == pytest.approx(0.1, abs=4 * (0.09 / 2000) ** 0.5)
    assert all(prompt in ("", f"number {i}") for i, prompt in zip(ids, encoder.prompts, strict=True))
    made.prepare("train", 0, ids, items, 0.0)
    assert encoder.prompts == [item.prompt for item in items]
    other = made.prepare("train", 1, ids, items, 0.0)
    assert not torch.equal(one.noise[0], other.noise[0])
    assert len({row.numpy().tobytes() for row in one.noise}) == 2000


def test_sigmas_of_a_sample_are_distinct_and_those_of_the_sampler() -> None:
    algorithm, ones = DiffusionNft(1.0, -1.0, 1.0, 0, num_sigmas=9), torch.ones(6)
    sigmas = torch.linspace(1.0, 0.1, 10)
    levels = Level((1000 * sigmas).long(), sigmas)
    share = Share(range(10, 16), ["a"] * 6, {"clean": torch.zeros(6, 2)}, torch.arange(6), ones, ones, range(6))

    def drawn(number: int) -> Rows:
        return algorithm.rows(share, levels=levels, draws=Draws(seed=0, step=3), number=number)

    rows = drawn(0)
    assert len(set(rows.noise_ids)) == 54
    for i in range(6):
        own = rows.level.sigma[i::6].tolist()
        assert len(set(own)) == 9
        assert set(own) <= set(sigmas.tolist())
    assert torch.equal(rows.level.t, (1000 * rows.level.sigma).long())
    assert not torch.equal(rows.level.sigma, drawn(1).level.sigma)


def test_even_levels_are_balanced_over_an_optimiser_step_and_do_not_depend_on_ranks() -> None:
    algorithm = replace(DiffusionNft(1.0, -1.0, 1.0, 0, num_sigmas=2), even_levels=True)
    sigmas, ids = torch.linspace(1.0, 0.2, 5), [7, 31, 2, 50, 11, 12, 44, 9, 80, 3]
    levels = Level((1000 * sigmas).long(), sigmas)

    def drawn(step: int, first: int, last: int) -> list[list[float]]:
        """Sigmas of each sample."""
        size = last - first
        zeros, ones = torch.zeros(size, 2), torch.ones(size)
        share = Share(
            ids[first:last],
            ["a"] * size,
            {"clean": zeros},
            torch.arange(size),
            ones,
            ones,
            positions=range(first, last),
        )
        rows = algorithm.rows(share, levels=levels, draws=Draws(seed=0, step=step), number=0)
        at = [round(float(sigma), 6) for sigma in rows.level.sigma]
        index = [sigmas.tolist().index(float(sigma)) for sigma in rows.level.sigma]
        assert rows.noise_ids == [share.sample_ids[row % size] * 5 + one for row, one in enumerate(index)]
        return [at[row::size] for row in range(size)]

    alone = drawn(0, 0, 10)
    assert alone == drawn(0, 0, 4) + drawn(0, 4, 10)
    assert Counter(sigma for sample in alone for sigma in sample) == dict.fromkeys((1.0, 0.8, 0.6, 0.4, 0.2), 4)
    assert len({tuple(drawn(step, 0, 1)[0]) for step in range(40)}) == 5  # no level is a sample's own


def test_each_optimiser_step_draws_its_own_sigmas() -> None:
    trainer = plane_trainer({"train.train_policy.mu_iterations": 3, "policy.diffusers.timesteps_fraction": 0.3})
    seen = record_rows(trainer)
    trainer.train_step(0)
    assert len({tuple(rows.level.sigma.tolist()) for rows in seen}) == 3
    levels = trainer._sampler.trained_levels().sigma
    assert {level for rows in seen for level in rows.level.sigma.tolist()} <= set(levels.tolist())
    assert 1.0 in levels
    assert 0.0 not in levels


# ---- the data term -------------------------------------------------------------------------------------------------


def data_trainer(beta: float, loss: Callable[[OnlineTask], Tensor]) -> OnlineTask:
    tables = {"train.train_policy.data_term": {"beta": beta, "local_dir": "pairs"}}
    trainer = plane_trainer(tables if beta else {})

    def shares(step: int, number: int, levels: Level, start: StartNoise) -> Iterator[Tensor]:
        yield loss(trainer) * 0.25
        yield loss(trainer) * 0.75

    trainer._data_loss = shares if beta else None
    return trainer


def square_loss(trainer: OnlineTask) -> Tensor:
    return sum(((p - 0.3) ** 2).sum() for p in trainer.params.values())  # type: ignore[return-value]


def gradient_of_step(trainer: OnlineTask) -> tuple[Tensor, dict[str, float]]:
    (gradients,), report = trainer.compute_gradients(0)
    return torch.cat([gradients[name].flatten() for name in trainer.params]), dict(report.metrics)


def test_the_data_term_adds_its_share_to_gradient_and_loss() -> None:
    alone, metrics = gradient_of_step(data_trainer(0.0, square_loss))
    trainer = data_trainer(0.7, square_loss)
    value = square_loss(trainer)  # with a gradient
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(trainer.params.values()))])
    both, reported = gradient_of_step(trainer)
    torch.testing.assert_close(both - alone, 0.7 * wanted, rtol=1e-3, atol=1e-5)
    assert reported["train/data_loss_mean"] == pytest.approx(value.item(), rel=1e-6)
    assert reported["train/policy_loss_mean"] == metrics["train/policy_loss_mean"]
    assert reported["train/loss_mean"] == pytest.approx(metrics["train/loss_mean"] + 0.7 * value.item(), rel=1e-6)


def test_a_data_loss_that_is_not_finite_is_not_applied() -> None:
    trainer = data_trainer(0.7, lambda trainer: 0.0 * square_loss(trainer) + math.nan)
    before = weights_of(trainer)
    report = trainer.train_step(0)
    assert report.refusal is Refusal.NOT_FINITE
    assert torch.equal(weights_of(trainer), before)


def test_real_samples_change_with_every_optimiser_step_and_are_counted(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path, use_model: Callable[[type], type]
) -> None:
    noises: list[Tensor] = []
    use_model(recording_noise(noises))
    term = f'{{beta = 0.5, local_dir = "{image_folder}", batch_size = 4}}'
    options = (f"--train.train_policy.data_term={term}", "--train.train_policy.batch_size_per_optimize=8")
    options += ("--train.train_policy.caption_dropout=0.5", "--policy.diffusers.sample.num_steps=2")
    options += ("--train.train_policy.mini_batch=2",)
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), *options)
    with rows_through(trainer.model.transformer) as rows:
        metrics = [trainer.train_step(step).metrics for step in range(2)]
    # keyed by the sample's number in the whole run: no sample twice
    expected = randomness.normal(tuple(noises[0].shape), 42, "data_term/noise", 0, range(16))
    assert sorted(row.numpy().tobytes() for row in noises) == sorted(row.numpy().tobytes() for row in expected)
    assert metrics[-1]["train/nfe"] == rows["forward"] + 2 * rows["backward"]
    assert rows["backward"] == 2 * (16 * 1 + 2 * 4)


@contextlib.contextmanager
def rows_through(transformer: nn.Module) -> Iterator[dict[str, int]]:
    """Rows that went forwards, and those of them that have a gradient."""
    found = {"forward": 0, "backward": 0}

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found["forward"] += len(output[0])
        found["backward"] += len(output[0]) * output[0].requires_grad

    handle = transformer.register_forward_hook(count)
    try:
        yield found
    finally:
        handle.remove()


# ---- the guard -----------------------------------------------------------------------------------------------------


def test_the_held_out_loss_is_that_of_the_mixture() -> None:
    """The network knows the velocity of its data, so the loss is the variance of the target given the noised sample."""
    key = "train.train_policy.reward_hacking_guard"
    guard = {f"{key}.enable": True, f"{key}.samples": 32}
    config = toy_config({**EIGHT, **guard})
    model = PlaneModel()
    trainer = toy_trainer(config, model, [POINT], reward_fns={"bump": bump})
    trainer.start(0)
    clean = trainer.guard.probe.held_out.latents.double()
    total = 0.0
    for number, level in enumerate((0.125, 0.375, 0.625, 0.875)):
        noise = randomness.normal((2,), config.train.seed, "watch/noise", number, range(32)).double()
        noised = (1 - level) * clean + level * noise
        velocity = model.transformer._mixture.velocity(noised, torch.full((32,), level, dtype=torch.float64))
        total += float(((velocity - (noise - clean)) ** 2).mean())
    assert trainer.guard.probe.held_out_loss(trainer._new_conditions())[0] == pytest.approx(total / 4, rel=1e-4)


def test_after_going_back_the_weights_move_at_the_lower_rate() -> None:
    moves = []
    for rewinds in (0, 2):
        tables = {
            "train.train_policy.reward_hacking_guard.rewind_lr_factor": 0.5,
            "train.optm_name": "Adam",
            "train.epsilon": 1e-12,
        }
        trainer = plane_trainer(tables)
        trainer.on_rewind(0, rewinds)
        before = weights_of(trainer)
        report = trainer.train_step(0)
        assert report.metrics["optim/learning_rate"] == pytest.approx(1e-2 * 0.5**rewinds)
        moves.append(float((weights_of(trainer) - before).abs().max()))
    assert moves == pytest.approx([1e-2, 1e-2 / 4], rel=1e-3)  # Adam's first step is the rate
