"""SANA's instruction and its list of sizes: one switch for training, rollouts, validation, sampling and exports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cosmos_rl.checkpoint.export import SAMPLING_FILE
from cosmos_rl.data.images import to_uint8
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.accept import find_problems, read_model
from cosmos_rl.launcher.acceptance.length import run_length
from cosmos_rl.launcher.acceptance.paths import with_absolute_paths
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import Config, dump_toml, load_config
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from tests.support.family_runs import TEXTS, TrainedFamily, family_toml, folder_of, stock_pipeline
from tests.support.trainer_runs import train

SANA, VIDEO, FLUX = TrainedFamily("sana"), TrainedFamily("sana-video", frames=("frames", 5)), TrainedFamily("flux")
NO_INSTRUCTION = "--policy.diffusers.prompt_instruction=false"
BINNING = "--policy.diffusers.resolution_binning=true"


def config_of(folder: Path, family: TrainedFamily, *options: str) -> Config:
    return load_config(family_toml(folder, family, job="nft"), list(options))


def loaded(folder: Path, family: TrainedFamily, *options: str) -> DrivenModel:
    model = build_model(config_of(folder, family, *options), Context(torch.device("cpu")), rest_on_cpu=False)
    assert isinstance(model, DrivenModel)
    return model


def stock_latents(family: TrainedFamily, noise: Tensor, guidance: float, **call: Any) -> Tensor:
    arguments = {**family.call(TEXTS, guidance), "output_type": "latent", **call, "latents": noise}
    with torch.no_grad():
        return stock_pipeline(folder_of(family.name))(**arguments, return_dict=False)[0]


def our_latents(model: DrivenModel, noise: Tensor, guidance: float, steps: int = 4) -> Tensor:
    with torch.no_grad(), model.eval_mode():
        cond = model.encode_prompts(TEXTS, "" if guidance > 1 else None)
        return model.sample_latents(cond, noise, num_steps=steps, guidance=guidance)


@pytest.mark.parametrize("family", [SANA, pytest.param(VIDEO, marks=pytest.mark.zoo)], ids=lambda family: family.name)
def test_prompts_without_the_instruction_are_those_of_the_stock_call_without_it(
    tmp_path: Path, family: TrainedFamily
) -> None:
    model = loaded(tmp_path, family, NO_INSTRUCTION)
    noise = torch.randn(3, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(1))
    for guidance in (1.0, 3.0):
        plain = stock_latents(family, noise, guidance, complex_human_instruction=None)
        assert torch.equal(our_latents(model, noise, guidance), plain)
        assert not torch.equal(stock_latents(family, noise, guidance), plain), "the instruction changes something"
    assert model.sampling_call()["complex_human_instruction"] is None
    assert "complex_human_instruction" not in loaded(tmp_path, family).sampling_call()


def test_the_loss_and_validation_see_the_same_prompts_as_sampling(tmp_path: Path) -> None:
    model, stock = loaded(tmp_path, SANA, NO_INSTRUCTION), stock_pipeline(folder_of("sana"))
    cond = model.encode_prompts(TEXTS)
    embedded, mask, *_ = stock.encode_prompt(
        list(TEXTS), do_classifier_free_guidance=False, device="cpu", max_sequence_length=48
    )
    found = cond.values[0]
    assert torch.equal(found[0], embedded)
    assert torch.equal(found[1], mask)
    assert model.text_identity() != loaded(tmp_path, SANA).text_identity(), "a cache must tell them apart"
    generator = torch.Generator().manual_seed(5)
    drawn = model.sample_stock(stock, TEXTS[0], generator, num_steps=2, guidance=1.0)
    noise = torch.randn(1, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), model.eval_mode():
        ours = model.sample_latents(model.encode_prompts(TEXTS[:1]), noise, num_steps=2, guidance=1.0)
    assert torch.equal(drawn, ours)


@pytest.mark.zoo
def test_a_listed_size_is_made_as_by_the_stock_call_with_its_list(tmp_path: Path) -> None:
    size = "--policy.diffusers.inference_size=[512, 512]"
    model = loaded(tmp_path, SANA, BINNING, size)
    assert model.driver.call["use_resolution_binning"] is True
    noise = torch.randn(3, *model.latent_shape(512, 512), generator=torch.Generator().manual_seed(1))
    stock = {"height": 512, "width": 512, "num_inference_steps": 2, "use_resolution_binning": True}
    latents = stock_latents(SANA, noise, 1.0, **stock)
    assert torch.equal(our_latents(model, noise, 1.0, steps=2), latents)
    pixels = stock_latents(SANA, noise, 1.0, **stock | {"output_type": "pt"})
    assert torch.equal(model.decode(latents), pixels.float())


def test_a_size_that_the_list_would_replace_is_refused_with_the_one_it_makes(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, SANA, BINNING, "--policy.diffusers.inference_size=[32, 64]")
    assert str(caught.value) == (
        "policy.diffusers.inference_size = [32, 64]: with resolution_binning SanaPipeline makes [352, 704] and resizes "
        "it; set inference_size = [352, 704], or resolution_binning = false"
    )


def test_a_model_without_a_list_of_its_size_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    pipeline = stock_pipeline(folder_of("sana"))
    pipeline.transformer.register_to_config(sample_size=17)
    pipeline.save_pretrained(folder)
    with pytest.raises(UserError, match=r"resolution_binning = true: SanaPipeline has no list for this model"):
        loaded(tmp_path, SANA, BINNING, f"--policy.model_name_or_path={folder}")


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (NO_INSTRUCTION, "policy.diffusers.prompt_instruction = false: FluxPipeline has no instruction to leave out"),
        (BINNING, "policy.diffusers.resolution_binning = true: FluxPipeline has no list of sizes"),
    ],
)
def test_a_family_without_the_argument_is_refused_by_check_and_by_the_model(
    tmp_path: Path, option: str, problem: str
) -> None:
    config = config_of(tmp_path, FLUX, option)
    found = find_problems(config, None, read_model(config), run_length(config, own_data=True), own_script=True)
    assert list(found) == [problem]
    with pytest.raises(UserError) as caught:
        build_model(config, Context(torch.device("cpu")), rest_on_cpu=False)
    assert str(caught.value) == problem
    assert (
        list(
            find_problems(
                config_of(tmp_path, SANA, option), None, None, run_length(config, own_data=True), own_script=True
            )
        )
        == []
    )


@pytest.mark.slow
def test_an_export_says_the_switches_and_sample_follows_them(tmp_path: Path, image_folder: Path) -> None:
    config = family_toml(tmp_path, SANA, job="sft", images=image_folder)
    export = train(config, NO_INSTRUCTION, "--train.max_num_steps=1") / "safetensors/step_1/lora"
    call = {"use_resolution_binning": False, "max_sequence_length": 48, "complex_human_instruction": None}
    assert json.loads((export / SAMPLING_FILE).read_text()) == call
    card = (export / "README.md").read_text()
    assert all(f"{name}={value!r}" in card for name, value in call.items())

    pipeline = stock_pipeline(folder_of("sana"))
    pipeline.load_lora_weights(export)
    base = json.loads((export / "adapter_config.json").read_text()) | {
        "base_model_name_or_path": str(folder_of("sana"))
    }
    (export / "adapter_config.json").write_text(json.dumps(base))
    flags = ["--steps", "4", "--size", "32", "32", "--guidance", "1", "--seed", "3"]
    for name, option, instruction in (
        ("trained", [], {"complex_human_instruction": None}),
        ("stock", ["--prompt-instruction"], {}),
    ):
        out = tmp_path / name
        assert main(["sample", str(export), TEXTS[0], "--out", str(out), *flags, *option]) == 0
        with torch.no_grad():
            made = pipeline(
                **SANA.call(TEXTS[:1], 1.0),
                **instruction,
                generator=[torch.Generator().manual_seed(3)],
                output_type="pt",
            ).images
        (file,) = out.glob("*.png")
        assert np.array_equal(np.asarray(Image.open(file)), to_uint8(made)[0].numpy())


def test_sample_with_the_list_resizes_as_the_stock_call_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = str(folder_of("sana")), tmp_path / "out"
    flags = ["--steps", "1", "--size", "30", "60", "--guidance", "1", "--max-prompt-length", "48"]
    assert main(["sample", folder, "a cat", "--out", str(out), *flags, "--resolution-binning"]) == 0
    assert "note: SanaPipeline samples at the nearest size of its own list and resizes" in capsys.readouterr().err
    size = {"height": 30, "width": 60, "num_inference_steps": 1, "use_resolution_binning": True}
    with torch.no_grad():
        call = {**SANA.call(["a cat"], 1.0), **size, "generator": [torch.Generator().manual_seed(0)]}
        made = stock_pipeline(folder)(**call, output_type="pt").images
    (file,) = out.glob("*.png")
    assert np.array_equal(np.asarray(Image.open(file)), to_uint8(made)[0].numpy())
    assert main(["sample", folder, "a cat", "--out", str(out / "2"), *flags]) == 2
    assert main(["sample", str(folder_of("flux")), "a cat", "--out", str(out / "3"), "--no-prompt-instruction"]) == 2
    assert "FluxPipeline has no argument complex_human_instruction" in capsys.readouterr().err


def test_a_prompt_length_that_is_not_set_stays_the_pipelines_own_through_a_launch(tmp_path: Path) -> None:
    toml = family_toml(tmp_path, FLUX, job="nft")
    toml.write_text(toml.read_text().replace("max_prompt_length = 48\n", ""))
    as_launched = tmp_path / "config.toml"
    as_launched.write_text(dump_toml(with_absolute_paths(load_config(toml))))
    model = build_model(load_config(as_launched), Context(torch.device("cpu")), rest_on_cpu=False)
    assert isinstance(model, DrivenModel)
    assert "max_sequence_length" not in model.driver.call
    assert model.sampling_call() == {"max_sequence_length": 512}
