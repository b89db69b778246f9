"""`cosmos-rl doctor`: a sound installation and model pass, planted faults are found."""

import importlib.metadata
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.doctor import command as doctor
from cosmos_rl.policy.config.optimizers import OPTIMIZERS
from cosmos_rl.policy.config.schema import LoggerName
from tests.support.checks import marks
from tests.support.family_runs import TrainedFamily, family_toml
from tests.support.paths import ROOT
from tests.support.videos import write_video

Toml = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path, tiny_sd3: Path) -> Path:
    """A copy of the tiny pipeline to break."""
    return shutil.copytree(tiny_sd3, tmp_path / "model")


def test_a_sound_installation_has_no_red_line_and_no_token_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_very_secret")
    code, found, out = marks(capsys)
    assert (code, "FAIL" in found.values()) == (0, False)
    assert found["diffusers"] == "ok"
    assert "very_secret" not in out
    assert out.count("present") == 2


def test_it_needs_no_torch_without_a_configuration() -> None:
    import subprocess
    import sys

    code = "import sys; from cosmos_rl.launcher.cli import main; main(['doctor']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_wrong_version_is_red_with_the_command_that_fixes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda: ["peft<0.1", "wandb; extra == 'wandb'", "torch>=2"])
    code, found, out = marks(capsys)
    assert (code, found["peft"], found["torch"]) == (1, "FAIL", "ok")
    assert '-> pip install "peft<0.1"' in out


def optional_requirements() -> list[str]:
    """Those of `pyproject.toml` as an installed package has them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [f"{one}; extra == '{extra}'" for extra, names in extras.items() for one in names]


def test_every_optional_package_that_a_key_asks_for_has_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {kind.package for kind in OPTIMIZERS.values()} - {"torch"}
    asked |= {"torchao", *get_args(get_args(LoggerName)[0])} - {"console"}
    monkeypatch.setattr(doctor, "_requirements", optional_requirements)
    code, found, _ = marks(capsys)
    assert {"torchao", "prodigyopt", "schedulefree", "wandb"} <= asked
    assert code == 0
    for package in sorted(asked):
        monkeypatch.setattr(doctor, "_installed_version", lambda name, gone=package: None if name == gone else "99")
        named = [line for line in doctor._extras() if package in line.text and "dev" not in line.subject]
        assert {line.text for line in named} == {f"without {package}"}, package
        assert {found[line.subject] for line in named} == {"-"}
    page = (ROOT / "docs" / "checking.md").read_text().partition("| Extra | For |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {f"optional: {name}" for cell in cells for name in re.findall("`(.*?)`", cell)} == {
        subject for subject in found if subject.startswith("optional: ")
    }


def test_optional_packages_that_are_missing_or_too_old_are_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["torch>=99; extra == 'new'", "peft; extra == 'new'", "no-such-package; extra == 'new'", "pydantic>=2"]
    monkeypatch.setattr(doctor, "_requirements", lambda: wanted)
    code, found, out = marks(capsys)
    assert (code, found["optional: new"]) == (0, "-")
    version = importlib.metadata.version("torch")
    assert f"optional: new          without no-such-package; torch {version}; needs >=99\n" in out
    assert '-> pip install "cosmos_rl[new]"' in out


def test_a_missing_package_and_a_full_disk_are_red(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_NEEDED", ("torch", "no-such-package"))
    monkeypatch.setattr("cosmos_rl.launcher.machine.free_disk", lambda path: 1e6)
    code, found, out = marks(capsys)
    assert (code, found["no-such-package"], found["disk here"]) == (1, "FAIL", "FAIL")
    assert '-> pip install "no-such-package"' in out


def test_a_cpu_build_on_a_machine_with_a_gpu_is_red(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmos_rl.launcher.machine.gpu_lines", lambda: ["Some GPU, 80 GB"])
    monkeypatch.setattr(doctor, "_torch_build", lambda: "cpu")
    code, found, _ = marks(capsys)
    assert (code, found["torch build"]) == (1, "FAIL")


@pytest.mark.parametrize("lora", [True, False])
def test_a_sound_model_passes(write_toml: Toml, capsys: pytest.CaptureFixture[str], lora: bool) -> None:
    code, found, out = marks(capsys, "--config", write_toml(lora=lora))
    assert code == 0, out
    for subject in ("model loads", "base weights", "VAE", "forward", "backward", "export"):
        assert found[subject] == "ok", out
    assert ("fresh adapter" in found) == lora
    assert ("attn.to_q: 2 layers" in out) == lora


def test_half_precision_passes_too(write_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, out = marks(capsys, "--config", write_toml(), "--train.param_dtype=bfloat16")
    assert (code, found.get("export")) == (0, "ok"), out


def test_an_adapter_that_targets_nothing_is_found(write_toml: Toml, capsys: pytest.CaptureFixture[str]) -> None:
    options = ['--policy.lora.target_modules=["attn.to_q", "attn.nothing"]']
    code, found, out = marks(capsys, "--config", write_toml(), *options)
    assert (code, found["model and data"]) == (1, "FAIL")
    assert "'attn.nothing' matches no layer of the transformer" in out


def test_a_random_autoencoder_is_warned_of(write_toml: Toml, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from cosmos_rl.policy.model.tiny.train_vae import new_vae

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        new_vae().save_pretrained(model / "vae")
    code, found, out = marks(capsys, "--config", write_toml(), f"--policy.model_name_or_path={model}")
    assert (code, found["VAE"]) == (0, "warn")
    assert "the VAE destroys images" in out


def test_a_weight_that_is_not_a_number_is_named(
    write_toml: Toml, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["transformer_blocks.1.attn.to_k.weight"][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    code, found, out = marks(capsys, "--config", write_toml(), f"--policy.model_name_or_path={model}")
    assert (code, found["base weights"]) == (1, "FAIL")
    assert "NaN or infinity in transformer.transformer_blocks.1.attn.to_k.weight" in out
    assert "forward" not in found


def test_an_export_that_loses_the_adapter_is_found(
    write_toml: Toml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import StableDiffusion3Pipeline

    monkeypatch.setattr(StableDiffusion3Pipeline, "load_lora_weights", lambda *args, **keywords: None)
    code, found, _ = marks(capsys, "--config", write_toml())
    assert (code, found["export"]) == (1, "FAIL")


def test_an_invalid_configuration_is_refused_before_anything_is_loaded(write_toml: Toml) -> None:
    assert main(["doctor", "--config", str(write_toml()), "--train.optm_lr=-1.0"]) == 2
    assert main(["doctor", "--train.optm_lr=1.0"]) == 2


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("family", "frames", "options"),
    [
        ("cosmos-predict2.5", 9, ["--policy.diffusers.conditional_frames=[1, 2]"]),
        ("hunyuan-video-i2v", 5, []),
    ],
)
def test_fine_tuning_on_videos_is_tried_with_their_first_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, frames: int, options: list[str]
) -> None:
    for number in range(2):
        write_video(tmp_path / f"clips/{number}.mp4", frames)
        (tmp_path / f"clips/{number}.txt").write_text(f"clip {number}", encoding="utf-8")
    described = TrainedFamily(family, frames=("num_frames", frames))
    path = family_toml(tmp_path, described, job="sft", images=tmp_path / "clips")
    code, found, out = marks(capsys, "--config", path, *options)
    assert code == 0, out
    assert "PSNR" in out
    assert {found[subject] for subject in ("fresh adapter", "forward", "backward", "export")} == {"ok"}, out
