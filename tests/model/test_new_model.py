"""A family that is not ours: registered from a user's script, and from a file dropped into the package folder."""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import SanaPipeline

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.model.base import ModelRegistry, WeightMapper
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.tracking.metrics import read_metrics
from tests.support import patience
from tests.support.paths import ROOT

MODEL_FILE = ROOT / "tests" / "support" / "my_sana_model.py"


@pytest.fixture(scope="module")
def tiny_sana(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sana", tmp_path_factory.mktemp("sana") / "pipe", "unit", seed=0)


def run_cli(config: Path, script: str, cwd: Path, *, pythonpath: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from cosmos_rl.launcher.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(pythonpath)}
    command = [sys.executable, "-c", code, "--config", str(config), script]
    return patience.run(command, cwd=cwd, env=environment)


@pytest.mark.process
@pytest.mark.parametrize("place", ["user's script", "package folder"])
def test_the_documented_class_trains_two_steps(
    write_toml: Callable[..., Path], tiny_sana: Path, tmp_path: Path, place: str
) -> None:
    config = write_toml(lora=False)
    text = config.read_text().replace("max_num_steps = 6", "max_num_steps = 2")
    lines = [f'model_name_or_path = "{tiny_sana}"' if "model_name" in line else line for line in text.splitlines()]
    config.write_text("\n".join(lines))
    if place == "package folder":
        package = tmp_path / "site" / "cosmos_rl"
        shutil.copytree(ROOT / "cosmos_rl", package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(MODEL_FILE, package / "policy/model/diffusers/my_sana_model.py")
        done = run_cli(config, "cosmos_rl.tools.dataset.diffusers_dataset", tmp_path, pythonpath=package.parent)
    else:
        script = tmp_path / "my_training.py"
        launcher = ROOT / "cosmos_rl/tools/dataset/diffusers_dataset.py"
        script.write_text(MODEL_FILE.read_text() + launcher.read_text())
        done = run_cli(config, str(script), tmp_path, pythonpath=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    run = next(p for p in (tmp_path / "out").iterdir() if p.name.isdigit())
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2]
    trained = SanaPipeline.from_pretrained(run / "safetensors/step_2").transformer.state_dict()
    base = SanaPipeline.from_pretrained(tiny_sana).transformer.state_dict()
    assert any(not torch.equal(trained[key], base[key]) for key in base)


def test_the_documented_class_samples_at_the_pipelines_own_times(
    tiny_sana: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRegistry, "_models", {})  # the class is registered when its file is imported
    own_class = runpy.run_path(str(MODEL_FILE))["MyModel"]

    class Inverted(own_class):
        def timestep_from_sigma(self, sigma: torch.Tensor) -> torch.Tensor:
            return 1 - sigma

    config = DiffusersConfig(inference_size=(32, 32))
    model = own_class(config, model_str=str(tiny_sana))
    scheduler = SanaPipeline.from_pretrained(tiny_sana).scheduler
    for steps in (4, 9, 28):
        scheduler.set_timesteps(steps)
        levels = model.sampling_levels(steps)
        assert torch.equal(levels.t[:-1].long(), scheduler.timesteps)
        assert torch.equal(levels.sigma, scheduler.sigmas)
    assert levels.t.tolist()[0] == 999
    assert model.training_level(torch.tensor([0.99967])).t.tolist() == [999]
    inverted = Inverted(config, model_str=str(tiny_sana)).sampling_levels(4)
    assert torch.equal(inverted.t, 1 - inverted.sigma)


def test_an_unknown_pipeline_class_names_the_nearest_one() -> None:
    with pytest.raises(UserError, match="did you mean 'StableDiffusion3Pipeline'"):
        ModelRegistry.model_class("StableDiffusion2Pipeline")


def test_two_classes_for_one_pipeline_are_refused_unless_asked_for() -> None:
    class Other:
        @staticmethod
        def supported_model_types() -> list[str]:
            return ["StableDiffusion3Pipeline"]

    known = ModelRegistry.model_class("StableDiffusion3Pipeline")
    with pytest.raises(ValueError, match="already registered"):
        ModelRegistry.register(WeightMapper)(Other)
    ModelRegistry.register(WeightMapper, allow_override=True)(Other)
    assert ModelRegistry.model_class("StableDiffusion3Pipeline") is Other
    ModelRegistry.register(WeightMapper, allow_override=True)(known)
