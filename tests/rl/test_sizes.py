"""Reinforcement learning at several sizes."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.length import run_length
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.diffusers.diffuser_model import DiffuserModel
from cosmos_rl.policy.trainer.same_run import compare
from cosmos_rl.tracking.metrics import read_metrics
from tests.rl.test_flow_grpo_pipeline import ddrl_options, flow_options
from tests.support.nft_runs import PROMPTS, Job, nft_toml, nft_train, nft_train_task, nft_trainer, run_forked
from tests.support.pairs import marked_folder
from tests.support.states import assert_same_state, drop_steps_after, saved_state

SIZES = ((16, 32), (32, 16), (32, 32))
BUCKETS = f"--policy.diffusers.buckets={{sizes = {[list(size) for size in SIZES]}}}"
GUARD = (
    "--train.train_policy.reward_hacking_guard.enable=true",
    "--train.train_policy.reward_hacking_guard.freq=2",
    "--train.train_policy.reward_hacking_guard.samples=4",
    "--train.train_policy.reward_hacking_guard.action=warn",
)


def sized_prompts(folder: Path, sizes: list[Any]) -> Path:
    path = folder / "sized.jsonl"
    rows = [{"prompt": text, **size} for text, size in zip(PROMPTS, sizes, strict=False)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pixels of each forward pass, filled while a model runs."""
    found: list[tuple[int, int]] = []
    predict = DiffuserModel.predict

    def watch(model: DiffuserModel, latents: Any, *args: Any) -> Any:
        size = latents.shape[-2] * 4, latents.shape[-1] * 4
        assert size == model.media_size
        found.append(size)
        return predict(model, latents, *args)

    monkeypatch.setattr(DiffuserModel, "predict", watch)
    return found


@pytest.mark.zoo
@pytest.mark.parametrize("trainer", ["diffusion_nft", "flow_grpo", "ddrl"])
def test_a_step_has_one_drawn_size_and_a_resume_draws_the_same(
    tmp_path: Path, tiny_sd3: Path, trainer: str, shapes: list[tuple[int, int]]
) -> None:
    options = (BUCKETS, *GUARD, "--train.max_num_steps=4", "--train.train_policy.enable_dataset_cache=true")
    if trainer != "diffusion_nft":
        options += (*flow_options(lora=True), "--policy.diffusers.timesteps_fraction=0.5")
    if trainer == "ddrl":
        options += ddrl_options(marked_folder(tmp_path / "data", [(32, 32)] * 6))
    config = nft_toml(tmp_path, tiny_sd3)
    run = nft_train(config, *options)
    task = nft_trainer(config, *options)
    drawn = [task._sized.choose(step, task.stream.positions(step)) for step in range(4)]
    assert {*drawn, (32, 32)} == set(shapes)  # the guard and real samples have the configured size
    assert len(set(drawn)) > 1
    state = saved_state(run, 4)
    drop_steps_after(run, 2)
    nft_train(config, *options, resume=(run, 2))
    assert_same_state(saved_state(run, 4), state)


def test_galleries_have_the_size_that_their_step_drew(
    tmp_path: Path, tiny_sd3: Path, shapes: list[tuple[int, int]]
) -> None:
    few = ("--train.max_num_steps=2", "--rollout.n_generation=2", "--train.train_batch_per_replica=4")
    root, task = nft_train_task(nft_toml(tmp_path, tiny_sd3), BUCKETS, *few, "--train.ckpt.enable_checkpoint=false")
    drawn = [task._sized.choose(step, task.stream.positions(step)) for step in range(2)]
    assert set(shapes) == set(drawn)
    for step, size in enumerate(drawn, 1):
        found = {Image.open(file).size[::-1] for file in root.rglob(f"step_{step}/*.png")}
        assert found == {size}


