"""One DiffusionNFT step on a tiny SD3: what moves, what stays, and what never changes the gradient."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from cosmos_rl.algorithms.decay import old_policy_decay
from cosmos_rl.data.given import text_of
from cosmos_rl.distributed import randomness
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import ConfigError
from cosmos_rl.policy.trainer.base import Gradients
from cosmos_rl.policy.trainer.rl import update
from cosmos_rl.policy.trainer.rl.algorithm import Rows
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.nft_runs import moved_away, nft_toml, nft_train, nft_trainer, prompt_file, record_rows
from tests.support.states import assert_same_state, saved_state

LOSSY = (  # the second prompt of the first step has no scores
    '--train.train_policy.local_reward.reward_fns=[{function = "tests.support.nft_rewards:lost_on_some_prompts"}]',
    "--train.train_policy.max_missing_frac=0.5",
    "--train.train_policy.dataloader_shuffle=false",
)
VALIDATION = ("--validation.enable=true", "--validation.freq=1", "--validation.n_generation=2")


def gradients(trainer: OnlineTask, step: int = 0) -> tuple[list[Gradients], dict[str, float]]:
    """The gradient of each optimiser step of a training step, none of which is applied, and the step's metrics."""
    found, report = trainer.compute_gradients(step)
    return found, dict(report.metrics)


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Norm of the difference, relative to ``theirs``."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[key] - value).double().square().sum()) for key, value in theirs.items())
    return (difference / sum(float(value.double().square().sum()) for value in theirs.values())) ** 0.5


def used_policies(trainer: OnlineTask) -> list[str]:
    """Fills with the names of the policies that the transformer acts as, one for each time it is asked to."""
    names, using = [], trainer.policies.using

    @contextlib.contextmanager
    def note(name: Any) -> Iterator[None]:
        names.append(name)
        with using(name):
            yield

    trainer.policies.using = note  # type: ignore[method-assign]
    return names


# ---- the gradient --------------------------------------------------------------------------------------------------


