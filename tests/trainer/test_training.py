"""What a run shows and how it guards itself."""

import itertools
import json
import math
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file

from cosmos_rl.checkpoint import layout
from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.loop import HOOKS
from cosmos_rl.tracking.durations import format_duration
from cosmos_rl.tracking.metrics import MetricsFile, read_metrics
from tests.support.states import saved_state, trace
from tests.support.trainer_runs import train, train_task

VALIDATION = '[validation]\nenable = true\nfreq = 2\nval_before_train = true\ndataset.local_dir = "{}"'


def losses(run: Path) -> list[float]:
    return [line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl") if line["step"] > 0]


def test_the_processes_that_read_data_end_with_the_task(write_toml: Callable[..., Path]) -> None:
    """Else the end of the program waits for them; a run that ends early has not read all of its batches."""
    config = write_toml()
    _, task = train_task(build_sft, config, "--train.max_num_steps=1", "--train.train_policy.dataloader_num_workers=1")
    assert len(multiprocessing.active_children()) == 1
    task.close()
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_training_lowers_the_held_out_loss(write_toml: Callable[..., Path], image_folder: Path) -> None:
    config = write_toml(VALIDATION.format(image_folder), lora=False)
    run = train(config, "--train.max_num_steps=20", "--validation.freq=10", "--train.optm_lr=3e-3")
    lines = {line["step"]: line for line in read_metrics(run / "metrics.jsonl")}
    held_out = [lines[step]["val/loss_mean"] for step in (0, 10, 20)]
    assert held_out[2] < held_out[1] < held_out[0]
    wanted = {"time/iteration", "train/loss_mean", "train/loss_max", "optim/learning_rate", "train/epoch"}
    assert wanted | {"optim/grad_norm"} <= lines[1].keys()
    assert lines[20]["train/epoch"] == 6  # 12 images, 4 per step


def test_the_first_loss_is_the_mean_over_the_batch_whatever_the_micro_batch(write_toml: Callable[..., Path]) -> None:
    runs = [train(write_toml(), "--train.max_num_steps=1", f"--train.train_policy.mini_batch={n}") for n in (1, 2, 4)]
    values = [losses(run)[0] for run in runs]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)  # float32 summation order


@pytest.mark.slow
def test_validation_changes_no_weight_and_no_later_step(write_toml: Callable[..., Path], image_folder: Path) -> None:
    with_it = train(write_toml(VALIDATION.format(image_folder)), "--train.ema_enable=true")
    without = train(write_toml(), "--train.ema_enable=true")
    assert losses(with_it) == losses(without)
    weights = [load_file(run / "safetensors/step_6/lora/model.safetensors") for run in (with_it, without)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_validation_images_have_fixed_noise_and_an_index(
    write_toml: Callable[..., Path], image_folder: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"prompt": "a/b: c?"}, {"prompt": "a/b: c?"}]))
    config = write_toml(VALIDATION.format(prompts))
    runs = [train(config, "--validation.n_generation=2", "--train.optm_lr=1e-9") for _ in range(2)]
    folders = [run / "media/validation/step_6" for run in runs]
    rows = json.loads((folders[0] / "index.json").read_text())
    assert [row["prompt"] for row in rows] == ["a/b: c?"] * 4
    images = [[np.asarray(Image.open(folder / row["file"])) for row in rows] for folder in folders]
    assert all(np.array_equal(a, b) for a, b in zip(*images, strict=True))
    assert not np.array_equal(images[0][0], images[0][1])  # images of one prompt differ
    assert images[0][0].shape == (32, 32, 3)
    assert (runs[0] / "media/validation/step_0").is_dir()
    assert "val/loss_mean" not in read_metrics(runs[0] / "metrics.jsonl")[-1]


def test_steps_that_are_not_finite_are_left_out_then_stop_the_run(
    write_toml: Callable[..., Path], use_model: Callable[[type], type]
) -> None:
    calls, bad = 0, range(2, 4)

    @use_model
    class SometimesNan(SD3Model):
        def training_sft_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal calls
            total, weight = super().training_sft_step(*args, **kwargs)
            step = calls // 2  # two micro-batches a step
            calls += 1
            return (total * math.nan, weight) if step in bad else (total, weight)

    run = train(write_toml(), "--train.max_nonfinite_steps=3")
    assert [loss is not None for loss in losses(run)] == [True, True, False, False, True, True]
    exported = run / "safetensors/step_6/lora/model.safetensors"
    assert exported.is_file()

    calls, bad = 0, range(3, 100)
    with pytest.raises(FloatingPointError, match="in 3 steps in a row .* the weights are finite"):
        train(write_toml(name="other.toml"), "--train.max_nonfinite_steps=3", "--train.ckpt.save_freq=3")
    newest = max(p for p in run.parent.iterdir() if p.name.isdigit())
    assert layout.list_whole_steps(newest / "checkpoints") == [3]


