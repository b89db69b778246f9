"""DiffusionNFT gives one result on any number of ranks."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.nft_runs import PROMPTS, Job, nft_toml, prompt_file, record_of, run_forked, settings
from tests.support.paths import ROOT
from tests.support.states import drop_steps_after, saved_state

RECIPE = ROOT / "configs/stable-diffusion-3-5/stable-diffusion-3-5-medium-nft.toml"
STEPS = 3
PAIRS = (("recipe", 2), ("recipe", 4), ("missing", 4), ("full", 2), ("full", 4))
MOVED = {2: "full", 4: "recipe"}
"""Ranks -> the job of one rank that so many resume after its first step."""


def of_recipe(folder: Path, base: Path) -> tuple[str, ...]:
    """The recipe on a tiny pipeline, with prompts and a reward that need no network."""
    return (
        f"--policy.model_name_or_path={base}",
        "--policy.diffusers.inference_size=[32, 32]",
        "--policy.diffusers.max_prompt_length=12",
        "--policy.diffusers.sample.num_steps=3",
        "--policy.diffusers.timesteps_fraction=0.99",
        "--policy.model_gradient_checkpointing=false",
        "--policy.diffusers.sample.eval_num_steps=2",
        "--rollout.n_generation=4",
        "--train.train_batch_per_replica=16",
        "--train.param_dtype=float32",
        f"--train.max_num_steps={STEPS}",
        "--train.ckpt.save_freq=1",
        "--train.train_policy.mini_batch=4",
        "--train.train_policy.use_remote_reward=false",
        '--train.train_policy.local_reward.reward_fns=[{function = "tests.support.nft_rewards:smooth"}]',
        f"--train.train_policy.dataset.local_dir={prompt_file(folder)}",
        "--train.train_policy.reward_hacking_guard.freq=1",
        "--train.train_policy.reward_hacking_guard.samples=6",
        "--train.train_policy.reward_hacking_guard.action=warn",
        "--validation.enable=true",
        "--validation.freq=2",
        "--validation.n_generation=1",
        f"--validation.dataset.local_dir={prompt_file(folder, PROMPTS[:3], 'val.txt')}",
    )


def sets_of(folder: Path) -> tuple[str, ...]:
    """Two validation sets, of which the second has less than a sample for each of 4 ranks."""
    prompts = f'dataset = {{local_dir = "{prompt_file(folder, PROMPTS[:3], "val.txt")}"'
    few = f'{{name = "few", {prompts}, limit = 1, spread = true}}, n_generation = 2, guidance_scale = 3.0}}'
    return ("--validation.enable=true", "--validation.freq=2", f"--validation.sets=[{{{prompts}}}}}, {few}]")


def jobs_of(folder: Path, base: Path, images: Path, ranks: int) -> dict[str, Job]:
    """Each with the same samples per step and per optimiser step, whatever the number of ranks.

    Of "full", 4 ranks have half a prompt's samples each.
    """
    lora, full = nft_toml(folder, base), nft_toml(folder, base, lora=False)
    lost = "tests.support.nft_rewards:lost_on_some_prompts"
    lossy = f'--train.train_policy.local_reward.reward_fns=[{{function = "{lost}"}}]'
    several = f"--train.train_policy.batch_size_per_optimize={8 // ranks}"
    data = f'--train.train_policy.data_term={{beta = 0.5, local_dir = "{images}", batch_size = 4}}'
    small = ("--train.train_policy.mini_batch=2", "--train.ema_enable=true", "--policy.diffusers.sample.num_steps=3")
    small += ("--policy.diffusers.timesteps_fraction=0.7",)
    options: dict[str, tuple[Path, tuple[str, ...]]] = {
        "recipe": (RECIPE, of_recipe(folder, base)),
        "missing": (lora, (*small, lossy, "--train.train_policy.max_missing_frac=0.5", *sets_of(folder))),
        "full": (full, (*small, several, data, "--train.optm_lr=1e-4", "--rollout.n_generation=8")),
    }
    if ranks == 4:
        config, given = options["full"]
        options["full"] = config, (*given, "--policy.parallelism.dp_replicate_size=2")
    wanted = [name for name in options if ranks == 1 or (name, ranks) in PAIRS]
    return {name: Job(options[name][0], folder / str(ranks) / name, options[name][1]) for name in wanted}


Runs = Mapping[tuple[str, int], Path]


@pytest.fixture(scope="module")
def runs(tiny_sd3: Path, image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    found = {}
    for ranks in (1, 2, 4):
        jobs = jobs_of(folder, tiny_sd3, image_folder, ranks)
        if name := MOVED.get(ranks):
            moved = replace(jobs[name], folder=folder / str(ranks) / "moved", resume_step=1)
            shutil.copytree(found[name, 1], moved.folder, symlinks=True)
            drop_steps_after(moved.folder, 1)
            jobs["moved"] = moved
        run_forked(list(jobs.values()), ranks, folder)
        found |= {(name, ranks): job.folder for name, job in jobs.items()}
    return found


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """``|ours - theirs| / |theirs - start|`` over all tensors together."""
    apart = sum(float((ours[key] - value).double().square().sum()) for key, value in theirs.items())
    moved = sum(float((start[key] - value).double().square().sum()) for key, value in theirs.items())
    return (apart / moved) ** 0.5


def kind(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of one kind, by the names of the trained parameters."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


@pytest.mark.process
@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_any_number_of_ranks_ends_with_the_same_weights(
    runs: Runs, name: str, ranks: int, tiny_sd3: Path, image_folder: Path
) -> None:
    one, other = (saved_state(runs[name, count], STEPS) for count in (1, ranks))
    folder = runs[name, 1].parents[1]
    config = settings(jobs_of(folder, tiny_sd3, image_folder, 1)[name], 1)
    model = ModelRegistry.build_diffusers_model(config, param_dtype="float32", seed=config.train.seed)
    start = {key: value.detach() for key, value in model.trainable_parameters().items()}
    kinds = [which for which in ("model", "old", "ema") if kind(one, which)]
    assert len(kinds) == 3
    for which in kinds:
        assert difference(kind(other, which), kind(one, which), start) <= 1e-3, which


@pytest.mark.process
@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_any_number_of_ranks_sees_the_same_samples(runs: Runs, name: str, ranks: int) -> None:
    records = [record_of(runs[name, ranks], rank) for rank in range(ranks)]
    for step, one in enumerate(record_of(runs[name, 1])):
        own = [record[step] for record in records]
        assert all(record.prompts == one.prompts and record.kept == one.kept for record in own)
        assert len({record.calls for record in own}) == 1
        noise = [record.noise for record in own]
        assert sum(map(len, noise)) == 16
        assert {key: value for part in noise for key, value in part.items()} == one.noise
        assert len(set(one.noise.values())) == 16
        for record in own:
            apart = np.abs(np.array(record.advantages) - np.array(one.advantages))
            # a value that is rounded to the other of two bytes moves a reward by 1e-4 of the step's deviation
            assert np.nanmedian(apart) <= 3e-5
            assert np.nanmax(apart) <= 5e-4


@pytest.mark.process
@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_any_number_of_ranks_logs_the_same_numbers(runs: Runs, name: str, ranks: int) -> None:
    one, other = (read_metrics(runs[name, count] / "metrics.jsonl") for count in (1, ranks))
    apart = {"train/nfe"}  # rows that fill up are run too
    if (name, ranks) == ("full", 4):
        apart.add("rollout/diversity")  # of the samples of a prompt on one rank
    for ours, theirs in zip(other, one, strict=True):
        assert ours.keys() == theirs.keys()
        for key in theirs.keys() - apart:
            if "time" not in key:
                assert ours[key] == pytest.approx(theirs[key], rel=2e-3, abs=1e-5), key
    if name == "recipe":
        assert [line["step"] for line in one] == [0, 1, 2, 3]
        assert all(line["val/samples"] == 3 for line in one if line["step"] != 1)
        assert len(list((runs[name, ranks] / "media/validation/step_2").glob("*.png"))) == 3
        assert one[1]["guard/loss_ratio"] != 1.0
    if name == "missing":
        assert [line["step"] for line in one if line.get("val/few/samples") == 2] == [2, 3]
        assert [line["step"] for line in one if line.get("val/val/samples") == 3] == [2, 3]
        assert len(list((runs[name, ranks] / "media/validation/step_2").glob("*.png"))) == 5


@pytest.mark.process
def test_a_rank_without_samples_to_train_on_runs_as_many_passes(runs: Runs) -> None:
    records = [record_of(runs["missing", 4], rank) for rank in range(4)]
    kept = [np.array(step.kept).reshape(4, 4).all(1) for step in records[0]]
    assert any(0 < rank_kept.sum() < 4 for rank_kept in kept)  # all of one rank's own samples are left out
    for step in range(STEPS):
        assert len({record[step].calls for record in records}) == 1


@pytest.mark.process
@pytest.mark.parametrize("ranks", MOVED)
def test_a_run_continues_with_another_number_of_ranks(runs: Runs, ranks: int) -> None:
    one, moved = runs[MOVED[ranks], 1], runs["moved", ranks]
    start, end, state = saved_state(one, 1), saved_state(one, STEPS), saved_state(moved, STEPS)
    assert state.keys() == end.keys()
    for which in ("model", "old", "ema"):
        assert difference(kind(state, which), kind(end, which), kind(start, which)) <= 2e-3, which
    assert [line["step"] for line in read_metrics(moved / "metrics.jsonl")][-STEPS:] == [1, 2, 3]
