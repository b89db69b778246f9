"""`cosmos-rl sample --image` and `--video`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image

from cosmos_rl.data.images import to_uint8
from cosmos_rl.launcher.cli import main
from cosmos_rl.tracking.clips import encode_clip
from tests.support.family_runs import folder_of, stock_pipeline

SIZE = ["--size", "32", "32", "--frames", "13", "--steps", "3", "--guidance", "3"]


def write_media(folder: Path) -> tuple[Path, Path, list[Image.Image]]:
    """An image, a video of seven frames, and these frames as they are decoded."""
    import av

    image, video = folder / "start.png", folder / "start.mp4"
    ramp = np.linspace(0, 255, 32, dtype=np.uint8)
    frames = [np.stack(np.broadcast_arrays(ramp, ramp[:, None], np.uint8(30 * t)), -1) for t in range(7)]
    Image.fromarray(frames[0]).save(image)
    video.write_bytes(encode_clip(np.stack(frames), 8.0))
    with av.open(str(video)) as container:
        return image, video, [frame.to_image() for frame in container.decode(video=0)]


def make(source: Path, out: Path, *options: str) -> np.ndarray:
    """The first frame of the video that the command makes: the encoder's bytes differ from run to run."""
    assert main(["sample", str(source), "a cat", *SIZE, "--out", str(out), *options]) == 0
    assert (out / "000_a-cat.mp4").stat().st_size > 0
    with Image.open(out / "000_a-cat.png") as poster:
        return np.asarray(poster)


def draw_with_diffusers(family: str, seed: int, **media: Any) -> np.ndarray:
    """The first frame of what the command should make, by the documented call."""
    pipe = stock_pipeline(folder_of(family))
    settings = {"height": 32, "width": 32, "num_frames": 13, "num_inference_steps": 3, "guidance_scale": 3.0}
    drawn = {"generator": torch.Generator().manual_seed(seed), "output_type": "pt", "max_sequence_length": 256}
    made = pipe(prompt="a cat", **settings, **drawn, **media, return_dict=False)[0]
    return to_uint8(made)[0, 0].numpy()


@pytest.mark.zoo
def test_cosmos_samples_of_texts_images_and_videos_are_those_of_the_stock_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, video, frames = write_media(tmp_path)
    source = folder_of("cosmos-predict2.5")
    decoded: list[torch.Tensor] = []
    decode = AutoencoderKLWan.decode

    def note(self: Any, z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        decoded.append(z.clone())
        return decode(self, z, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKLWan, "decode", note)
    cases: dict[int, tuple[list[str], dict[str, Any]]] = {
        0: ([], {}),
        1: (["--image", str(image)], {"video": [Image.open(image)], "num_latent_conditional_frames": 1}),
        2: (["--video", str(video)], {"video": frames[-5:], "num_latent_conditional_frames": 2}),
    }
    pipe = stock_pipeline(source)
    for clean, (options, media) in cases.items():
        made = [make(source, tmp_path / f"{clean}_{seed}", *options, "--seed", str(seed)) for seed in (0, 1)]
        assert np.array_equal(made[0], draw_with_diffusers("cosmos-predict2.5", 0, **media))
        first, second, stock = decoded[-3:]
        assert torch.equal(first, stock)
        assert first.shape[2] == 4
        apart = (first - second).abs().mean((0, 1, 3, 4)).tolist()
        # the stock call moves given frames to their medium by its first sigma, 0.995, as it does without our command
        assert all((value < 0.02) == (frame < clean) for frame, value in enumerate(apart)), apart
        if clean:
            wanted = encode(pipe, media["video"])
            assert (first[:, :, :clean] - wanted).abs().mean() < 0.02
            assert (first[:, :, :1] - wanted.roll(1, 3)[:, :, :1]).abs().mean() > 0.05


def encode(pipe: Any, frames: list[Image.Image]) -> torch.Tensor:
    """Frames as what the VAE decodes to them."""
    pixels = torch.from_numpy(np.stack([np.asarray(one) for one in frames])).permute(3, 0, 1, 2)[None]
    with torch.no_grad():
        return pipe.vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()


@pytest.mark.zoo
def test_wan_makes_videos_of_an_image_or_of_the_last_frame_of_a_video(tmp_path: Path) -> None:
    image, video, frames = write_media(tmp_path)
    source = folder_of("wan-i2v")
    of_image = make(source, tmp_path / "a", "--image", str(image))
    of_video = make(source, tmp_path / "b", "--video", str(video))
    assert np.array_equal(of_image, draw_with_diffusers("wan-i2v", 0, image=Image.open(image)))
    assert np.array_equal(of_video, draw_with_diffusers("wan-i2v", 0, image=frames[-1]))
    assert not np.array_equal(of_image, of_video)


def test_files_that_cannot_be_used_are_named_before_torch_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "there.txt").write_text("")
    for options, message in (
        (["--image", "gone.png"], "--image gone.png: no such file"),
        (["--video", "gone.mp4"], "--video gone.mp4: no such file"),
        (["--image", "clip.mp4"], "--image clip.mp4: expected a file that ends with .jpg, .jpeg, .png, .webp"),
        (["--video", str(tmp_path / "there.txt")], "there.txt: expected a file that ends with .mp4"),
        (["--image", "a.png", "--video", "a.mp4"], "not allowed with argument --image"),
    ):
        assert main(["sample", str(tmp_path), "a cat", "--out", str(tmp_path / "out"), *options]) == 2
        assert message in capsys.readouterr().err


def test_a_class_takes_media_or_needs_them_or_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, video, _ = write_media(tmp_path)
    command = ["sample", str(tmp_path), "a cat", "--out", str(tmp_path / "out")]

    def refusal(kind: str, *options: str) -> str:
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind}))
        assert main([*command, *options]) == 2
        return capsys.readouterr().err

    said = refusal("StableDiffusion3Pipeline", "--image", str(image))
    assert f"--image {image}: StableDiffusion3Pipeline makes samples of texts alone; leave it out" in said
    assert "WanPipeline makes samples of texts alone" in refusal("WanPipeline", "--video", str(video))
    assert "needs an image: give --image or --video" in refusal("WanImageToVideoPipeline")


@pytest.mark.zoo
def test_a_video_that_is_too_short_or_no_video_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, broken = tmp_path / "short.mp4", tmp_path / "broken.png"
    short.write_bytes(encode_clip(np.zeros((3, 32, 32, 3), np.uint8), 8.0))
    broken.write_bytes(b"no image")
    command = ["sample", str(folder_of("cosmos-predict2.5")), "a cat", *SIZE, "--out", str(tmp_path / "out")]
    assert main([*command, "--video", str(short)]) == 2
    assert "short.mp4: 3 frames, need 5 (--video, 2 latent frames)" in capsys.readouterr().err
    assert main([*command, "--image", str(broken)]) == 2
    assert "broken.png: cannot be read as an image" in capsys.readouterr().err