def loss_by_hand(trainer: OnlineTask, rows: Rows) -> tuple[Tensor, Tensor]:
    """(policy loss, distance to the reference), means over all rows, row by row and straight from the formulas."""
    model, policies = trainer.model, trainer.policies
    beta, high = trainer._config.policy.diffusers.nft_beta, trainer._job.advantage_high
    policy, kl, total = torch.zeros(()), torch.zeros(()), len(rows.prompts)
    conds = [model.encode_prompts([text_of(prompt)]) for prompt in rows.prompts]
    noise = [randomness.normal(rows.data["clean"].shape[1:], *rows.noise_key, [name]) for name in rows.noise_ids]
    clean, t = rows.data["clean"].split(1), rows.level.sigma.split(1)
    noised = [(1 - t[i]) * clean[i] + t[i] * noise[i] for i in range(total)]
    frozen = {}
    for name in ("old", "reference"):
        with torch.no_grad(), policies.using(name):
            frozen[name] = [model.velocity(noised[i], model.training_level(t[i]), conds[i]) for i in range(total)]
    for i in range(total):
        old, new = frozen["old"][i], model.velocity(noised[i], model.training_level(t[i]), conds[i])
        losses = []
        for velocity in ((1 - beta) * old + beta * new, (1 + beta) * old - beta * new):
            error = noised[i] - t[i] * velocity - clean[i]
            losses.append((error**2).mean() / error.detach().abs().mean().clamp(min=1e-5))
        r = float(rows.value[i])
        policy = policy + high / beta * (r * losses[0] + (1 - r) * losses[1]) / total
        kl = kl + ((new - frozen["reference"][i]) ** 2).mean() / total
    return policy, kl


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_the_gradient_is_that_of_the_formulas(tmp_path: Path, tiny_sd3: Path, lora: bool) -> None:
    options = ("--policy.diffusers.nft_beta=0.5", *LOSSY)
    trainer = moved_away(nft_trainer(nft_toml(tmp_path, tiny_sd3, lora=lora), *options))
    seen = record_rows(trainer)
    (found,), metrics = gradients(trainer)
    (rows,) = seen
    assert metrics["rollout/missing"] == 4
    assert len(rows.prompts) == 2 * 12
    policy, kl = loss_by_hand(trainer, rows)
    (policy + 1e-2 * kl).backward()
    assert apart(found, {n: p.grad for n, p in trainer.params.items() if p.grad is not None}) < 1e-5
    assert metrics["train/policy_loss_mean"] == pytest.approx(policy.item(), rel=1e-5)
    assert metrics["train/kl_loss_mean"] == pytest.approx(kl.item(), rel=1e-5)
    assert metrics["train/loss_mean"] == pytest.approx((policy + 1e-2 * kl).item(), rel=1e-5)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_micro_batches_gradient_checkpointing_and_blocks_change_nothing(
    tmp_path: Path, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    few = ("--train.train_batch_per_replica=8", *LOSSY)

    def run(*options: str) -> tuple[dict[str, Tensor], dict[str, float]]:
        (found,), metrics = gradients(moved_away(nft_trainer(config, *few, *options)))
        return found, {k: v for k, v in metrics.items() if "time" not in k}

    reference, reported = run("--train.train_policy.mini_batch=8")
    assert reported["train/samples_used"] == 4  # so that 8 is no divisor of what is trained on
    ways = {"mini_batch=4": 0, "mini_batch=2": 0, "mini_batch=1": 0, "mini_batch=2 ": 1}
    for way, target_bytes in ways.items():
        monkeypatch.setattr(update, "KEPT_BYTES", target_bytes or 2**28)
        recompute = "true" if way == "mini_batch=4" else "false"
        found, metrics = run(
            f"--train.train_policy.{way.strip()}", f"--policy.model_gradient_checkpointing={recompute}"
        )
        assert apart(found, reference) < 1e-5, way
        for key, value in reported.items():  # a square of a small difference keeps fewer digits
            rel = 1e-3 if "old_deviation" in key else 1e-5
            assert metrics[key] == pytest.approx(value, rel=rel, abs=1e-9), (way, key)
    with pytest.raises(ConfigError, match="mini_batch: found 3; allowed: a divisor"):
        run("--train.train_policy.mini_batch=3")


def test_more_passes_and_smaller_steps_use_every_sample_as_often(tmp_path: Path, tiny_sd3: Path) -> None:
    options = ("--train.train_policy.mu_iterations=2", "--train.train_policy.batch_size_per_optimize=8")
    options += ("--policy.diffusers.sample.num_steps=10", "--policy.diffusers.timesteps_fraction=0.99")
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), *options)
    seen = record_rows(trainer)
    metrics = trainer.train_step(0).metrics
    assert metrics["optim/steps"] == 4
    assert [len(rows.prompts) for rows in seen] == [8 * 9] * 4
    sigmas = {float(sigma) for rows in seen for sigma in rows.level.sigma}
    assert sigmas == {float(sigma) for sigma in trainer.model.sampling_sigmas(10)[:-1]}
    for first in (0, 2):  # a pass
        pairs = [n for rows in seen[first : first + 2] for n in rows.noise_ids]
        assert len(set(pairs)) == 16 * 9
        assert sorted(np.bincount([pair // 10 for pair in pairs])) == [9] * 16
    assert {rows.noise_ids[0] // 10 for rows in seen} != {0}  # shuffled
    noise = {rows.noise_key[1] for rows in seen}
    assert len(noise) == 4  # a pair that is used again has other noise


# ---- the policies --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_only_the_trained_policy_learns_and_the_old_one_follows(tmp_path: Path, tiny_sd3: Path, lora: bool) -> None:
    val = prompt_file(tmp_path, ("a hat", "a shoe"), "val.txt")
    options = (*VALIDATION, f"--validation.dataset.local_dir={val}", "--train.ema_enable=true")
    base = SD3Transformer2DModel.from_pretrained(tiny_sd3 / "transformer").eval()
    for kind, start in ((0, 0), (1, 300), (2, 100)):
        more = (f"--policy.diffusers.weight_copy_decay_type={kind}", "--train.train_policy.mu_iterations=2")
        trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3, lora=lora), *options, *more)
        trainer._optimizer_steps = start
        model, policies = trainer.model, trainer.policies
        names = {name for name, p in model.transformer.named_parameters() if p.requires_grad}
        assert names == set(trainer.params)
        if lora:
            assert all(".default." in name and ".lora_" in name for name in names)
        frozen = {n: p.detach().clone() for n, p in model.transformer.named_parameters() if n not in names}
        frozen = {n: p for n, p in frozen.items() if ".old." not in n}
        assert_same_state(dict(policies.old_state()), {n: p.detach() for n, p in trainer.params.items()})
        for step in range(2):
            old = {n: p.clone() for n, p in policies.old_state().items()}
            before = {n: p.detach().clone() for n, p in trainer.params.items()}
            trainer._roll_out(step, trainer._new_conditions())
            assert {n for n, p in model.transformer.named_parameters() if p.requires_grad} == names
            assert_same_state({n: p.detach() for n, p in trainer.params.items()}, before)
            trainer.train_step(step)
            assert trainer._optimizer_steps == start + 2 * (step + 1)
            decay = old_policy_decay(kind, start + 2 * (step + 1))
            assert (decay > 0) == (kind > 0)
            for name, now in policies.old_state().items():
                assert not torch.equal(before[name], trainer.params[name]) or "lora_A" in name
                expected = decay * old[name] + (1 - decay) * trainer.params[name].detach()
                torch.testing.assert_close(now, expected, rtol=1e-6, atol=1e-8)
            trainer.validate(step + 1, lambda name, data: None)
            assert {n for n, p in model.transformer.named_parameters() if p.requires_grad} == names
        now = dict(model.transformer.named_parameters())
        assert all(torch.equal(now[name], value) for name, value in frozen.items())
        cond = model.encode_prompts(["a hat"])
        noise = torch.randn(1, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
        sigma = torch.tensor([0.5])
        level = model.training_level(sigma)
        with torch.no_grad(), policies.using("reference"), model.eval_mode():
            ours = model.velocity(noise, level, cond)
            assert {n for n, p in model.transformer.named_parameters() if p.requires_grad} == names
        with torch.no_grad():
            theirs = base(hidden_states=noise, timestep=1000 * sigma, **cond.text, return_dict=False)[0]
            assert torch.equal(ours, theirs)
            assert not torch.equal(model.velocity(noise, level, cond), theirs)
        model.velocity(noise, level, cond).sum().backward()
        assert {n for n, p in model.transformer.named_parameters() if p.grad is not None} == names


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_what_equals_something_else_is_not_run(tmp_path: Path, tiny_sd3: Path, lora: bool) -> None:
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    hard = "--policy.diffusers.weight_copy_decay_type=0"
    # right after a hard copy the old policy is the trained one
    trainer = nft_trainer(config, hard)
    names = used_policies(trainer)
    (elided,), _ = gradients(trainer)
    assert names == ["old", "reference"]  # the rollout, the distance
    forbidden = nft_trainer(config, "--policy.diffusers.weight_copy_decay_type=1")
    forbidden.policies.old_equals_current = False
    names = used_policies(forbidden)
    (full,), _ = gradients(forbidden)
    assert names == ["old", "old", "reference"]
    assert apart(elided, full) < 1e-6
    # after the first of several optimiser steps it is not
    trainer = nft_trainer(config, hard, "--train.train_policy.batch_size_per_optimize=8")
    names = used_policies(trainer)
    trainer.train_step(0)
    assert names == ["old", "reference", "old", "reference"]
    trainer.train_step(1)
    assert names[4:] == ["old", "reference", "old", "reference"]
    # without a weight no reference is run or kept
    trainer = nft_trainer(config, hard, "--train.train_policy.kl_beta=0.0")
    names = used_policies(trainer)
    metrics = trainer.train_step(0).metrics
    assert names == ["old"]
    assert "train/kl_loss_mean" not in metrics
    assert (trainer.policies.old_state() == {}) == (not lora)
    if not lora:
        with pytest.raises(ValueError, match="keeps no reference"), trainer.policies.using("reference"):
            pass


def test_dropout_makes_the_old_policy_run(tmp_path: Path, tiny_sd3: Path) -> None:
    options = ("--policy.diffusers.weight_copy_decay_type=0", "--policy.lora.lora_dropout=0.5")
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), *options)
    names = used_policies(trainer)
    metrics = trainer.train_step(0).metrics
    assert names == ["old", "old", "reference"]
    assert metrics["train/old_kl_mean"] == 0.0  # without dropout in the frozen policies: B is 0
    trainer.train_step(1)
    assert names[3:] == ["old", "old", "reference"]


def test_dropout_of_the_network_itself_makes_the_old_policy_run(tmp_path: Path, tiny_sd3: Path) -> None:
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3, lora=False), "--policy.diffusers.weight_copy_decay_type=0")
    block = trainer.model.transformer.transformer_blocks[1]
    block.attn.to_out[1].p = 0.2
    names = used_policies(trainer)
    trainer.train_step(0)
    assert names == ["old", "old", "reference"]
    block.attn.to_out[1].p = 0.0
    assert not trainer.model.has_dropout()
    block.attn.attention_dropout = 0.1  # a number that is handed on
    assert trainer.model.has_dropout()