def test_rows_name_the_size_of_their_samples(tmp_path: Path, tiny_sd3: Path, shapes: list[tuple[int, int]]) -> None:
    named = [{"size": [16, 32]}] * 3 + [{"height": 32, "width": 16}] * 2 + [{}]
    path = sized_prompts(tmp_path, named)
    options = (BUCKETS, f'--train.train_policy.dataset.local_dir="{path}"', "--train.train_batch_per_replica=8")
    task = nft_trainer(nft_toml(tmp_path, tiny_sd3), *options)
    wanted = [(16, 32)] * 3 + [(32, 16)] * 2 + [(32, 32)]
    counts = Counter[int]()
    for step in range(task.stream.steps_until(2)):
        positions = task.stream.positions(step)
        size = task._sized.choose(step, positions)
        counts.update(position.index for position in positions)
        assert {wanted[position.index] for position in positions} == {size}
        samples = task._samples(step)
        assert {sample.size for sample in samples} == {size}
    assert counts == dict.fromkeys(range(6), 2)
    task.train_step(0)
    assert set(shapes) == {task._sized.choose(0, task.stream.positions(0))}


def test_a_resume_that_would_take_other_prompts_is_refused_unless_the_checkpoint_is_older(
    tmp_path: Path, tiny_sd3: Path
) -> None:
    path, config = sized_prompts(tmp_path, [{"size": [16, 32]}] * 5 + [{}]), nft_toml(tmp_path, tiny_sd3)
    options = (BUCKETS, f'--train.train_policy.dataset.local_dir="{path}"', "--train.train_batch_per_replica=8")
    saved = nft_trainer(config, *options, start=False).fingerprint()
    compare(tmp_path, saved, nft_trainer(config, *options, start=False).fingerprint())
    new = ("sizes of the prompts (policy.diffusers.buckets)", "dataloader_drop_last")
    for option, name in zip(
        ("policy.diffusers.inference_size=[32, 16]", "train.train_policy.dataloader_drop_last=false"), new, strict=True
    ):
        now = nft_trainer(config, *options, f"--{option}", start=False).fingerprint()
        with pytest.raises(UserError, match=f"was saved with {re.escape(name)} = "):
            compare(tmp_path, saved, now)
        compare(tmp_path, {key: value for key, value in saved.items() if key not in new}, now)


@pytest.mark.parametrize(("row", "steps"), [({}, 3), ({"size": [16, 32]}, None)])
def test_steps_are_counted_where_each_draws_its_size(
    tmp_path: Path, tiny_sd3: Path, row: dict[str, Any], steps: int | None
) -> None:
    path = sized_prompts(tmp_path, [{}] * 5 + [row])
    options = [BUCKETS, f'--train.train_policy.dataset.local_dir="{path}"', "--train.train_batch_per_replica=8"]
    found = run_length(load_config(nft_toml(tmp_path, tiny_sd3), options), own_data=False)
    assert (found.samples, found.steps_per_epoch) == (6, steps)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"size": [16, 24]}, "size: found [16, 24]; allowed: one of policy.diffusers.buckets, of which [16, 32] is"),
        ({"size": "large"}, """size: found 'large'; allowed: "size": [height, width]"""),
        ({"height": 16}, "size: found [16, None]; allowed"),
        ({"size": [True, 16]}, "size: found [True, 16]; allowed"),
    ],
)
def test_a_size_that_is_not_configured_is_refused(
    tmp_path: Path, tiny_sd3: Path, size: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sized_prompts(tmp_path, [{}] * 7 + [size])
    config, data = nft_toml(tmp_path, tiny_sd3), f'--train.train_policy.dataset.local_dir="{path}"'
    with pytest.raises(UserError) as error:
        nft_trainer(config, BUCKETS, data)
    assert f"prompt 7 ('blue paint'): {message}" in str(error.value)
    assert main(["check", "--env", "--config", str(config), BUCKETS, data]) == 2
    assert message in capsys.readouterr().err
    assert main(["check", "--env", "--config", str(config), data]) == 0  # without the table it is the rewards' affair


@pytest.mark.zoo
def test_two_ranks_make_the_sizes_of_one(tmp_path: Path, tiny_sd3: Path) -> None:
    config = nft_toml(tmp_path, tiny_sd3, lora=False)
    options = (BUCKETS, "--train.train_policy.mini_batch=2", "--train.optm_lr=1e-4")
    for ranks in (1, 2):
        run_forked([Job(config, tmp_path / f"{ranks}", options)], ranks, tmp_path)
    one, two = (
        [line["reward/mean"] for line in read_metrics(tmp_path / ranks / "metrics.jsonl")] for ranks in ("1", "2")
    )
    assert len(one) == 3
    np.testing.assert_allclose(two, one, rtol=1e-5)