def test_caption_dropout_replaces_the_prompt(
    write_toml: Callable[..., Path], use_model: Callable[[type], type]
) -> None:
    seen: list[str] = []

    @use_model
    class Recording(SD3Model):
        def encode_prompts(self, prompts: Sequence[str], *args: Any, **kwargs: Any) -> Cond:
            seen.extend(prompts)
            return super().encode_prompts(prompts, *args, **kwargs)

    train(write_toml(), "--train.train_policy.caption_dropout=0.5", "--train.max_num_steps=12")
    share = seen.count("") / len(seen)
    assert len(seen) == 48
    assert 0.2 < share < 0.8  # 48 draws at 0.5: four standard errors are 0.29


def test_the_step_limit_and_epochs_bound_the_run(write_toml: Callable[..., Path]) -> None:
    assert len(losses(train(write_toml(), "--train.max_num_steps=none", "--train.epoch=2"))) == 6
    assert len(losses(train(write_toml(), "--train.max_num_steps=4", "--train.epoch=2"))) == 4


def test_users_loggers_and_hooks_are_called_and_a_failing_logger_does_not_stop(
    write_toml: Callable[..., Path], image_folder: Path
) -> None:
    seen: list[tuple[int, float]] = []
    hooks: list[tuple[str, str, dict[str, object]]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda owner, data: hooks.append((name, type(owner).__name__, data))

    def failing(metrics: dict[str, float], step: int) -> None:
        raise OSError("disk of the logger is full")

    run = train(
        write_toml(VALIDATION.format(image_folder)),
        "--validation.val_before_train=false",
        "--validation.freq=6",
        "--validation.batch_size=6",
        "--train.ckpt.save_freq=6",
        custom_logger_fns=[failing, lambda metrics, step: seen.append((step, metrics["train/loss_mean"]))],
        hook_fns={name: note(name) for name in HOOKS},
    )
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    names = [f"{when}_per_step_validation_hook" for _ in range(2) for when in ("pre", "post")]
    names = ["pre_validation_hook", *names, "post_validation_hook", "save_checkpoint_hook"]
    assert [name for name, _, _ in hooks] == names
    by_name = {name: data for name, _, data in hooks}
    assert by_name["pre_validation_hook"] == {"current_epoch": 2, "is_last_step": True}
    assert by_name["pre_per_step_validation_hook"] == {"current_epoch": 2, "batch_index": 1}
    average = read_metrics(run / "metrics.jsonl")[-1]["val/loss_mean"]
    assert by_name["post_validation_hook"] == {"current_epoch": 2, "val_avg_loss": average}
    scores = [data["val_score"] for name, _, data in hooks if name == "post_per_step_validation_hook"]
    assert sum(scores) / 2 == pytest.approx(average)  # type: ignore[arg-type]
    assert by_name["save_checkpoint_hook"]["checkpoint_path"] == str(run / "checkpoints/step_6/policy")
    assert [owner for name, owner, _ in hooks if "checkpoint" in name] == ["CheckpointManager"]
    with pytest.raises(UserError, match="unknown hooks pre_validation; known are"):
        train(write_toml(), hook_fns={"pre_validation": print})


def test_the_weight_that_a_loss_returns_is_what_its_sum_is_divided_by(
    write_toml: Callable[..., Path], use_model: Callable[[type], type]
) -> None:
    plain = train(write_toml(lora=False))

    @use_model
    class Scaled(SD3Model):
        def training_sft_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            total, weight = super().training_sft_step(*args, **kwargs)
            return total * 0.1, weight * 0.1

    other = train(write_toml(lora=False))
    assert losses(other) == pytest.approx(losses(plain), rel=1e-5)  # float32 products


def test_a_resumed_run_remembers_how_many_steps_were_not_finite(
    write_toml: Callable[..., Path], use_model: Callable[[type], type]
) -> None:
    config, options = write_toml(), ("--train.max_nonfinite_steps=3", "--train.ckpt.save_freq=2")

    @use_model
    class Broken(SD3Model):
        def training_sft_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            total, weight = super().training_sft_step(*args, **kwargs)
            return total * math.nan, weight

    with pytest.raises(FloatingPointError, match="in 3 steps in a row"):
        train(config, *options)
    run = max(p for p in config.parent.joinpath("out").iterdir() if p.name.isdigit())
    with pytest.raises(FloatingPointError, match="the last is step 3"):
        train(config, *options, resume=(run, 2))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["train/loss_mean"] is None  # JSON has no NaN


def test_users_data_sets_are_taken_as_objects_or_functions(write_toml: Callable[..., Path]) -> None:
    class Random:
        def setup(self, config: object) -> None:
            self.ready = True

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, object]:
            assert self.ready
            generator = torch.Generator().manual_seed(index)
            return {"visual": torch.rand(3, 32, 32, generator=generator) * 2 - 1, "prompt": f"number {index}"}

    assert len(losses(train(write_toml(), dataset=Random()))) == 6
    with pytest.raises(UserError, match="dataset: need an object with __len__"):
        train(write_toml(), dataset=iter([1]))
    with pytest.raises(UserError, match="dataset: give an object of the class Random"):
        train(write_toml(), dataset=Random)
    with pytest.raises(UserError, match="dataset: is empty"):
        train(write_toml(), dataset=[])


