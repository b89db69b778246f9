"""One sample that is no image costs its own score: pixels, latents and decoded videos."""

import json

import numpy as np
import pytest
import torch

from cosmos_rl_reward.decode import LatentDecoder
from cosmos_rl_reward.handler import BadInput
from cosmos_rl_reward.spool import Spool
from cosmos_rl_reward.worker.inputs import read_input
from cosmos_rl_reward.worker.scorer import Scorer
from tests.service import body, image
from tests.test_clients import tiny_vae
from tests.test_pool import ident, spooled

REASON = "payload: pixels must be finite"


def floats(*values, side=4):
    return np.stack([np.full((side, side, 3), value, np.float32) for value in values])


def one_input(tmp_path, array, media="image"):
    spool = Spool(tmp_path)
    job = spooled(spool, body(array, "mock", media_type=media), ident(1), media)
    return read_input(job.id, str(spool.job_path(job.id)), "")


def scorer(name="mock"):
    kwargs = {"device": "cpu", "options": {}}
    return Scorer(
        {"op": "score", "name": name, "reward_class": "", "function": "", "self_test": False, "kwargs": kwargs}
    )


def results(requests, reward="mock"):
    return [json.loads(reply["body"]) if "body" in reply else reply for reply in scorer(reward).score(requests)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 300.0, -3.0])
def test_one_bad_pixel_costs_one_score(tmp_path, bad):
    array = floats(51, 102, 153, 204)
    array[2, 1, 1, 0] = bad
    one = one_input(tmp_path, array)
    assert list(one.bad) == [2]
    assert one.images[:, 0, 0, 0].tolist() == [51, 102, 0, 204]
    request = {"id": one.id, "path": str(Spool(tmp_path).job_path(one.id)), "decoded": ""}
    (result,) = results([request])
    assert result["scores"]["mock"] == [pytest.approx(0.2), pytest.approx(0.4), None, pytest.approx(0.8)]
    assert list(result["item_errors"]) == ["2"]
    assert result["item_errors"]["2"].startswith("payload: pixels must")
    assert result["state"] == "succeeded"


def test_in_a_merged_batch_the_reason_goes_to_its_own_job(tmp_path):
    spool, requests = Spool(tmp_path), []
    for number, array in enumerate([floats(51, 102), floats(153, np.nan), floats(204)]):
        job = spooled(spool, body(array, "mock"), ident(number))
        requests.append({"id": job.id, "path": str(spool.job_path(job.id)), "decoded": ""})
    first, second, third = results(requests)
    assert "item_errors" not in first
    assert "item_errors" not in third
    assert second["scores"]["mock"] == [pytest.approx(0.6), None]
    assert second["item_errors"] == {"1": REASON}
    assert third["scores"]["mock"] == [pytest.approx(0.8)]


def test_a_job_without_any_image_fails_with_the_reason(tmp_path):
    with pytest.raises(BadInput, match="no sample can be scored; the first: payload: pixels must be finite"):
        one_input(tmp_path, floats(np.nan, np.nan))
    with pytest.raises(BadInput, match=r"pixels must lie in 0\.\.255, found 300"):
        one_input(tmp_path / "integers", np.full((1, 4, 4, 3), 300, np.int32))


def test_black_float_images_are_images(tmp_path):
    one = one_input(tmp_path, floats(0, 0))
    assert (one.images.max(), one.bad) == (0, {})
    assert one_input(tmp_path / "mixed", floats(0, 0.4, 200)).images[:, 0, 0, 0].tolist() == [0, 0, 200]
    with pytest.raises(BadInput, match=r"within \[0, 1\]"):
        one_input(tmp_path / "unscaled", floats(0, 0.5, 1))


def test_float_pixels_are_rounded_by_one_rule(tmp_path):
    """What a decoder leaves around 0 and 255 is an image; 99.9 is 100."""
    levels = [-0.4, 0.5, 1.5, 99.4, 99.9, 254.6, 255.3]
    array = np.repeat(np.array(levels, np.float32)[None, None, :, None], 3, -1)  # [1, 1, 7, 3]
    expected = np.clip(np.rint(levels), 0, 255).astype(int).tolist()
    assert expected == [0, 0, 2, 99, 100, 255, 255]
    assert one_input(tmp_path, array).images[0, 0, :, 0].tolist() == expected


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    tiny_vae(folder, 16)
    one = LatentDecoder(str(folder), "", "float32", "cpu", 1 << 20)
    one.set_up()
    return one


def decoded(decoder, tmp_path, latents):
    spool = Spool(tmp_path)
    job = spooled(spool, body(latents.numpy(), "mock", media_type="latent"), ident(1), "latent")
    decoder.decode(spool.job_path(job.id), spool.decoded_path(job.id))
    return {"id": job.id, "path": str(spool.job_path(job.id)), "decoded": str(spool.decoded_path(job.id))}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_latents_that_are_not_finite_are_no_black_video(decoder, tmp_path, bad, place):
    torch.manual_seed(0)
    latents = torch.randn(3, 16, 1, 4, 6)
    good = [decoder.pixels(latents[k].bfloat16()) for k in range(3)]
    latents[place, 3, 0, 1, 2] = bad
    request = decoded(decoder, tmp_path, latents)
    one = read_input(**request)
    for k in range(3):
        np.testing.assert_array_equal(one.images[k], np.zeros_like(good[k]) if k == place else good[k])
    (result,) = results([request])
    expected = [None if k == place else pytest.approx(good[k].mean() / 255) for k in range(3)]
    assert result["scores"]["mock"] == expected
    assert result["item_errors"] == {str(place): "latents: values must be finite"}


def test_a_decoder_that_overflows_is_seen(decoder, tmp_path):
    """Finite latents, but the VAE makes infinity of them, as float16 does."""
    torch.manual_seed(0)
    latents = torch.randn(2, 16, 1, 4, 6)
    latents[1] *= 1e38
    (result,) = results([decoded(decoder, tmp_path, latents)])
    assert [score is None for score in result["scores"]["mock"]] == [False, True]
    assert result["item_errors"]["1"].startswith("latents: ")
    with pytest.raises(BadInput, match="no sample can be decoded; the first: latents: values must be finite"):
        decoded(decoder, tmp_path / "all", torch.full((2, 16, 1, 4, 6), np.nan))


def test_decoded_latents_count_as_one_job(decoder, tmp_path):
    """Each sample is small enough, all of them together are not; nothing stays on the disk."""
    size = 3 * 32 * 48  # one frame
    latents = torch.zeros(5, 16, 1, 4, 6)
    small = LatentDecoder("", "", "float32", "cpu", 5 * size - 1)
    small.torch, small.models, small.paths = decoder.torch, decoder.models, decoder.paths
    with pytest.raises(BadInput, match=rf"decodes to {5 * size} bytes; at most {5 * size - 1} \(max_decoded_bytes\)"):
        decoded(small, tmp_path, latents)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [Spool(tmp_path).job_path(ident(1))]
    small.max_bytes += 1
    decoded(small, tmp_path / "fits", latents)


def test_uint8_images_are_taken_as_they_are(tmp_path):
    one = one_input(tmp_path, image(7, 3))
    assert (one.images.tolist(), one.bad) == (image(7, 3).tolist(), {})
