"""A family that is not ours: registered from a user's script, and from a file dropped into the package folder."""

import importlib
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, SanaPipeline
from safetensors.torch import load_file

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, DiffusersConfig
from cosmos_rl.policy.model.base import ModelRegistry, WeightMapper
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.tracking.metrics import read_metrics
from tests.support import patience
from tests.support.family_runs import TrainedFamily, family_toml, folder_of
from tests.support.nft_runs import nft_train, nft_train_task
from tests.support.paths import ROOT

MODEL_FILE = ROOT / "tests" / "support" / "my_sana_model.py"
VIDEO_MODEL_FILE = ROOT / "tests" / "support" / "my_wan_model.py"
RL_MODEL_FILE = ROOT / "tests" / "support" / "my_rl_model.py"
LOGGED = ("train/loss_mean", "train/policy_loss_mean", "train/kl_loss_mean", "reward/mean", "optim/grad_norm")


@pytest.fixture(scope="module")
def tiny_sana(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sana", tmp_path_factory.mktemp("sana") / "pipe", "unit", seed=0)


def run_cli(
    config: Path, script: str, cwd: Path, *flags: str, pythonpath: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    code = "import sys; from cosmos_rl.launcher.cli import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(pythonpath)}
    command = [sys.executable, "-c", code, "--config", str(config), *flags, script]
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
        done = run_cli(config, str(script), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = next(p for p in (tmp_path / "out").iterdir() if p.name.isdigit())
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2]
    trained = SanaPipeline.from_pretrained(run / "safetensors/step_2").transformer.state_dict()
    base = SanaPipeline.from_pretrained(tiny_sana).transformer.state_dict()
    assert any(not torch.equal(trained[key], base[key]) for key in base)


CLIPS = """
def clips(config):
    from tests.support.family_runs import Clips

    return Clips(config.policy.diffusers.train_frames)


if __name__ == "__main__":
    from cosmos_rl.launcher import worker_entry

    worker_entry.main(dataset=clips)
"""


@pytest.mark.process
@pytest.mark.zoo
@pytest.mark.parametrize("kind", ["images", "videos"])
def test_the_documented_class_trains_on_two_ranks_as_on_one(
    write_toml: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    config, script = write_toml(lora=False), tmp_path / "my_training.py"
    text = config.read_text().replace("max_num_steps = 6", "max_num_steps = 2\nglobal_batch_size = 8")
    if kind == "images":
        launcher = (ROOT / "cosmos_rl/tools/dataset/diffusers_dataset.py").read_text()
        pipeline, model = build("sana", tmp_path / "pipe", "unit", seed=0), MODEL_FILE.read_text()
    else:
        pipeline, launcher = build("wan", tmp_path / "pipe", "unit", seed=0), CLIPS
        model = VIDEO_MODEL_FILE.read_text()
        text = text.replace("[policy.diffusers]", "[policy.diffusers]\nis_video = true\ntrain_frames = 5")
    lines = [f'model_name_or_path = "{pipeline}"' if "model_name" in line else line for line in text.splitlines()]
    config.write_text("\n".join(lines))
    script.write_text(model + launcher)
    losses = []
    for ranks in ("1", "2"):
        out = tmp_path / f"out_{ranks}"
        done = run_cli(config, str(script), tmp_path, "--nproc-per-node", ranks, f"--train.output_dir={out}")
        assert done.returncode == 0, done.stdout + done.stderr
        run = next(p for p in out.iterdir() if p.name.isdigit())
        losses.append([line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl")])
        stock = DiffusionPipeline.from_pretrained(run / "safetensors/step_2").transformer.state_dict()
        base = DiffusionPipeline.from_pretrained(pipeline).transformer.state_dict()
        assert any(not torch.equal(stock[key], base[key]) for key in base)
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_the_documented_class_learns_by_nft_as_the_driven_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = family_toml(tmp_path, TrainedFamily("sana"), job="nft")
    driven = nft_train(config, "--train.max_num_steps=2")
    monkeypatch.setattr(ModelRegistry, "_models", {})  # the class is registered when its file is imported
    own_class = runpy.run_path(str(RL_MODEL_FILE))["MyRlModel"]
    run, task = nft_train_task(config, "--train.max_num_steps=2")
    assert type(task.model) is own_class
    ours, theirs = (read_metrics(one / "metrics.jsonl") for one in (run, driven))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [1, 2]
    for a, b in zip(ours, theirs, strict=True):
        for key in LOGGED:
            assert a[key] == pytest.approx(b[key], rel=1e-3), key
    assert ours[1]["train/kl_loss_mean"] > 0
    weights = [load_file(one / "safetensors/step_2/lora/model.safetensors") for one in (run, driven)]
    assert weights[0].keys() == weights[1].keys()
    moved = [value for name, value in weights[0].items() if "lora_B" in name]
    assert all(value.abs().max() > 1e-3 for value in moved)  # they start at 0
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-2, atol=2e-4)


@pytest.mark.process
@pytest.mark.zoo
def test_the_documented_class_learns_by_nft_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    config, script = family_toml(tmp_path, TrainedFamily("sana"), job="nft"), tmp_path / "my_training.py"
    script.write_text(RL_MODEL_FILE.read_text() + (ROOT / "cosmos_rl/tools/dataset/diffusion_nft.py").read_text())
    lines = []
    for ranks in ("1", "2"):
        out = tmp_path / f"out_{ranks}"
        done = run_cli(config, str(script), tmp_path, "--nproc-per-node", ranks, f"--train.output_dir={out}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the stock SanaPipeline is driven" not in done.stdout
        run = next(p for p in out.iterdir() if p.name.isdigit())
        lines.append(read_metrics(run / "metrics.jsonl"))
    assert len(lines[0]) == 3
    for a, b in zip(*lines, strict=True):
        for key in LOGGED:
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1e-6), key


@pytest.mark.parametrize(("family", "file"), [("sana", MODEL_FILE), ("wan", VIDEO_MODEL_FILE)])
def test_the_documented_class_samples_at_the_pipelines_own_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, file: Path
) -> None:
    monkeypatch.setattr(ModelRegistry, "_models", {})  # the class is registered when its file is imported
    own_class = next(iter(value for name, value in runpy.run_path(str(file)).items() if name.startswith("My")))

    class Inverted(own_class):
        def timestep_from_sigma(self, sigma: torch.Tensor) -> torch.Tensor:
            return 1 - sigma

    folder = build(family, tmp_path / "pipe", "unit", seed=0)
    config = DiffusersConfig(inference_size=(32, 32), is_video=family == "wan")
    model = own_class(config, model_str=str(folder))
    scheduler = DiffusionPipeline.from_pretrained(folder).scheduler
    for steps in (4, 9, 28):
        scheduler.set_timesteps(steps)
        levels = model.sampling_levels(steps)
        assert torch.equal(levels.t[:-1].long(), scheduler.timesteps)
        assert torch.equal(levels.sigma, scheduler.sigmas)
        assert levels.t[0] == 999
    assert model.training_level(torch.tensor([0.99967])).t.tolist() == [999]
    inverted = Inverted(config, model_str=str(folder)).sampling_levels(4)
    assert torch.equal(inverted.t, 1 - inverted.sigma)


@pytest.mark.parametrize(
    ("family", "file", "name"),
    [
        ("sana", "sana_model", "SanaModel"),
        pytest.param("cosmos-predict2.5", "cosmos_predict2_5_model", "CosmosPredict2_5Model", marks=pytest.mark.slow),
    ],
)
def test_the_documented_files_hold_the_classes_that_are_built(family: str, file: str, name: str) -> None:
    config = Config.model_validate(
        {
            "policy": {
                "model_name_or_path": str(folder_of(family)),
                "is_diffusers": True,
                "diffusers": {
                    "inference_size": (32, 32),
                    "is_video": family != "sana",
                    "train_frames": 5,
                    "inference_frames": 5,
                },
            },
            "train": {"train_policy": {"type": "sft"}},
        }
    )
    model = ModelRegistry.build_diffusers_model(config)
    documented = importlib.import_module(f"cosmos_rl.policy.model.diffusers.{file}")
    assert type(model) is getattr(documented, name)
    assert type(model.pipeline).__name__ in model.supported_model_types()
    own = {member for member in vars(type(model)) if not member.startswith("_")}
    assert own == {"supported_model_types"}  # all else is the stock pipeline's


def test_a_class_of_the_user_serves_a_driven_family_in_whatever_order_they_are_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own:
        @staticmethod
        def supported_model_types() -> list[str]:
            return ["SanaPipeline"]

    driven = ModelRegistry.model_class("SanaPipeline")
    assert issubclass(driven, DrivenModel)
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    ModelRegistry.register(WeightMapper)(Own)
    assert ModelRegistry.model_class("SanaPipeline") is Own
    ModelRegistry.register_driven(driven)
    assert ModelRegistry.model_class("SanaPipeline") is Own
    assert ModelRegistry.model_class("SanaVideoPipeline") is driven


SNIPPET = """
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.model.diffusers.weight_mapper import DiffuserModelWeightMapper
from cosmos_rl.policy.config import DiffusersConfig

@ModelRegistry.register(DiffuserModelWeightMapper)
class MyModel(DiffuserModel):
    @staticmethod
    def supported_model_types():
        return ["MyPipeline"]

    def __init__(self, config: DiffusersConfig, **kwargs):
        super().__init__(config, **kwargs)
        self.set_scheduler_timestep(self.train_sampling_steps)
        self.text_encoders = [self.text_encoder]
        self.tokenizers = [self.tokenizer]
"""
"""The class with which the published documents begin, word for word."""


def test_the_class_of_the_published_documents_is_registered_and_found_by_its_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    (tmp_path / "my_model.py").write_text(SNIPPET)
    mine = runpy.run_path(str(tmp_path / "my_model.py"))["MyModel"]
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/model_index.json").write_text('{"_class_name": "MyPipeline"}')
    config = Config.from_dict({"policy": {"model_name_or_path": str(tmp_path / "pipeline"), "is_diffusers": True}})
    assert ModelRegistry.find_class(config) == ("MyPipeline", mine)


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
