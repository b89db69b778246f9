"""Videos made of an image or of the first frames of a video: the driver, fine-tuning and reinforcement learning."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from safetensors.torch import load_file

from cosmos_rl.data.given import choose_given, count_clean, find_media_problems
from cosmos_rl.data.prompts import PromptRecord, read_prompts
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.driver.contract import Medium
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.model.driver.probe import prove
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.driven import CONDITIONED
from tests.support.family_runs import Clips, TrainedFamily, family_toml, folder_of
from tests.support.nft_runs import image_prompts, nft_train, nft_trainer
from tests.support.trainer_runs import train
from tests.support.videos import write_video

COSMOS = TrainedFamily("cosmos-predict2.5", frames=("num_frames", 9))
FAMILIES = {
    "cosmos-predict2.5": [1 / 3, 2 / 3],
    "wan-i2v": [0.0],
    "wan2.2-i2v": [0.0],
    "wan2.2-5b-i2v": [1 / 2],
    "sana-video-i2v": [0.0],
    "ltx-i2v": [0.0],
    "hunyuan-video-i2v": [0.0],
    "flux-kontext": [0.0],
}
"""Share of the state's elements that media give, for each number of latent frames from 1 on."""


def medium(kind: int, seed: int) -> Medium:
    pixels = np.random.default_rng(seed).integers(0, 256, (1 + 4 * (kind - 1), 32, 32, 3), dtype=np.uint8)
    return Medium(torch.from_numpy(pixels), kind)


def require_equal_weights(first: Path, second: Path) -> None:
    files = [sorted(one.rglob("step_3/**/*.safetensors")) for one in (first, second)]
    assert files[0]
    for ours, theirs in zip(*files, strict=True):
        left, right = load_file(ours), load_file(theirs)
        assert left.keys() == right.keys()
        assert all(torch.equal(value, right[name]) for name, value in left.items())


def built(path: Path, *options: str) -> DrivenModel:
    model = build_model(load_config(path, list(options)), Context(torch.device("cpu")), rest_on_cpu=False)
    assert isinstance(model, DrivenModel)
    return model


def proved(family: str) -> Driver:
    driver = Driver(load_pipeline(str(folder_of(family))))
    prove(driver)
    return driver


SLOW_OR_ZOO = [pytest.param("cosmos-predict2.5", marks=pytest.mark.slow)]
SLOW_OR_ZOO += [pytest.param(name, marks=pytest.mark.zoo) for name in list(FAMILIES)[1:]]


@pytest.mark.parametrize("family", SLOW_OR_ZOO)
def test_the_gate_proves_conditioned_pipelines_and_finds_the_given_elements(family: str) -> None:
    driver = proved(family)
    names = [check.name for check in driver.facts.checks]
    assert "A sample with a medium is the stock call's, bit for bit" in names
    assert "Rows of different media, numbers of given frames and levels share a batch" in names
    for kind, share in enumerate(FAMILIES[family], 1):
        mask = driver.element_mask(kind)
        given = 0.0 if mask is None else float((~mask).double().mean())
        assert given == pytest.approx(share)


@pytest.mark.zoo
@pytest.mark.parametrize("family", CONDITIONED)
def test_the_gate_proves_them_in_half_precision(family: str) -> None:
    """Kernels round by the layout in memory, which LTX's state has of its own."""
    facts = prove(Driver(load_pipeline(str(folder_of(family)), dtype=torch.bfloat16), call={"max_sequence_length": 48}))
    assert "velocity() repeats the loop's, bit for bit" in [check.name for check in facts.checks]