# ---- validation ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_validation_leaves_training_as_it_was(tmp_path: Path, tiny_sd3: Path, lora: bool) -> None:
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    val = prompt_file(tmp_path, ("a hat", "a shoe", "a lost hat"), "val.txt")
    options = ("--train.ema_enable=true", "--train.ckpt.save_freq=3", f"--validation.dataset.local_dir={val}")
    shown = '--validation.local_reward.reward_fns=[{function = "cosmos_rl.reward.examples:brightness"}]'
    without = nft_train(config, *options)
    with_it = nft_train(config, *options, *VALIDATION, "--validation.val_before_train=true", shown)
    assert_same_state(saved_state(with_it, 3), saved_state(without, 3))
    lines = read_metrics(with_it / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(0 < line["val/reward/brightness_mean"] == line["val/reward/mean"] < 1 for line in lines)
    assert all("val/reward/smooth_mean" not in line for line in lines)


def test_a_validation_that_fails_changes_no_weight(tmp_path: Path, tiny_sd3: Path) -> None:
    val = prompt_file(tmp_path, ("a hat",), "val.txt")
    options = (*VALIDATION, f"--validation.dataset.local_dir={val}", "--train.ema_enable=true")
    for lora in (True, False):
        trainer = nft_trainer(
            nft_toml(tmp_path, tiny_sd3, lora=lora), *options, val_reward_fns=[lambda media: media.no_such_thing]
        )
        trainer.train_step(0)
        trainer.train_step(1)
        assert trainer.ema is not None
        kinds = {"live": trainer.params, "old": trainer.policies.old_state(), "ema": trainer.ema.shadow}
        before = {f"{k}.{n}": p.detach().clone() for k, tensors in kinds.items() for n, p in tensors.items()}
        with pytest.raises(UserError, match="cannot be used"):
            trainer.validate(2, lambda name, data: None)
        assert_same_state({f"{k}.{n}": p.detach() for k, tensors in kinds.items() for n, p in tensors.items()}, before)
        assert trainer.model.transformer.training
        trainer.train_step(2)


def test_validations_sample_the_averaged_weights_from_fixed_noise(tmp_path: Path, tiny_sd3: Path) -> None:
    prompts = ("a hat", "a shoe", "a hat")
    val = prompt_file(tmp_path, prompts, "val.txt")
    options = (*VALIDATION, f"--validation.dataset.local_dir={val}", "--train.ema_enable=true", "--train.ema_decay=0.5")
    chunk, rewards = "--validation.batch_size=2", {"bright": lambda media: media.mean() / 255.0}
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3), *options, chunk, "--train.optm_lr=1e-2", val_reward_fns=rewards)
    reported: list[str] = []

    def media(step: int) -> Tensor:
        report = trainer.validate(step, lambda name, data: reported.append(name))
        assert [shown.prompt for shown in report.images] == [p for p in prompts for _ in range(2)]
        images = torch.stack([shown.pixels for shown in report.images if shown.pixels is not None])
        assert report.metrics["val/reward/bright_mean"] == pytest.approx(
            float(images.double().mean()) / 255.0, rel=1e-6
        )
        assert report.objective is not None
        assert report.metrics["val/reward/mean"] == report.metrics["val/reward/bright_mean"] == -report.objective
        assert report.metrics["val/samples"] == 6
        return images

    start = media(0)
    assert reported == ["pre_per_step_validation_hook", "post_per_step_validation_hook"] * 2
    assert len({image.numpy().tobytes() for image in start}) == 6
    for step in range(2):
        trainer.train_step(step)
    after = media(2)
    assert torch.equal(media(7), after)
    assert not torch.equal(after, start)
    assert trainer.ema is not None
    with trainer.ema.average_parameters():
        live = {name: param.detach().clone() for name, param in trainer.params.items()}
    with torch.no_grad():
        for name, param in trainer.params.items():
            param.copy_(live[name])
    trainer.ema = None
    assert torch.equal(media(2), after)


# ---- what never changes a sample -----------------------------------------------------------------------------------


def test_draws_depend_on_the_sample_alone(tmp_path: Path, tiny_sd3: Path) -> None:
    """Seeds of samples differ, and the size of a call changes nothing."""
    trainer = nft_trainer(nft_toml(tmp_path, tiny_sd3))
    samples, sampler, conditions = trainer._samples(0), trainer._sampler, trainer._new_conditions()
    assert [sample.group for sample in samples] == [group for group in range(4) for _ in range(4)]
    whole = sampler.sample(samples, conditions, "rollout", 0)
    assert len({row.numpy().tobytes() for row in whole.latents}) == 16
    for size in (1, 3, 4):
        chunks = [samples[i : i + size] for i in range(0, 16, size)]
        parts = [sampler.sample(chunk, conditions, "rollout", 0).latents for chunk in chunks]
        torch.testing.assert_close(torch.cat(parts), whole.latents, rtol=0, atol=1e-5)
    other = sampler.sample(samples, conditions, "rollout", 1)
    assert not any(torch.equal(one, two) for one, two in zip(whole.latents, other.latents, strict=True))
