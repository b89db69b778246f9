"""Any number of ranks gives the result of one."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cosmos_rl.checkpoint import layout
from cosmos_rl.tracking.metrics import read_metrics
from tests.support import patience
from tests.support.command_runs import Run, newest_run, steps_done
from tests.support.paths import ROOT
from tests.support.ranks import train_on_ranks
from tests.support.states import saved_state, trace

GLOBAL = ("--train.global_batch_size=8", "--train.train_policy.mini_batch=2", "--train.ema_enable=true")
VALIDATION = '[validation]\nenable = true\nfreq = 2\ndataset.local_dir = "{}"'
EXPORTED = "[lt]*/*model.safetensors"


def assert_same_results(run: Path, reference: Path, name: str) -> None:
    """Traces, held-out losses, exported weights and validation images of two runs of the same batches."""
    # float32 sums in another order: well below what a wrong noise, weight or scale would give
    np.testing.assert_allclose(trace(run), trace(reference), rtol=1e-6, atol=1e-6, err_msg=name)
    lines = [read_metrics(r / "metrics.jsonl") for r in (run, reference)]
    held_out = [[line["val/loss_mean"] for line in found if "val/loss_mean" in line] for found in lines]
    assert len(held_out[0]) == 2
    np.testing.assert_allclose(*held_out, rtol=1e-6, err_msg=name)
    (step,) = {max(int(p.name.split("_")[1]) for p in (r / "safetensors").iterdir()) for r in (run, reference)}
    exports = [next((r / f"safetensors/step_{step}").glob(EXPORTED)) for r in (run, reference)]
    ours, theirs = (load_file(file) for file in exports)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=2e-5, msg=f"{name} {key}")
    folders = [r / f"media/validation/step_{step}" for r in (run, reference)]
    files = [sorted(p.name for p in folder.glob("*.png")) for folder in folders]
    assert files[0] == files[1]
    assert len(files[0]) == 4
    for file in files[0]:
        one, other = (np.asarray(Image.open(folder / file), dtype=int) for folder in folders)
        assert np.abs(one - other).max() <= 1  # rounding to 8 bits


@pytest.mark.zoo
@pytest.mark.process
@pytest.mark.parametrize("recipe", ["image-sft-lora", "image-sft"])
def test_the_sd3_recipes_give_one_result_on_one_two_and_four_ranks(
    tiny_sd3: Path, image_folder: Path, tmp_path: Path, recipe: str
) -> None:
    options = [
        f"--policy.model_name_or_path={tiny_sd3}",
        f"--train.train_policy.dataset.local_dir={image_folder}",
        f"--validation.dataset.local_dir={image_folder}",
        "--validation.enable=true",
        "--validation.freq=2",
        "--policy.diffusers.inference_size=[32, 32]",
        "--policy.diffusers.max_prompt_length=16",
        "--policy.diffusers.sample.num_steps=2",
        "--train.param_dtype=float32",
        "--train.global_batch_size=8",
        "--train.train_policy.mini_batch=2",
        "--train.epoch=10",
        "--train.max_num_steps=4",
    ]
    config = ROOT / f"configs/stable-diffusion-3-5/stable-diffusion-3-5-{recipe}.toml"
    code = "import sys; from cosmos_rl.launcher.cli import main; sys.exit(main())"
    runs = {}
    for count in (1, 2, 4):
        out = tmp_path / str(count)
        command = [sys.executable, "-c", code, "--config", str(config), "--nproc-per-node", str(count)]
        command += [*options, f"--train.output_dir={out}", "cosmos_rl.tools.dataset.diffusers_dataset"]
        done = patience.run(command, cwd=ROOT)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        (runs[count],) = (p for p in out.iterdir() if p.name.isdigit())
    for count in (2, 4):
        assert_same_results(runs[count], runs[1], f"{count} ranks")


@pytest.mark.zoo
@pytest.mark.process
def test_replicas_of_shards_give_the_result_of_one_rank(
    write_toml: Callable[..., Path], image_folder: Path, tmp_path: Path
) -> None:
    config = write_toml(VALIDATION.format(image_folder), lora=False)
    options = (*GLOBAL, "--train.optm_lr=1e-3", "--train.max_num_steps=4")
    one = train_on_ranks(1, config, tmp_path / "1", *options)
    four = train_on_ranks(4, config, tmp_path / "2x2", *options, "--policy.parallelism.dp_replicate_size=2")
    assert_same_results(four, one, "2 x 2")


@pytest.mark.process
def test_killed_on_four_then_on_two_ranks_one_rank_ends_like_the_undisturbed_run(
    write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    total, every = 14, 3
    config = write_toml(lora=False)
    options = [*GLOBAL, "--train.optm_lr=1e-3", f"--train.max_num_steps={total}", f"--train.ckpt.save_freq={every}"]
    options += ["--train.ckpt.export_safetensors=false", "--train.resume=true"]
    log, output = tmp_path / "log", tmp_path / "killed"

    def start(count: int, folder: Path) -> Run:
        return Run(config, log, *options, f"--train.output_dir={folder}", f"--nproc-per-node={count}")

    def past_a_save(saved: int) -> bool:
        """Step ``saved`` or a later one is on the disk whole, and training has gone on, not just to the next save."""
        run = newest_run(output)
        whole = layout.list_whole_steps(run / "checkpoints") if run else []
        return bool(whole) and saved <= whole[-1] < steps_done(output) and steps_done(output) % every != 0

    killed = start(4, output)
    killed.kill_group_when(lambda: past_a_save(every))
    (first,) = (newest_run(output),)
    assert first is not None
    saved = layout.list_whole_steps(first / "checkpoints")[-1]
    killed = start(2, output)
    killed.kill_group_when(lambda: past_a_save(saved + every))
    assert layout.list_whole_steps(first / "checkpoints")[-1] > saved
    for folder, moved in ((output, True), (tmp_path / "calm", False)):
        assert start(1, folder).finish() == 0, log.read_text()[-3000:]
        assert (newest_run(folder) == first) == moved
    calm = newest_run(tmp_path / "calm")
    assert calm is not None
    np.testing.assert_allclose(trace(first), trace(calm), rtol=1e-6, atol=1e-6)
    ours, theirs = saved_state(first, total), saved_state(calm, total)
    assert ours.keys() == theirs.keys()
    for kind in ("model", "ema"):  # of the resumable state: float32, all digits
        pairs = [(ours[key].double(), value.double()) for key, value in theirs.items() if key.startswith(kind)]
        difference = sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5
        size = sum(float(other.square().sum()) for _, other in pairs) ** 0.5
        assert difference <= 1e-6 * size  # float32 sums in another order


@pytest.mark.process
def test_only_the_first_rank_describes_the_run(
    write_toml: Callable[..., Path], image_folder: Path, tmp_path: Path
) -> None:
    config = write_toml(VALIDATION.format(image_folder))
    command = [sys.executable, "-m", "cosmos_rl.launcher.cli", "--nproc-per-node", "2", "--config", str(config)]
    done = patience.run([*command, "--train.max_num_steps=2", "--train.train_policy.mini_batch=1"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank0]:[cosmos]" in done.stdout
    assert "[rank1]:[cosmos]" not in done.stdout
    for line in ("run folder:", "Training the LoRA adapter of", "Step: 2/2", "Finished after 2 steps", "report.html"):
        assert done.stdout.count(line) == 1, line
    (run,) = (tmp_path / "out").glob("2*")
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2]
