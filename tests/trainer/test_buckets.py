"""Fine-tuning on several sizes."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_rl.data.bucket_stream import BucketStream
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import DiffusersConfig, load_config
from cosmos_rl.policy.config.model_rules import size_problems
from cosmos_rl.policy.config.policy import BucketsConfig
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.trainer.diffusers_trainer.buckets import find_buckets
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.pairs import marked_folder
from tests.support.ranks import train_on_ranks
from tests.support.states import assert_same_state, drop_steps_after, saved_state, trace
from tests.support.trainer_runs import train

SIZES = [(96, 32), (32, 96), (32, 32), (96, 32), (32, 128), (32, 96), (96, 32), (32, 32), (32, 96), (96, 32)]
"""Four tall, four wide and two square pictures."""
BUCKETS = "--policy.diffusers.buckets={sizes = [[32, 32], [96, 32], [32, 96]]}"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f'--train.train_policy.dataset.local_dir="{marked_folder(tmp_path / "marked", SIZES)}"'


def test_every_forward_pass_has_one_shape_and_a_resume_continues(
    write_toml: Callable[..., Path], folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shapes: list[tuple[int, ...]] = []
    predict = SD3Model.predict

    def watch(model: SD3Model, latents: torch.Tensor, *args: object) -> torch.Tensor:
        height, width = model.media_size
        assert latents.shape[-2:] == (height // 4, width // 4)
        shapes.append(tuple(latents.shape))
        return predict(model, latents, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(SD3Model, "predict", watch)
    caplog.set_level(logging.INFO)
    options = (folder, BUCKETS, "--train.ckpt.save_freq=3", "--train.train_batch_per_replica=2", "--train.epoch=1")
    calm = train(write_toml(), *options)
    assert len(shapes) == 5
    assert sorted(shape[-2:] for shape in shapes) == sorted([(24, 8), (24, 8), (8, 24), (8, 24), (8, 8)])
    text = caplog.text
    assert "10 images in buckets (height x width): 32 x 32: 2, 32 x 96: 4, 96 x 32: 4" in text
    assert "4.png loses most, 25.0%" in text
    run = train(write_toml(), *options, "--train.max_num_steps=3")
    train(write_toml(), *options, resume=(run, 3))
    assert_same_state(saved_state(run, 5), saved_state(calm, 5))
    assert np.array_equal(trace(run), trace(calm))


@pytest.mark.zoo
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_train_on_the_buckets_of_one_and_hand_over_to_one(
    write_toml: Callable[..., Path], folder: str, tmp_path: Path, count: int
) -> None:
    config = write_toml()
    options = (folder, BUCKETS, "--train.global_batch_size=4", "--train.train_policy.mini_batch=1", "--train.epoch=4")
    options += ("--train.max_num_steps=8", "--train.ckpt.save_freq=5")
    one = trace(train(config, *options))
    assert len(one) == 8
    shards = f"--policy.parallelism.dp_shard_size={count}"
    many = train_on_ranks(count, config, tmp_path / "many", *options, shards)
    np.testing.assert_allclose(trace(many), one, rtol=1e-5, atol=1e-6)
    drop_steps_after(many, 5)
    train(config, *options, resume=(many, 5))
    np.testing.assert_allclose(trace(many), one, rtol=1e-5, atol=1e-6)


def test_caches_and_held_out_pairs_take_buckets_too(
    write_toml: Callable[..., Path], folder: str, tmp_path: Path
) -> None:
    held_out = marked_folder(tmp_path / "held_out", [(96, 32), (32, 32), (96, 32), (96, 32)])
    validation = f'[validation]\nenable = true\nn_generation = 1\ndataset.local_dir = "{held_out}"'
    options = (folder, BUCKETS, "--train.max_num_steps=1", "--validation.freq=1")
    config = write_toml(validation)
    lines = [
        read_metrics(train(config, *options, f"--train.train_policy.enable_dataset_cache={cached}") / "metrics.jsonl")
        for cached in ("false", "true", "true")
    ]
    kept = [[line["train/loss_mean"] for line in found] for found in lines]
    losses = [found[-1]["val/loss_mean"] for found in lines]
    np.testing.assert_allclose(kept[1], kept[0], rtol=1e-5)  # a cache encodes in batches of another size
    assert kept[2] == kept[1]
    assert losses[2] == losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] > 0


def test_a_data_set_without_sizes_is_refused_with_buckets(write_toml: Callable[..., Path]) -> None:
    data = [{"visual": torch.zeros(3, 32, 32), "prompt": "a"}] * 4
    with pytest.raises(UserError, match=r"give it a method bucket_of\(index\)"):
        train(write_toml(), BUCKETS, dataset=data)


@pytest.mark.parametrize("found", [None, 32, (32, 32, 3), (32.5, 32), "large"])
def test_what_is_no_size_is_refused_with_the_element(write_toml: Callable[..., Path], found: object) -> None:
    class Own(list[int]):
        def bucket_of(self, index: int) -> object:
            return (np.int64(32), 96) if index < 2 else found

    config, context = load_config(write_toml(), [BUCKETS]), Context(torch.device("cpu"))
    sizes = find_buckets(Own([0, 0]), config, context)
    assert sizes is not None
    assert sizes.sizes == [(32, 96)] * 2
    with pytest.raises(UserError) as error:
        find_buckets(Own([0] * 4), config, context)
    assert f"bucket_of(2) of the data set gave {found!r}; allowed: (height, width)" in str(error.value)


@pytest.mark.parametrize(
    ("buckets", "size", "message"),
    [
        ("{}", "[32, 32]", "policy.diffusers.buckets: found neither of sizes and area"),
        ("{sizes = [[32, 32]], area = 1024}", "[32, 32]", "policy.diffusers.buckets: found both of sizes and area"),
        ("{area = 100}", "[32, 32]", "policy.diffusers.buckets.area: found 100; allowed: at least step x step = 4096"),
        ("{area = 4096, step = 60}", "[60, 60]", "policy.diffusers.buckets.step: found 60; allowed: a multiple of 8"),
        ("{sizes = [[32, 36]]}", "[32, 36]", "policy.diffusers.buckets.sizes: found [32, 36]; allowed"),
        ("{sizes = [[32, 32], [32, 32]]}", "[32, 32]", "policy.diffusers.buckets.sizes: found a size twice"),
        ("{sizes = [[64, 32], [32, 32]]}", "[1024, 1024]", "policy.diffusers.inference_size: found [1024, 1024]; with"),
        ("{area = 1024, max_ratio = 0.5}", "[32, 32]", "policy.diffusers.buckets.max_ratio: found 0.5; allowed"),
    ],
)
def test_wrong_buckets_are_refused_with_what_is_right(
    write_toml: Callable[..., Path], buckets: str, size: str, message: str
) -> None:
    with pytest.raises(UserError) as error:
        load_config(
            write_toml(), [f"--policy.diffusers.buckets={buckets}", f"--policy.diffusers.inference_size={size}"]
        )
    assert message in str(error.value)


def test_a_size_that_the_model_cannot_make_is_refused_with_the_nearest() -> None:
    listed = DiffusersConfig(inference_size=(32, 32), buckets=BucketsConfig(sizes=((32, 32), (40, 32), (64, 320))))
    assert list(size_problems(listed, "a model", 16, positions=16)) == [
        "policy.diffusers.buckets, size = [40, 32]: a model needs multiples of 16 (VAE times patch size), as [48, 32]",
        "policy.diffusers.buckets, size = [64, 320]: a model has positions for at most 256 pixels a side",
    ]
    made = DiffusersConfig(inference_size=(40, 40), buckets=BucketsConfig(area=1600, step=8))
    assert list(size_problems(made, "a model", 16)) == [
        "policy.diffusers.buckets.step = 8: a model needs multiples of 16 (VAE times patch size), as 16"
    ]


def test_check_shows_the_buckets_and_estimates_for_the_largest(
    write_toml: Callable[..., Path], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--env", "--config", str(write_toml()), folder, BUCKETS]) == 0
    report = capsys.readouterr().out
    assert "10 images in buckets (height x width): 32 x 32: 2, 32 x 96: 4, 96 x 32: 4" in report
    assert "97.5% of their area is kept; 4.png loses most, 25.0%" in report
    assert "a sample of 96 x 32 pixels, the largest: latents" in report


def test_check_does_not_count_steps_as_if_all_samples_had_one_size(
    write_toml: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = f'--train.train_policy.dataset.local_dir="{marked_folder(tmp_path / "few", SIZES[:3])}"'
    options = (few, "--train.train_batch_per_replica=4", "--train.max_num_steps=none", "--train.epoch=8")
    config = str(write_toml())
    assert main(["check", "--config", config, *options]) == 2
    assert "make no whole step of 4 samples" in capsys.readouterr().err
    assert main(["check", "--config", config, *options, BUCKETS]) == 0
    assert "steps: depend on the sizes (policy.diffusers.buckets)" in capsys.readouterr().out
    assert BucketStream.of_sizes(SIZES[:3], 4, 0).steps_until(8) == 6  # as many as the run has


def test_check_counts_repeats_as_the_run_does(
    write_toml: Callable[..., Path], folder: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    place = folder.partition("=")[2]
    folders = f"--train.train_policy.dataset={{folders = [{{local_dir = {place}, repeats = 3}}]}}"
    line = "30 samples in buckets (height x width): 32 x 32: 6, 32 x 96: 12, 96 x 32: 12"
    assert main(["check", "--env", "--config", str(write_toml()), folders, BUCKETS]) == 0
    assert line in capsys.readouterr().out
    caplog.set_level(logging.INFO)
    train(write_toml(), folders, BUCKETS, "--train.max_num_steps=1", "--train.ckpt.enable_checkpoint=false")
    assert line in caplog.text
