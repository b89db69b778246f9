"""FlowGRPO on tiny pipelines: what is recorded in a rollout is what training computes there, guidance included."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.policy.trainer.rl.algorithm import Draws
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.nft_runs import Job, nft_toml, nft_train, nft_trainer, run_forked
from tests.support.states import assert_same_state, drop_steps_after, saved_state
from tests.support.tars import pack

FLOW = (
    "--train.train_policy.trainer_type=flow_grpo",
    "--policy.lora.target_modules=all-linear",
    "--policy.diffusers.weight_copy_decay_type=0",
    "--policy.diffusers.sample.solver=flow",
    "--policy.diffusers.sample.noise_level=0.7",
    "--policy.diffusers.sample.deterministic_sampling=false",
)


@pytest.mark.parametrize(
    ("family", "guidance"),
    [
        pytest.param("sd3", 3.0, marks=pytest.mark.slow),
        pytest.param("sd3", 1.0, marks=pytest.mark.zoo),
        pytest.param("sana", 3.0, marks=pytest.mark.zoo),
    ],
)
def test_training_replays_the_rollout(tmp_path: Path, family: str, guidance: float) -> None:
    base = build(family, tmp_path / family, "unit", seed=0)
    options = (*FLOW, f"--policy.diffusers.sample.guidance_scale={guidance}", "--train.optm_lr=1e-12")
    config = nft_toml(tmp_path, base)
    on_policy = nft_trainer(config, *options).train_step(0)
    assert on_policy.applied
    assert on_policy.metrics["train/ratio_deviation_max"] == 0.0
    assert on_policy.metrics["optim/grad_norm"] > 1e-4
    two = (*options, "--train.train_policy.batch_size_per_optimize=8")
    replayed = nft_trainer(config, *two).train_step(0).metrics
    assert replayed["optim/steps"] == 2
    assert 0 <= replayed["train/ratio_deviation_max"] < 2e-5
    moved = nft_trainer(config, *two, "--train.optm_lr=1e-2").train_step(0).metrics
    assert moved["train/ratio_deviation_max"] > 1e-4


WINDOW = (
    '--train.train_policy.steps.choose="window"',
    "--train.train_policy.steps.size=2",
    "--train.train_policy.batch_size_per_optimize=8",
)
LAGGED = (
    "--policy.diffusers.weight_copy_decay_type=1",
    "--train.train_policy.reference_reset_interval=2",
    "--train.train_policy.reset_optimizer_with_reference=true",
)


def flow_options(*, lora: bool) -> tuple[str, ...]:
    """Of a job with or without adapters."""
    return tuple(option for option in FLOW if lora or "lora" not in option)


def ddrl_options(images: Path) -> tuple[str, ...]:
    """Of 12 images 4 for each optimiser step, so that an epoch ends within a training step."""
    term = f'{{beta = 0.5, local_dir = "{images}", batch_size = 4, levels = "trained_steps", per_step = true}}'
    return (
        "--train.train_policy.trainer_type=ddrl",
        "--train.train_policy.kl_beta=0.0",
        "--train.train_policy.advantage_transform=centred_exp_reward",
        f"--train.train_policy.data_term={term}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all weights"])
def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path, tiny_sd3: Path, lora: bool) -> None:
    """A lagging policy that samples, a reference that moves, random windows and several optimiser steps."""
    options = (*flow_options(lora=lora), *LAGGED, *WINDOW)
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    run = nft_train(config, *options)
    state = saved_state(run, 3)
    assert any(key.startswith("reference.") for key in state)
    drop_steps_after(run, 1)
    nft_train(config, *options, resume=(run, 1))
    assert_same_state(saved_state(run, 3), state)


CASES = (("flow_grpo", 4), ("ddrl", 2), ("ddrl", 4), ("gated", 2))
GATED = (
    "--train.train_policy.kl_beta=0.1",
    "--train.train_policy.kl_gate.rewards=['large']",
    "--train.train_policy.diversity_features=cosmos_rl.reward.features:thumbnails",
    "--train.train_policy.local_reward.reward_fns="
    '[{function = "tests.support.nft_rewards:smooth"}, {function = "tests.support.nft_rewards:large", weight = 0.0}]',
)
Runs = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def run_of(tiny_sd3: Path, image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """(trainer, ranks) -> the folder of three steps, with the same batches on any number of ranks."""
    folder, found = tmp_path_factory.mktemp("ranks"), dict[tuple[str, int], Path]()
    config = nft_toml(folder, tiny_sd3, lora=False)

    def run(trainer: str, ranks: int) -> Path:
        if (trainer, ranks) not in found:
            options = (
                *flow_options(lora=False),
                '--train.train_policy.steps.choose="random"',
                "--train.train_policy.mini_batch=2",
                "--train.optm_lr=1e-4",
                f"--train.train_policy.batch_size_per_optimize={8 // ranks}",
                *(ddrl_options(image_folder) * (trainer == "ddrl")),
                *(GATED * (trainer == "gated")),
            )
            job = Job(config, folder / f"{trainer} {ranks}", options)
            run_forked([job], ranks, folder)
            found[trainer, ranks] = job.folder
        return found[trainer, ranks]

    return run


@pytest.mark.process
@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ("flow_grpo", 2),
        *(pytest.param(*case, marks=pytest.mark.zoo) for case in CASES),
    ],
)
def test_any_number_of_ranks_trains_like_one(run_of: Runs, trainer: str, ranks: int) -> None:
    """Recorded steps are shared out like the samples: shuffled batches give a rank those of the other ones too. Of four
    ranks each has a prompt; real samples are one of the four of an optimiser step."""
    one, several = (saved_state(run_of(trainer, count), 3) for count in (1, ranks))
    start = saved_state(run_of(trainer, 1), 1)
    keys = [key for key in one if key.startswith("model.")]
    apart = sum(float((several[key] - one[key]).double().square().sum()) for key in keys)
    moved = sum(float((one[key] - start[key]).double().square().sum()) for key in keys)
    assert moved > 0
    assert (apart / moved) ** 0.5 <= 2e-3
    for ours, theirs in zip(*(read_metrics(run_of(trainer, n) / "metrics.jsonl") for n in (ranks, 1)), strict=True):
        named = {key for key in theirs if key.startswith(("reward/", "adv/", "train/"))} - {"train/nfe"}
        assert len(named) > 10
        shares = [value for key, value in ours.items() if key.startswith("train/gradient_share/")]
        assert len(shares) > 1
        assert sum(shares) == pytest.approx(1.0)
        assert ("train/data_loss_mean" in named) == (trainer == "ddrl")
        for key in named:
            assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-5), key


@pytest.mark.zoo
def test_real_samples_may_be_in_tars(tmp_path: Path, tiny_sd3: Path, image_folder: Path) -> None:
    config, states = nft_toml(tmp_path, tiny_sd3), []
    for images in (image_folder, pack(image_folder, tmp_path / "shards", 5)):
        run = nft_train(config, *FLOW, *ddrl_options(images), "--train.max_num_steps=1")
        states.append(saved_state(run, 1))
    assert_same_state(*states)


@pytest.mark.slow
@pytest.mark.parametrize("per_step", [True, False])
@pytest.mark.parametrize("levels", ["training", "trained_steps"])
def test_real_samples_at_the_trained_steps(
    tmp_path: Path, tiny_sd3: Path, image_folder: Path, levels: str, per_step: bool
) -> None:
    """Two of four sampling steps are trained: the data term is at both of them, or at one for each sample."""
    term = f'{{beta = 0.5, local_dir = "{image_folder}", batch_size = 4, levels = "{levels}", per_step = '
    options = (
        *FLOW,
        "--train.train_policy.trainer_type=ddrl",
        "--train.train_policy.kl_beta=0.0",
        f"--train.train_policy.data_term={term}{str(per_step).lower()}}}",
    )
    trainer, sigmas = nft_trainer(nft_toml(tmp_path, tiny_sd3), *options), []
    assert trainer._data_loss is not None
    all_levels = trainer.model.sampling_levels(4)
    start = functools.partial(trainer._draw_start, Draws(42, 0), trainer._samples(0))
    both, first = (
        [float(share.detach()) for share in trainer._data_loss(0, 0, all_levels.rows(which), start)]
        for which in (torch.tensor([0, 1]), torch.tensor([0]))
    )
    if per_step:  # a mean over the steps: with one of two its share is half of what it is alone
        assert len(both) == 2 * len(first)
        assert both[: len(first)] == pytest.approx([share / 2 for share in first], rel=1e-6)
    else:
        assert len(both) == len(first)
    trainer.model.num_evaluations = 0
    velocity = trainer.model.velocity

    def recording(latents: Tensor, level: Level, cond: Any, **given: Any) -> Tensor:
        found = velocity(latents, level, cond, **given)
        if found.requires_grad:
            sigmas.append(level.sigma.tolist())
        return found

    trainer.model.velocity = recording
    metrics = trainer.train_step(0).metrics
    times = 2 if per_step else 1
    assert metrics["train/nfe"] == 16 * 4 + 16 * 2 * 3 + 4 * times * 3
    assert 0.1 < metrics["train/data_loss_mean"] < 10
    trained = trainer.model.sampling_levels(4).sigma[:2].tolist()
    of_data = sigmas[:-8]  # before the rows of the policy loss
    if levels == "training":
        assert of_data == []  # by the step of supervised fine-tuning
    elif per_step:
        assert of_data == [[sigma] * 4 for sigma in trained]
    else:
        assert len(of_data) == 1
        assert set(of_data[0]) <= set(trained)
