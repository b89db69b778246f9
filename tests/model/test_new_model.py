"""A family that is not ours: registered from a user's script, and from a file dropped into the package folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from transformers import Gemma2Config, Gemma2Model

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.base import ModelRegistry, WeightMapper
from cosmos_rl.policy.model.tiny.text import t5_tokenizer
from cosmos_rl.tracking.metrics import read_metrics
from tests.support import patience
from tests.support.paths import ROOT

MODEL_FILE = ROOT / "tests" / "support" / "my_sana_model.py"


@pytest.fixture(scope="module")
def tiny_sana(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    text = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_implementation="eager",
    )
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
        sample_size=16,
        patch_size=1,
    )
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    folder = tmp_path_factory.mktemp("sana") / "pipe"
    encoder = Gemma2Model(text).eval()
    SanaPipeline(tokenizer, encoder, vae.eval(), transformer.eval(), scheduler).save_pretrained(folder)
    return folder


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
