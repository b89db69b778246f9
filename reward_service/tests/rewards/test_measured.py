"""Rewards without a model: numbers by hand, closed forms and an independent SSIM."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from reward_examples import measures
from reward_examples.measured import BrightnessTarget, MotionSmoothness, Sharpness, SsimToReference
from scipy.ndimage import gaussian_filter

from cosmos_rl_reward.handler import BadInput, NotReady
from cosmos_rl_reward.rewards.jpeg import JpegCompressibility, JpegIncompressibility

rng = np.random.default_rng(0)
NOISE = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
FLAT = np.full((48, 64, 3), 90, np.uint8)


def scores(reward, media, **metadata):
    reward.set_up()
    return reward.calculate_reward(media, {"prompts": [""] * len(media), **metadata})


def test_jpeg_sizes_are_those_of_the_files():
    batch = np.stack([FLAT, NOISE])
    expected = []
    for image in batch:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=95)
        expected.append(len(file.getvalue()))
    assert scores(JpegIncompressibility(), batch)["scores"] == {"jpeg_incompressibility": [n / 1000 for n in expected]}
    assert scores(JpegCompressibility(), batch)["scores"] == {"jpeg_compressibility": [-n / 500_000 for n in expected]}


def test_a_video_scores_the_mean_of_its_frames():
    video = np.stack([FLAT, NOISE]).transpose(3, 0, 1, 2)[None]  # [1, 3, 2, H, W]
    single = scores(JpegIncompressibility(), np.stack([FLAT, NOISE]))["scores"]["jpeg_incompressibility"]
    assert scores(JpegIncompressibility(), video)["scores"]["jpeg_incompressibility"] == [
        pytest.approx(np.mean(single))
    ]


def test_laplacian_variance_of_a_checkerboard():
    board = np.indices((10, 10)).sum(0) % 2 * 255
    image = np.repeat(board[:, :, None], 3, -1).astype(np.uint8)
    # every inner pixel: four neighbours differ by 255, so the response is +-1020 with mean 0
    assert measures.laplacian_variance(image) == pytest.approx(1020.0**2, rel=1e-9)


def test_sharpness_is_half_at_its_half_point_and_falls_with_blur():
    variance = measures.laplacian_variance(NOISE)
    result = scores(Sharpness(options={"half": variance}), np.stack([NOISE, FLAT]))["scores"]
    assert result["sharpness"] == [pytest.approx(0.5), 0.0]
    assert result["laplacian_variance"] == [pytest.approx(variance), 0.0]
    blurred = np.asarray(Image.fromarray(NOISE).resize((16, 12)).resize((64, 48)))
    assert measures.laplacian_variance(blurred) < variance / 4


@pytest.mark.parametrize("half", [0, -1, "x", True])
def test_a_wrong_half_point_is_named(half):
    with pytest.raises(NotReady, match=r"options\.half"):
        Sharpness(options={"half": half}).set_up()


def test_brightness_uses_luma_and_falls_to_zero_at_the_far_end():
    green = np.zeros((1, 8, 8, 3), np.uint8)
    green[..., 1] = 255
    result = scores(BrightnessTarget(options={"target": 0.587}), green)["scores"]
    assert result["brightness"] == [pytest.approx(0.587)]
    assert result["brightness_target"] == [pytest.approx(1.0)]
    black_white = np.stack([np.zeros((8, 8, 3)), np.full((8, 8, 3), 255)]).astype(np.uint8)
    assert scores(BrightnessTarget(options={"target": 0.8}), black_white)["scores"]["brightness_target"] == [
        pytest.approx(0.0),
        pytest.approx(0.75),
    ]


def grey_video(levels):
    video = np.broadcast_to(np.array(levels, np.uint8)[None, None, :, None, None], (1, 3, len(levels), 4, 5))
    return np.ascontiguousarray(video)


@pytest.mark.parametrize(
    ("levels", "evenness", "moved"),
    [
        ([0, 51, 102, 153], 1.0, 0.2),  # linear
        ([0, 51, 0, 51], 0.0, 0.2),  # flicker
        ([0, 51, 153], 1 - 51 / 153, 0.3),  # steps of 0.2 and 0.4: |0.4 - 0.2| / (0.2 + 0.4)
        ([7, 7, 7], 1.0, 0.0),
    ],
)
def test_motion_by_hand(levels, evenness, moved):
    result = scores(MotionSmoothness(), grey_video(levels))["scores"]
    assert result["evenness"] == [pytest.approx(evenness)]
    assert result["motion"] == [pytest.approx(moved)]
    assert result["motion_smoothness"] == [pytest.approx(evenness if moved else 0.0)]  # a frozen video is not smooth


def test_slow_motion_is_marked_down_in_proportion():
    result = scores(MotionSmoothness(options={"min_motion": 0.4}), grey_video([0, 51, 102]))
    assert result["scores"]["motion_smoothness"] == [pytest.approx(0.5)]


def test_two_frames_are_no_motion():
    result = scores(MotionSmoothness(), grey_video([0, 9]))
    assert result["scores"]["motion_smoothness"] == [None]
    assert "2 frames" in result["item_errors"][0]


def independent_ssim(x, y):
    x, y = (np.dot(a, [0.299, 0.587, 0.114]) / 255 for a in (x, y))

    def blur(a):
        return gaussian_filter(a, 1.5, truncate=3.4)[5:-5, 5:-5]  # radius 5

    mx, my = blur(x), blur(y)
    vx, vy, cov = blur(x * x) - mx * mx, blur(y * y) - my * my, blur(x * y) - mx * my
    c1, c2 = 1e-4, 9e-4
    return (((2 * mx * my + c1) * (2 * cov + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean()


def test_ssim_against_scipy_and_closed_forms():
    noisy = np.clip(NOISE.astype(int) + rng.integers(-40, 40, NOISE.shape), 0, 255).astype(np.uint8)
    assert measures.ssim(NOISE, noisy) == pytest.approx(independent_ssim(NOISE, noisy), abs=1e-10)
    assert measures.ssim(NOISE, NOISE) == pytest.approx(1.0)
    a, b = 51 / 255, 204 / 255
    flat = [np.full((12, 12, 3), v, np.uint8) for v in (51, 204)]
    assert measures.ssim(*flat) == pytest.approx((2 * a * b + 1e-4) / (a * a + b * b + 1e-4))


def test_references_come_from_the_folder_or_the_request(tmp_path):
    Image.fromarray(NOISE).save(tmp_path / "a.png")
    Image.fromarray(FLAT[:20]).save(tmp_path / "small.png")
    (tmp_path.parent / "outside.png").write_bytes((tmp_path / "a.png").read_bytes())
    uri = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    names = ["a.png", uri, "small.png", "../outside.png", "none.png", "data:image/png;base64,AAAA", 3]
    reward = SsimToReference(options={"reference_dir": str(tmp_path)})
    result = scores(reward, np.stack([NOISE] * len(names)), references=names)
    values = result["scores"]["ssim_to_reference"]
    assert values[:2] == [pytest.approx(1.0)] * 2
    assert values[2:] == [None] * 5
    assert "20 x 64 differ" in result["item_errors"][2]
    assert "not in the service's reference_dir" in result["item_errors"][3]
    assert "cannot read 'none.png'" in result["item_errors"][4]
    assert set(result["item_errors"]) == {2, 3, 4, 5, 6}
    with pytest.raises(BadInput, match="references: 1 entries for 2 samples"):
        scores(reward, np.stack([NOISE, FLAT]), references=["a.png"])


def png(width, height, rows=None):
    """A 1-bit PNG of any size: a few bytes for each thousand pixels. Valid unless only some ``rows`` are there."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    packer = zlib.compressobj()
    row = bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(row) for _ in range(rows or height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def uri(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_a_reference_is_not_decoded_before_its_size_is_known(monkeypatch):
    """13 000 squared in 20 kB became 1.8 GB; 60 000 squared is beyond Pillow's own limit."""
    decoded = []
    convert = Image.Image.convert
    monkeypatch.setattr(
        Image.Image, "convert", lambda self, *a, **k: decoded.append(self.size) or convert(self, *a, **k)
    )
    bomb = png(13000, 13000)
    assert len(bomb) < 30_000
    reward, images = SsimToReference(), np.stack([NOISE] * 3)
    result = scores(reward, images, references=[uri(bomb), uri(png(60000, 60000, rows=1)), uri(png(64, 48))])
    assert decoded == [(64, 48)]
    assert [value is None for value in result["scores"]["ssim_to_reference"]] == [True, True, False]
    assert result["item_errors"][0] == "image 48 x 64 and reference 13000 x 13000 differ in size"
    assert "cannot read" in result["item_errors"][1]


def test_references_of_other_formats_are_not_tried():
    """Pillow knows dozens of formats, some of them read by other programs."""
    names = []
    for kind in ("BMP", "TIFF", "PPM", "PNG", "JPEG", "WEBP"):
        file = io.BytesIO()
        Image.fromarray(NOISE).save(file, kind)
        names.append(uri(file.getvalue()))
    values = scores(SsimToReference(), np.stack([NOISE] * 6), references=names)["scores"]["ssim_to_reference"]
    assert [value is None for value in values] == [True, True, True, False, False, False]