def test_metrics_are_rewound_to_a_step(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.rewind(3)
    for step in range(1, 6):
        metrics.log(step, {"x": step / 2})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')
    metrics.rewind(3)
    assert [(line["step"], line["x"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
    ]


def test_durations_read_well() -> None:
    assert [format_duration(s) for s in (0.04, 119.94, 125, 3720)] == ["0.0s", "119.9s", "2m05s", "1h02m"]


def test_validation_images_that_are_partly_not_finite_are_counted_and_named(
    write_toml: Callable[..., Path],
    image_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decode, values = AutoencoderKL.decode, itertools.cycle((math.nan, math.inf))

    def spoilt(self: AutoencoderKL, z: torch.FloatTensor, **options: bool) -> tuple[torch.Tensor]:
        (images,) = decode(self, z, **options)
        images[0, 1, 5, 6] = next(values)  # of one in two
        return (images,)

    monkeypatch.setattr(AutoencoderKL, "decode", spoilt)
    with caplog.at_level("WARNING", logger="cosmos"):
        run = train(write_toml(VALIDATION.format(image_folder)), "--train.max_num_steps=1")
    (first, _) = read_metrics(run / "metrics.jsonl")
    assert (first["val/nonfinite_images"], first["val/empty_images"]) == (2.0, 0.0)
    expected = "Step 0: 2 of 4 validation images have pixels that are not finite, as for 'a photo of the number 0', "
    assert [message for message in caplog.messages if message.startswith(expected)]
    assert "pixels that are not finite at steps 0, 1" in (run / "report.html").read_text()


def test_micro_batches_and_checkpointing_do_not_change_the_result(write_toml: Callable[..., Path]) -> None:
    def losses(*options: str) -> list[float]:
        run = train(write_toml(), "--train.max_num_steps=4", *options)
        return [line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl")]

    reference = losses("--train.train_policy.mini_batch=4")
    for options in (
        ("--train.train_policy.mini_batch=1",),
        ("--train.train_policy.mini_batch=2", "--policy.model_gradient_checkpointing=false"),
    ):
        assert losses(*options) == pytest.approx(reference, rel=1e-5)  # float32 summation order


@pytest.mark.slow
def test_weights_computed_in_bf16_move_like_those_in_fp32(write_toml: Callable[..., Path]) -> None:
    moved = {}
    for dtype in ("float32", "bfloat16"):
        options = (f"--train.param_dtype={dtype}", "--train.optm_lr=1e-4", "--train.max_num_steps=50")
        run = train(write_toml(), *options, "--train.ckpt.save_freq=25")
        state = saved_state(run, 50)
        assert {value.dtype for key, value in state.items() if not key.endswith(".step")} == {torch.float32}
        start = train(write_toml(), *options, "--train.max_num_steps=1", "--train.optm_lr=1e-30")
        before = saved_state(start, 1)
        moved[dtype] = float(
            torch.stack([(state[k] - before[k]).abs().mean() for k in state if k.startswith("model.")]).mean()
        )
    assert moved["bfloat16"] == pytest.approx(moved["float32"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_micro_batches_and_gradient_checkpointing_give_one_trace(write_toml: Callable[..., Path], lora: bool) -> None:
    def run(*options: str) -> np.ndarray:
        common = ("--train.train_batch_per_replica=6", "--train.optm_lr=1e-4", "--train.max_num_steps=5")
        return trace(train(write_toml(lora=lora), *common, *options))

    reference = run("--train.train_policy.mini_batch=6", "--policy.model_gradient_checkpointing=false")
    for size in (6, 3, 2, 1):
        found = run(f"--train.train_policy.mini_batch={size}")
        np.testing.assert_allclose(found, reference, rtol=1e-6, atol=1e-6, err_msg=str(size))  # float32 sums
