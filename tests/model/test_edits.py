"""Images made of an image and an instruction: FLUX.1 Kontext, fine-tuned on pairs and by a reward."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl.data.images import to_uint8
from cosmos_rl.data.prompts import read_prompts
from cosmos_rl.distributed import randomness
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding, StepConditions
from cosmos_rl.rollout.sampler import Giving, RolloutSampler, RolloutSpec, group_samples
from cosmos_rl.tracking.metrics import read_metrics
from tests.model.test_conditioned import built
from tests.support.family_runs import TrainedFamily, family_toml, folder_of, stock_pipeline
from tests.support.nft_runs import image_prompts, nft_train
from tests.support.pairs import edit_folder
from tests.support.trainer_runs import train

KONTEXT = TrainedFamily("flux-kontext", "true_cfg_scale", negative="")


@pytest.mark.zoo
def test_a_rollout_and_the_sample_command_are_the_stock_pipelines(tmp_path: Path) -> None:
    path = family_toml(tmp_path, KONTEXT, job="nft")
    model, config = built(path), load_config(path)
    encoding = Encoding(model, config)
    samples = group_samples(enumerate(read_prompts(image_prompts(tmp_path))), 1, Giving(model.conditional_frames))
    spec = RolloutSpec(4, 3.0, "stock", 0.0, deterministic=True, height=32, width=32)
    with model.eval_mode():
        conditions = StepConditions(encoding.conditions)
        ours = RolloutSampler(model, spec, seed=3).sample(samples, conditions, "rollout", 2)
    pipeline = stock_pipeline(folder_of(KONTEXT.name))
    for row, sample in enumerate(samples):
        medium = encoding.load_medium(sample.given) if sample.given is not None else None
        assert medium is not None
        arguments = KONTEXT.call([sample.prompt], 3.0) | {"max_area": 32 * 32, "_auto_resize": False}
        image = Image.fromarray(medium.frames[0].numpy())
        generator = randomness.generator(3, "rollout", 2, sample.sample_id)
        with torch.no_grad():
            theirs = pipeline(image=image, **arguments, generator=generator, output_type="pt", return_dict=False)[0]
        assert torch.equal(ours.media[row], to_uint8(theirs)[0])

    file, options = tmp_path / "square.png", ["--steps", "4", "--size", "32", "32", "--guidance", "3", "--seed", "11"]
    image = Image.open(tmp_path / "0.png").resize((32, 32))
    image.save(file)
    out, length = tmp_path / "samples", ["--max-prompt-length", "48"]
    command = ["sample", str(folder_of(KONTEXT.name)), "a cat", "--image", str(file), "--out", str(out)]
    assert main([*command, *options, *length]) == 0
    arguments = KONTEXT.call(["a cat"], 3.0) | {"max_area": 32 * 32, "_auto_resize": False}
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        theirs = pipeline(image=image, **arguments, generator=generator, output_type="pt", return_dict=False)[0]
    (made,) = out.glob("*.png")
    assert np.array_equal(np.asarray(Image.open(made)), to_uint8(theirs)[0].numpy())


@pytest.mark.zoo
def test_fine_tuning_takes_the_image_that_a_caption_names(tmp_path: Path) -> None:
    folder = edit_folder(tmp_path / "pairs")
    path = family_toml(tmp_path, KONTEXT, job="sft", images=folder)
    loss = "train/loss_mean"
    first = [row[loss] for row in read_metrics(train(path) / "metrics.jsonl") if loss in row]
    assert len(first) == 3
    for file in (folder / "before").glob("*.png"):
        Image.new("RGB", (32, 32), "red").save(file)
    other = [row[loss] for row in read_metrics(train(path) / "metrics.jsonl") if loss in row]
    assert first[0] != other[0]


@pytest.mark.zoo
def test_a_reward_teaches_edits_of_the_images_that_prompts_name(tmp_path: Path) -> None:
    path = family_toml(tmp_path, KONTEXT, job="nft")
    run = nft_train(path, dataset=read_prompts(image_prompts(tmp_path)))
    assert all(row["optim/grad_norm"] > 0 for row in read_metrics(run / "metrics.jsonl") if "optim/grad_norm" in row)
    assert (run / "safetensors/step_3/lora").is_dir()


def test_pairs_without_a_readable_image_are_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    folder, index_alone = edit_folder(tmp_path / "pairs", 3), tmp_path / "index alone"
    (folder / "before/1.png").write_bytes(b"no image")
    (folder / "2.json").write_text('{"prompt": "alone"}', encoding="utf-8")
    index_alone.mkdir()
    shutil.copy(folder_of(KONTEXT.name) / "model_index.json", index_alone)
    path = family_toml(tmp_path, KONTEXT, job="sft", images=folder)
    with pytest.raises(UserError, match="prompts that cannot be conditioned") as refused:
        train(path, f"--policy.model_name_or_path={index_alone}")
    assert "before/1.png: cannot be read as an image" in str(refused.value)
    assert "2 ('alone'): has no" in str(refused.value)