@pytest.mark.slow
def test_no_encoder_runs_in_a_velocity_call_and_rows_keep_their_media(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = proved("cosmos-predict2.5")
    texts = driver.encode(["a cat", "a dog", "the sea"])
    cond = driver.condition(texts, [None, medium(1, 1), medium(2, 2)])
    assert cond.media is not None
    assert cond.media.kinds == (0, 1, 2)
    assert cond.element_mask is not None
    free = cond.element_mask.flatten(1).double().mean(1)
    assert free.tolist() == pytest.approx([1.0, 2 / 3, 1 / 3])

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an encoder ran")

    for part in (driver.pipeline.vae, driver.pipeline.text_encoder):
        part.register_forward_pre_hook(refuse)
    monkeypatch.setattr(driver.pipeline.vae, "encode", refuse)
    x = torch.randn(3, *driver.facts.state_shape, generator=torch.Generator().manual_seed(0))
    level = driver.levels(4)[1]
    with torch.no_grad():
        whole = driver.velocity(x, level, cond)
        turned = torch.tensor([2, 0, 1])
        again = driver.velocity(x[turned], level, cond.rows(turned))
    torch.testing.assert_close(again, whole[turned], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["euler", "flow"])
def test_given_frames_arrive_at_the_medium_with_solvers_of_our_own(tmp_path: Path, solver: str) -> None:
    path = family_toml(tmp_path, COSMOS, job="nft")
    model = built(path, "--policy.diffusers.conditional_frames=[1, 2]")
    with torch.no_grad(), model.eval_mode():
        cond = model.condition(model.encode_prompts(["a cat", "a dog"]), [medium(1, 1), medium(2, 2)])
        generators = [torch.Generator().manual_seed(row) for row in range(2)]
        made = {"height": 32, "width": 32, "num_inference_steps": 4, "deterministic": solver == "euler"}
        _, states, _ = model.rollout(cond, generators, solver=solver, **made)
    assert cond.media is not None
    assert cond.element_mask is not None
    clean = next(
        value for value in cond.media.prepared if isinstance(value, torch.Tensor) and value.shape == states[-1].shape
    )
    first, sigma = states[0], float(model.sampling_levels(4).sigma[0])
    expected = (1 - sigma) * first + sigma * clean  # the straight line from the noise, as far as the levels lead
    given = ~cond.element_mask
    torch.testing.assert_close(states[-1][given], expected[given], rtol=1e-4, atol=1e-4)


def test_numbers_of_given_frames_are_drawn_evenly_and_an_image_gives_one(tmp_path: Path) -> None:
    counts = [count_clean((0, 2), (u + 0.5) / 300) for u in range(300)]
    assert [counts.count(k) for k in range(3)] == [100, 100, 100]
    assert count_clean((1, 1), 0.0) == count_clean((1, 1), 1.0) == 1
    record = PromptRecord("a cat", {"image": "cat.png"}, folder=tmp_path)
    given = choose_given(record, (0, 2))
    assert given is not None
    assert (given.clean, given.path) == (1, tmp_path / "cat.png")
    assert choose_given(record, (0, 0)) is None
    bare = choose_given(PromptRecord("a cat"), (0, 2))
    assert bare is not None
    assert bare.clean == 0


@pytest.mark.slow
def test_samples_of_one_prompt_share_their_image_and_only_generated_elements_are_learnt(tmp_path: Path) -> None:
    path = family_toml(tmp_path, COSMOS, job="nft")
    trainer = nft_trainer(
        path, "--policy.diffusers.conditional_frames=[1, 1]", dataset=read_prompts(image_prompts(tmp_path))
    )
    samples = trainer._samples(0)
    assert {sample.given.clean for sample in samples if sample.given is not None} == {1}
    assert len({sample.key for sample in samples}) == len({sample.group for sample in samples})
    report = trainer.train_step(0)
    assert report.metrics["optim/grad_norm"] > 0
    with_text_only = nft_trainer(path, dataset=read_prompts(image_prompts(tmp_path)))
    assert report.metrics["train/policy_loss_mean"] != with_text_only.train_step(0).metrics["train/policy_loss_mean"]


@pytest.mark.slow
def test_a_conditioned_run_resumes_exactly(tmp_path: Path) -> None:
    path = family_toml(tmp_path, COSMOS, job="nft")
    options = ["--policy.diffusers.conditional_frames=[0, 1]"]
    data = {
        "dataset": read_prompts(image_prompts(tmp_path)),
        "val_dataset": read_prompts(image_prompts(tmp_path)),
    }
    whole = nft_train(path, *options, **data)
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    again = nft_train(path, *options, resume=(copy, 1), **data)
    require_equal_weights(whole, again)


def test_prompts_without_a_readable_image_or_video_are_named(tmp_path: Path) -> None:
    records = read_prompts(image_prompts(tmp_path, missing=True))
    assert re.search(r"0 \('a red square'\): no file .*gone\.png", find_media_problems(records, (0, 1)))
    assert 'has no "image" or "video"' in find_media_problems([PromptRecord("a cat")], (1, 1))
    assert find_media_problems([PromptRecord("a cat")], (0, 1)) == ""
    Image.effect_noise((64, 64), 80).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:900])
    cut = PromptRecord("a cat", {"image": "cut.jpg"}, folder=tmp_path)
    assert re.search(r"0 \('a cat'\): .*cut\.jpg: cannot be read as an image", find_media_problems([cut], (0, 1)))
    write_video(tmp_path / "short.mp4", frames=3)
    short = PromptRecord("the sea", {"video": "short.mp4"}, folder=tmp_path)
    assert find_media_problems([short], (0, 2)) == ""
    assert "short.mp4: 3 frames, need 5" in find_media_problems([short], (0, 2), 5)
    assert find_media_problems([cut, short], (0, 0), 5) == ""


