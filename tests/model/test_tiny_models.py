"""The tiny pipelines: complete, reloadable, the same for a seed, with an autoencoder that keeps images readable."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model import tiny
from tests.support import patience
from tests.support.paths import ROOT


def digest(folder: Path) -> dict[str, str]:
    """Returns the hash of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def unit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("sd3", tmp_path_factory.mktemp("tiny") / "unit", "unit", 3)


@pytest.mark.zoo
@pytest.mark.process
def test_the_command_prints_the_folder_and_nothing_else(tmp_path: Path) -> None:
    """Libraries that are installed but not used here, such as torchao, would warn."""
    command = [sys.executable, "-m", "cosmos_rl.launcher.cli", "tiny-model", "sd3", "--preset", "unit"]
    ended = patience.run([*command, "--out", str(tmp_path / "tiny")])
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{tmp_path / 'tiny'}\n", "")


def test_same_seed_same_bytes_other_seed_other_weights(unit_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)  # what the caller drew before must not matter
    state = torch.get_rng_state()
    again = tiny.build("sd3", tmp_path / "again", "unit", 3)
    assert torch.equal(state, torch.get_rng_state())
    other = tiny.build("sd3", tmp_path / "other", "unit", 4)
    assert digest(again) == digest(unit_folder)
    weights = "diffusion_pytorch_model.safetensors"
    assert digest(other)[f"transformer/{weights}"] != digest(unit_folder)[f"transformer/{weights}"]
    assert digest(other)[f"vae/{weights}"] == digest(unit_folder)[f"vae/{weights}"]


@pytest.mark.parametrize("preset", list(tiny.FAMILIES["sd3"]))
def test_reloads_and_samples_with_default_arguments(preset: str, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(tiny.build("sd3", tmp_path / preset, preset, 0))
    pipeline.set_progress_bar_config(disable=True)
    assert type(pipeline).__name__ == "StableDiffusion3Pipeline"
    image = pipeline("a photo of the digit seven").images[0]  # 28 steps, guidance 7, 256 T5 tokens
    assert image.size == (32, 32)
    prompts = ["an odd prompt, with (signs)!", ""]
    short = pipeline(prompts, num_inference_steps=2, max_sequence_length=16, output_type="pt")
    assert short.images.shape == (2, 3, 32, 32)
    assert torch.isfinite(short.images).all()


def test_prompts_stay_whole_and_apart(unit_folder: Path) -> None:
    from diffusers import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(unit_folder)
    for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2, pipeline.tokenizer_3):
        assert len(tokenizer("a photo of the digit seven").input_ids) <= 8
        unknown = tokenizer.convert_tokens_to_ids(tokenizer.unk_token)
        inner = tokenizer("Odd, words! (42%) zyx#q", add_special_tokens=False).input_ids
        assert unknown not in inner
    assert not pipeline.text_encoder_3.training
    prompts = [f"a photo of the digit {word}" for word in ("one", "two", "three")]
    with torch.no_grad():
        features, _, pooled, _ = pipeline.encode_prompt(
            prompts, prompts, prompts, do_classifier_free_guidance=False, max_sequence_length=16
        )
    assert features.shape == (3, 32, 64)
    for vectors in (features.flatten(1), pooled):
        assert torch.pdist(vectors).min() > 0.1 * vectors.norm(dim=1).mean()


def test_lora_targets_are_those_of_sd3(unit_folder: Path) -> None:
    from diffusers import SD3Transformer2DModel

    names = {name for name, _ in SD3Transformer2DModel.from_pretrained(unit_folder / "transformer").named_modules()}
    ends = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    for block in range(2):
        assert {f"transformer_blocks.{block}.attn.{end}" for end in ends} <= names
    assert "transformer_blocks.0.attn.to_add_out" in names
    assert "transformer_blocks.1.attn.to_add_out" not in names


