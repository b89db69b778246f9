"""Sizes of latents and tokens from a pipeline's files, against the pipeline itself."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.accept import find_problems, read_model
from cosmos_rl.launcher.acceptance.length import run_length
from cosmos_rl.launcher.acceptance.media_size import media_problems
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.check.measure import measure_geometry
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.geometry import Geometry, find_blocks, find_geometry, text_tokens, text_width
from cosmos_rl.launcher.pipeline_files import PipelineFiles, Unknown, read_pipeline
from cosmos_rl.policy.config import Config, PolicyConfig, config_from_tables
from cosmos_rl.policy.model.driver.contract import Size
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.driver.probe import prove
from tests.support.family_runs import folder_of

FAST = ("sana", "flux", "wan")
ZOO = (
    "sd3",
    "flux2-klein",
    "qwen-image",
    "z-image",
    "cogview4",
    "lumina2",
    "chroma",
    "aura-flow",
    "sana-video",
    "cosmos-predict2",
    "cosmos-predict2.5",
    "wan2.2",
    "wan2.2-5b",
    "hunyuan-video",
    "ltx",
    "mochi",
)
FAMILIES = [pytest.param(name, marks=pytest.mark.slow) for name in FAST]
FAMILIES += [pytest.param(name, marks=pytest.mark.zoo) for name in ZOO]

PUBLISHED: list[tuple[str, dict[str, Any], dict[str, Any], Geometry]] = [
    (
        "FluxPipeline",
        {"_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "latent_channels": 16},
        {"in_channels": 64, "patch_size": 1},
        Geometry(16, 8, 1, 2),
    ),
    (
        "Flux2KleinPipeline",
        {"block_out_channels": [128, 256, 512, 512], "latent_channels": 32, "patch_size": [2, 2]},
        {"in_channels": 128, "patch_size": 1},
        Geometry(32, 8, 1, 2),
    ),
    (
        "SanaPipeline",
        {"encoder_block_out_channels": [128, 256, 512, 512, 1024, 1024], "latent_channels": 32},
        {"in_channels": 32, "patch_size": 1},
        Geometry(32, 32, 1, 1),
    ),
    (
        "WanPipeline",  # 2.1
        {"base_dim": 96, "temperal_downsample": [False, True, True], "z_dim": 16},
        {"in_channels": 16, "patch_size": [1, 2, 2]},
        Geometry(16, 8, 4, 2),
    ),
    (
        "WanPipeline",  # 2.2, 5B
        {"temperal_downsample": [False, True, True], "z_dim": 48, "patch_size": 2, "scale_factor_spatial": 16},
        {"in_channels": 48, "patch_size": [1, 2, 2]},
        Geometry(48, 16, 4, 2),
    ),
    (
        "LTXPipeline",
        {"spatio_temporal_scaling": [True, True, True, False], "patch_size": 4, "patch_size_t": 1}
        | {"latent_channels": 128, "block_out_channels": [128, 256, 512, 512]},
        {"in_channels": 128, "patch_size": 1, "patch_size_t": 1},
        Geometry(128, 32, 8, 1),
    ),
    (
        "MochiPipeline",
        {"spatial_expansions": [2, 2, 2], "temporal_expansions": [1, 2, 3], "latent_channels": 12},
        {"in_channels": 12, "patch_size": 2},
        Geometry(12, 8, 6, 2),
    ),
    (
        "HunyuanVideoPipeline",
        {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4, "latent_channels": 16}
        | {"block_out_channels": [128, 256, 512, 512]},
        {"in_channels": 16, "patch_size": 2, "patch_size_t": 1},
        Geometry(16, 8, 4, 2),
    ),
    (
        "QwenImagePipeline",  # makes images with a VAE of videos
        {"temperal_downsample": [False, True, True], "z_dim": 16, "dim_mult": [1, 2, 4, 4]},
        {"in_channels": 64, "patch_size": 2},
        Geometry(16, 8, 1, 2),
    ),
    (
        "ZImagePipeline",
        {"block_out_channels": [128, 256, 512, 512], "latent_channels": 16},
        {"in_channels": 16, "all_patch_size": [2], "all_f_patch_size": [1]},
        Geometry(16, 8, 1, 2),
    ),
    (
        "Cosmos2_5_PredictBasePipeline",  # its transformer takes a mask too
        {"temperal_downsample": [False, True, True], "z_dim": 16},
        {"in_channels": 17, "patch_size": [1, 2, 2]},
        Geometry(16, 8, 4, 2),
    ),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))


def files_of(folder: Path) -> PipelineFiles:
    return read_pipeline(PolicyConfig(model_name_or_path=str(folder), is_diffusers=True))


def job(folder: Path | str, **diffusers: Any) -> Config:
    policy = {"model_name_or_path": str(folder), "is_diffusers": True, "model_gradient_checkpointing": False}
    job = {"type": "sft", "mini_batch": 1}
    return config_from_tables(
        {"policy": {**policy, "diffusers": diffusers}, "train": {"train_policy": job, "param_dtype": "float32"}}, "test"
    )


@pytest.mark.parametrize(
    ("name", "vae", "transformer", "geometry"), PUBLISHED, ids=[f"{row[0]}-{row[3].channels}" for row in PUBLISHED]
)
def test_published_configurations_give_the_published_strides(
    tmp_path: Path, name: str, vae: dict[str, Any], transformer: dict[str, Any], geometry: Geometry
) -> None:
    files = PipelineFiles(tmp_path, name, {"transformer": {}}, {"vae": vae, "transformer": transformer})
    assert find_geometry(files) == geometry


def test_81_frames_of_480_x_832_are_32760_tokens_of_wan() -> None:
    wan = Geometry(16, 8, 4, 2)
    assert wan.latent_shape(480, 832, 81) == (16, 21, 60, 104)
    assert wan.tokens(480, 832, 81) == 32760
    assert (wan.multiple, wan.frame_multiple) == (16, 4)


@pytest.mark.parametrize(
    ("vae", "transformer", "why"),
    [
        ({}, {"patch_size": 2}, "no whole number latent_channels"),
        ({"latent_channels": 4}, {"patch_size": 2}, "does not list its blocks"),
        ({"latent_channels": 4, "block_out_channels": [8, 8]}, {}, "no whole number patch_size"),
        ({"latent_channels": 4, "block_out_channels": [8, 8]}, {"patch_size": [1, 2, 4]}, "patches of [1, 2, 4]"),
        ({"latent_channels": True, "block_out_channels": [8, 8]}, {"patch_size": 2}, "latent_channels"),
        ({"latent_channels": 4, "block_out_channels": "many"}, {"patch_size": 2}, "no list of whole numbers"),
    ],
)
def test_what_the_files_do_not_say_is_to_be_measured(
    tmp_path: Path, vae: dict[str, Any], transformer: dict[str, Any], why: str
) -> None:
    files = PipelineFiles(tmp_path, "MyPipeline", {"transformer": {}}, {"vae": vae, "transformer": transformer})
    with pytest.raises(Unknown) as caught:
        find_geometry(files)
    assert why in str(caught.value)
    assert f"measure it with `cosmos-rl check-model {tmp_path}`" in str(caught.value)


def count_kept(driver: Driver, size: Size) -> int:
    """Bytes that autograd keeps of one velocity, weights left out."""
    state = driver.pack(torch.randn(1, *driver.noise_shape(size)), size)
    cond = driver.encode(["a cat"])
    weights = {p.data_ptr() for module in driver.denoisers.values() for p in module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        driver.velocity(state, driver.training_level(torch.tensor(0.5), size), cond, None, size)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_estimates_from_files_are_what_the_pipeline_makes(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(family)
    files, driver = files_of(folder), Driver(load_pipeline(str(folder)), call={"max_sequence_length": 16})
    prove(driver)
    found = find_geometry(files)
    frames = 1 if driver.frames_name is None else 2 * found.frame_multiple + 1
    size = Size(128, 128, frames)
    state = driver.pack(torch.zeros(1, *driver.noise_shape(size)), size)
    latents = driver.before_decoder(state, size)[0]
    assert [n for n in latents.shape if n > 1] == [n for n in found.latent_shape(*size) if n > 1]
    assert math.prod(driver.noise_shape(size)) == latents.numel()
    assert measure_geometry(driver) == found
    assert find_blocks(files).width == count_width(driver)
    media = {"is_video": True, "train_frames": frames, "inference_frames": frames} if frames > 1 else {}
    config = job(folder, inference_size=[128, 128], max_prompt_length=16, **media)
    assert list(media_problems(config, files)) == []
    assert text_width(files) == driver.encode(["a cat"]).values[0][0][0].shape[-1]
    if family != "sd3":
        assert text_tokens(config, files) == 16
    guess = estimate.memory(config, read_model(config), on_cpu=True, saves=1)
    assert not any("activations" in line for line in guess.without)
    kept = count_kept(driver, size)
    assert 0.5 < estimate._activations(config, files) / kept < 1.3
    assert main(["check-model", str(folder), "--max-prompt-length", "48"]) == 0
    assert f"height and width in multiples of {found.multiple}" in " ".join(capsys.readouterr().out.split())


def count_width(driver: Driver) -> int:
    denoiser: Any = next(iter(driver.denoisers.values()))
    config = denoiser.config
    if "num_attention_heads" in config and "attention_head_dim" in config:
        return config["num_attention_heads"] * config["attention_head_dim"]
    return config.get("hidden_size") or config["dim"]


@pytest.mark.slow
def test_what_check_model_measured_is_read_by_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(folder_of("sana"), tmp_path / "sana")
    files = files_of(folder)
    known = find_geometry(files)
    file = folder / "vae" / "config.json"
    settings = json.loads(file.read_text())
    # defaults of the class, which a file may leave out
    file.write_text(json.dumps({key: value for key, value in settings.items() if key != "encoder_block_out_channels"}))
    with pytest.raises(Unknown, match="measure it with"):
        find_geometry(files_of(folder))
    file.write_text(json.dumps(settings))
    assert main(["check-model", str(folder)]) == 0
    assert find_geometry(files) == known
    measured = next((tmp_path / "cache" / "facts").glob("geometry_*.json"))
    measured.write_text(json.dumps({**json.loads(measured.read_text()), "patch": 7}))
    assert find_geometry(files).patch == 7, "what was measured comes first"
    measured.write_text("{")
    assert find_geometry(files) == known


WAN = {"is_video": True, "train_frames": 5, "inference_frames": 5, "inference_size": [32, 32]}
IMAGES = {"is_video": False, "inference_size": [40, 32]}
SIZE = "inference_size = [40, 32]: {model} needs multiples of 16 (VAE times patch size), as [48, 32]"


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("wan", {}, None),
        ("wan", {"train_frames": 7}, "train_frames = 7: {model} makes a multiple of 4, plus 1, as 5 or 9"),
        ("wan", {"inference_frames": 4}, "inference_frames = 4: {model} makes a multiple of 4, plus 1, as 1 or 5"),
        ("wan", {"inference_size": [40, 32]}, SIZE),
        ("wan", {"is_video": False}, "is_video = false, but WanPipeline makes videos"),
        ("flux", {}, "is_video = true, but FluxPipeline makes images"),
        ("flux", IMAGES, None),
        ("lumina2", IMAGES, SIZE),
    ],
)
def test_sizes_that_a_family_cannot_make_are_refused_with_the_nearest(
    family: str, settings: dict[str, Any], problem: str | None
) -> None:
    folder = folder_of(family)
    config = job(folder, **{**WAN, **settings})
    found = list(find_problems(config, None, read_model(config), run_length(config, own_data=True), own_script=True))
    assert found == ([] if problem is None else [f"policy.diffusers.{problem.format(model=folder)}"])


def test_the_model_refuses_frames_with_the_same_words(tmp_path: Path) -> None:
    from cosmos_rl.distributed.context import Context
    from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model

    config = job(folder_of("wan"), **{**WAN, "train_frames": 7, "inference_frames": 7})
    with pytest.raises(UserError) as caught:
        build_model(config, Context(torch.device("cpu")), rest_on_cpu=False)
    assert str(caught.value) in list(media_problems(config, files_of(folder_of("wan"))))