def test_they_are_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    family = TrainedFamily("wan-i2v", frames=("num_frames", 5))
    index_alone = tmp_path / "index alone"
    index_alone.mkdir()
    shutil.copy(folder_of(family.name) / "model_index.json", index_alone)
    options = [f"--policy.model_name_or_path={index_alone}"]
    records = read_prompts(image_prompts(tmp_path, missing=True))
    with pytest.raises(UserError, match="prompts that cannot be conditioned"):
        nft_trainer(family_toml(tmp_path, family, job="nft"), *options, dataset=records)


@pytest.mark.slow
def test_fine_tuning_on_drawn_numbers_of_frames_resumes_exactly(tmp_path: Path, image_folder: Path) -> None:
    path = family_toml(tmp_path, COSMOS, job="sft", images=image_folder)
    options = ["--policy.diffusers.conditional_frames=[0, 2]"]
    whole = train(path, *options, dataset=Clips(9))
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    require_equal_weights(whole, train(path, *options, resume=(copy, 1), dataset=Clips(9)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "frames"),
    [
        ("wan-i2v", [5]),
        pytest.param("ltx-i2v", [9], marks=pytest.mark.zoo),
        pytest.param("hunyuan-video-i2v", [5], marks=pytest.mark.zoo),
        pytest.param("flux-kontext", [], marks=pytest.mark.zoo),
    ],
)
def test_once_a_model_is_loaded_media_are_encoded_only_for_conditions(
    tmp_path: Path, family: str, frames: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = TrainedFamily(family)
    if frames:
        described = TrainedFamily(family, frames=("num_frames", frames[0]))
    model = built(family_toml(tmp_path, described, job="nft"))
    assert model.conditional_frames == (1, 1)
    with torch.no_grad(), model.eval_mode():
        cond = model.condition(
            model.encode_prompts(["a cat", "a dog", "the sea"]), [medium(1, row) for row in range(3)]
        )

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("an encoder ran")

        monkeypatch.setattr(model.pipeline.vae, "encode", refuse)
        for name in ("image_encoder", "text_encoder"):
            if getattr(model.pipeline, name, None) is not None:
                getattr(model.pipeline, name).register_forward_pre_hook(refuse)
        for size in (1, 2, 3):  # the first call of each number of rows too
            rows = cond.rows(slice(0, size))
            state = model.start_state(torch.randn(size, *model.latent_shape(32, 32)))
            level = model.sampling_levels(4).rows(1).expand(size)
            assert model.velocity(state, level, rows).isfinite().all()
        generators = [torch.Generator().manual_seed(row) for row in range(3)]
        media, _, _ = model.rollout(
            cond, generators, height=32, width=32, num_inference_steps=2, solver="euler", deterministic=True
        )
    assert media.shape == (3, *frames, 3, 32, 32)


@pytest.mark.slow
def test_the_loss_is_the_mean_over_the_generated_elements(tmp_path: Path, image_folder: Path) -> None:
    path = family_toml(tmp_path, COSMOS, job="sft", images=image_folder)
    model = built(path, "--policy.diffusers.conditional_frames=[1, 1]")
    pixels = torch.rand(2, 3, 9, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad(), model.eval_mode():
        clean = model.encode_visuals(list(pixels), 32, 32)
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(2))
        cond = model.condition(model.encode_prompts(["a cat", "a dog"]), [medium(1, 1), medium(1, 2)])
        index = torch.tensor([300, 700])
        total, weight = model.training_sft_step(clean, cond, timestep=index, noise=noise)
        sigma = model.sigma_map[index].view(2, 1, 1, 1, 1)
        level = model.training_level(model.sigma_map[index])
        velocity = model.velocity((1 - sigma) * clean + sigma * noise, level, cond)
    squares = (velocity.double() - (noise - clean).double()).square()[:, :, 1:]  # latent frame 0 is given
    assert float(total) / float(weight) == pytest.approx(float(squares.flatten(1).mean(1).mean()), rel=1e-4)


def test_a_number_of_given_frames_that_the_model_cannot_take_is_refused(tmp_path: Path) -> None:
    trainer_of = family_toml(tmp_path, TrainedFamily("wan", frames=("num_frames", 5)), job="nft")
    with pytest.raises(UserError, match=r"conditional_frames = \[0, 1\]: .* of texts alone; .*_frames=none\)"):
        nft_trainer(trainer_of, "--policy.diffusers.conditional_frames=[0, 1]")


def test_a_model_class_that_takes_no_media_says_so(tmp_path: Path) -> None:
    config = load_config(
        family_toml(tmp_path, TrainedFamily("sd3"), job="nft"), ["--policy.diffusers.conditional_frames=[1, 1]"]
    )
    with pytest.raises(UserError, match=r"SD3Model makes samples of texts alone; .*conditional_frames=none\)"):
        build_model(config, Context(torch.device("cpu")), rest_on_cpu=False)


@pytest.mark.zoo
@pytest.mark.parametrize("job", ["sft", "nft"])
@pytest.mark.parametrize("family", ["wan-i2v", "wan2.2-i2v"])
def test_all_weights_are_trained_from_an_image(tmp_path: Path, family: str, job: str) -> None:
    described = TrainedFamily(family, frames=("num_frames", 5))
    path = family_toml(tmp_path, described, job=job, lora=False, images=tmp_path)
    if job == "sft":
        run = train(path, "--train.max_num_steps=2", dataset=Clips(5))
    else:
        run = nft_train(path, "--train.max_num_steps=2", dataset=read_prompts(image_prompts(tmp_path)))
    base, trained = folder_of(family), run / "safetensors/step_2"
    for part in sorted(folder.name for folder in base.glob("transformer*")):
        before, after = (load_file(one / part / "diffusion_pytorch_model.safetensors") for one in (base, trained))
        assert before.keys() == after.keys()
        assert sum(not torch.equal(value, after[name]) for name, value in before.items()) > len(before) / 2


@pytest.mark.zoo
@pytest.mark.parametrize("family", ["wan-i2v", "cosmos-predict2.5"])
def test_with_a_cache_the_medium_of_a_clip_is_encoded_once(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        write_video(tmp_path / f"clips/{number}.mp4", frames=9)
        (tmp_path / f"clips/{number}.txt").write_text(f"clip {number}", encoding="utf-8")
    described = TrainedFamily(family, frames=("num_frames", 9))
    path = family_toml(tmp_path, described, job="sft", images=tmp_path / "clips")
    options = ["--policy.diffusers.conditional_frames=[1, 1]"]
    cache = ["--train.train_policy.cache.latents=true", f'--train.train_policy.cache.dir="{tmp_path / "cache"}"']
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "facts"))
    calls: list[int] = []
    stock = AutoencoderKLWan.encode

    def encode(self: AutoencoderKLWan, *args: Any, **kwargs: Any) -> Any:
        calls[-1] += 1
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKLWan, "encode", encode)
    losses = []
    for more in ([], cache, cache):
        calls.append(0)
        rows = read_metrics(train(path, *options, *more) / "metrics.jsonl")
        losses.append([row["train/loss_mean"] for row in rows if "train/loss_mean" in row])
    assert losses[1] == losses[2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert 4 + 1 <= calls[1] - calls[2] <= 4 + 4  # in three epochs each medium once, and the clips alone or together