def test_names_are_known_without_torch() -> None:
    code = "import sys; from cosmos_rl.policy.model import tiny; print(list(tiny.FAMILIES), 'torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == f"{list(tiny.FAMILIES)} False"


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_other_families_are_the_same_for_a_seed_too(family: str, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first, again = (tiny.build(family, tmp_path / name, "unit", 3) for name in ("first", "again"))
    assert digest(first) == digest(again) != digest(tiny.build(family, tmp_path / "other", "unit", 4))
    assert torch.equal(state, torch.get_rng_state())


def test_every_family_has_a_maker() -> None:
    from cosmos_rl.policy.model.tiny.zoo import MAKERS

    assert set(tiny.FAMILIES) == {"sd3", *MAKERS}


def test_the_trained_video_autoencoder_keeps_motion_and_colour(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLWan

    from cosmos_rl.policy.model.tiny.shapes import ALL_SHAPES, DIRECTIONS, draw_clip
    from examples.moving_shapes.shapes_reward import find_move, has_the_colour

    folder = tiny.build("wan", tmp_path / "wan", "shapes", 0)
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    random = np.random.default_rng(7)
    clips = np.stack([draw_clip(shape, random) for shape in ALL_SHAPES])
    pixels = torch.from_numpy(clips).movedim(-1, 1).float() / 127.5 - 1
    with torch.no_grad():
        decoded = vae.decode(vae.encode(pixels).latent_dist.mean, return_dict=False)[0]  # pyright: ignore
    again = ((decoded.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).movedim(1, -1).numpy()
    moves = zip(again, ALL_SHAPES, strict=True)
    along = [float(find_move(clip) @ np.array(DIRECTIONS[shape.direction])) for clip, shape in moves]
    assert np.mean(along) > 0.85
    captions = [shape.caption for shape in ALL_SHAPES]
    assert np.mean([has_the_colour(*pair) for pair in zip(again, captions, strict=True)]) > 0.7


def test_clips_of_shapes_show_what_their_captions_say() -> None:
    from cosmos_rl.policy.model.tiny.shapes import ALL_SHAPES, DIRECTIONS, Shape, draw_clip
    from examples.moving_shapes.shapes_reward import find_move, has_the_colour, moves_right

    random = np.random.default_rng(8)
    for shape in ALL_SHAPES:
        clip = draw_clip(shape, random)
        along, across = np.array(DIRECTIONS[shape.direction]), np.array(DIRECTIONS[shape.direction])[::-1]
        assert 0.7 < find_move(clip) @ along < 1.3
        assert abs(find_move(clip) @ across) < 0.05
        assert has_the_colour(clip, shape.caption) == 1
        assert (moves_right(clip) > 0.7) == (shape.direction == "right")
        assert (moves_right(clip) < -0.6) == (shape.direction != "right")
    clip = draw_clip(Shape("red", "circle", "left"), random)
    assert has_the_colour(clip, "a blue circle") == 0
    assert moves_right(np.full_like(clip, 20)) == -1.5


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sd3"):
        tiny.build("sd4", tmp_path / "a", "unit", 0)
    with pytest.raises(UserError, match="digits"):
        tiny.build("sd3", tmp_path / "a", "huge", 0)
    full = tmp_path / "full"
    full.mkdir()
    (full / "keep.txt").write_text("mine")
    with pytest.raises(UserError, match="full"):
        tiny.build("sd3", full, "unit", 0)
    assert list(tmp_path.iterdir()) == [full]


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cosmos_rl.policy.model.tiny import sd3

    def broken(out: Path, **_: object) -> None:
        (out / "half").write_text("half")
        raise RuntimeError("disk full")

    monkeypatch.setattr(sd3, "build_sd3", broken)
    with pytest.raises(RuntimeError, match="disk full"):
        tiny.build("sd3", tmp_path / "model", "unit", 0)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    empty = tmp_path / "model"
    empty.mkdir()
    tiny.build("sd3", empty, "unit", 0)
    assert (empty / "model_index.json").is_file()


def test_autoencoder_keeps_held_out_digits_readable() -> None:
    pytest.importorskip("sklearn")
    from diffusers import AutoencoderKL
    from PIL import Image

    from cosmos_rl.policy.model.tiny.sd3 import VAE_FOLDER

    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    try:
        import digits
        import judge
    finally:
        sys.path.pop(0)
    assert sum(path.stat().st_size for path in VAE_FOLDER.iterdir()) <= 300_000
    vae: Any = AutoencoderKL.from_pretrained(VAE_FOLDER)
    small, labels = digits.load_part("judge_test")
    red = (255, 60, 30)
    for images in ([digits.enlarge(d) for d in small], [digits.tint(digits.enlarge(d), red) for d in small]):
        pixels = torch.from_numpy(np.stack([np.asarray(p.convert("RGB")) for p in images])).movedim(-1, 1)
        with torch.no_grad():
            latents = vae.encode(pixels.float() / 127.5 - 1).latent_dist.mean
            decoded = vae.decode(latents).sample.clamp(-1, 1)
        arrays = ((decoded + 1) * 127.5).round().byte().movedim(1, -1).numpy()
        referee = judge.Judge()
        kept = (referee.labels([Image.fromarray(array) for array in arrays]) == labels).mean()
        real = (referee.labels(images) == labels).mean()
        assert kept >= 0.95 * real
        assert np.abs(arrays.mean(axis=(0, 1, 2)) - pixels.numpy().mean(axis=(0, 2, 3))).max() < 10  # colours survive
        normal = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        assert abs(normal.mean().item()) < 0.7
        assert 0.4 < normal.std().item() < 1.6
