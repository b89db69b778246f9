"""`cosmos_rl.sft` and `cosmos_rl.nft`: the examples of the page run as they are, invalid arguments are named."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

import cosmos_rl
from cosmos_rl.errors import TrainingStoppedError, UserError
from tests.support.documents import blocks
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "python-api.md"


def brightness(to_be_evaluated: npt.NDArray[np.uint8]) -> float:
    return float(to_be_evaluated.mean()) / 255


@pytest.fixture
def folder(tmp_path: Path, tiny_sd3: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page's examples find where they run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_sd3").symlink_to(tiny_sd3)
    (tmp_path / "my_images").symlink_to(image_folder)
    (tmp_path / "my_prompts.txt").write_text("a red apple\na blue car\na dog\na cat\n")
    return tmp_path


def configuration(run: cosmos_rl.FinishedRun) -> dict[str, Any]:
    return tomllib.loads((run.folder / "config.toml").read_text())


def sizes(run: cosmos_rl.FinishedRun) -> list[int]:
    return configuration(run)["policy"]["diffusers"]["inference_size"]


@pytest.mark.slow
def test_the_example_of_the_readme_trains_and_samples(folder: Path) -> None:
    (example,) = [block for block in blocks(ROOT / "README.md", "python") if block.startswith("import cosmos_rl")]
    assert "steps=10" in example
    found: dict[str, Any] = {}
    exec(example.replace("steps=10", "steps=1"), found)
    assert [row["step"] for row in found["run"].metrics] == [1]
    assert (folder / "apple.png").is_file()


@pytest.mark.slow
def test_the_first_example_learns(folder: Path) -> None:
    found: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[0], found)
    rewards = [row["reward/mean"] for row in found["run"].metrics]
    print(rewards)
    assert len(rewards) == 10
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + np.std(rewards[:3]), rewards
    assert (folder / "apple.png").is_file()
    assert (found["run"].folder / "report.html").is_file()
    assert found["run"].folder.parent == folder / "outputs/red"


@pytest.mark.zoo
def test_the_second_example_continues_from_a_tuned_pipeline(folder: Path, tiny_sd3: Path) -> None:
    found: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[1], found)
    tuned, run = found["tuned"], found["run"]
    assert run.base == str(tuned.result)
    weights = [Path(place) / "transformer" for place in (tiny_sd3, tuned.result, run.result)]
    base, after_sft, after_nft = (next(place.glob("*.safetensors")) for place in weights)
    for one, other in ((base, after_sft), (after_sft, after_nft)):
        old, new = load_file(one), load_file(other)
        assert old.keys() == new.keys()
        assert any(not torch.equal(old[name], new[name]) for name in old)
    assert run.metrics[-1]["reward/bright_mean"] > 0


@pytest.mark.slow
def test_the_third_example_resumes(folder: Path) -> None:
    found: dict[str, Any] = {}
    exec(blocks(PAGE, "python")[2], found)
    run = found["run"]
    assert not run.stopped
    assert len(list((folder / "outputs/seeded").glob("2*"))) == 1
    assert [row["step"] for row in run.metrics] == list(range(1, 21))
    assert configuration(run)["train"]["seed"] == 3


def test_the_pipeline_is_the_trained_one(folder: Path) -> None:
    run = cosmos_rl.sft("tiny_sd3", "my_images", steps=2, learning_rate=1e-2, overrides={"policy.lora.b": None})
    arguments: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "latent"}
    images = []
    pipes: list[Any] = [StableDiffusion3Pipeline.from_pretrained("tiny_sd3"), run.pipeline()]
    for pipe in pipes:
        generator = torch.Generator().manual_seed(0)
        images.append(pipe("a dog", generator=generator, **arguments).images)
    assert (images[0] - images[1]).abs().max() > 1e-3
    assert run.result.name == "step_2"


def test_a_rectangle_and_a_size_of_the_models_own(folder: Path) -> None:
    overrides = {"train.ckpt.export_safetensors": False}
    run = cosmos_rl.sft("tiny_sd3", "my_images", steps=1, size=(32, 48), overrides=overrides)
    assert sizes(run) == [32, 48]
    own = cosmos_rl.sft("tiny_sd3", "my_images", steps=1, overrides=overrides)
    size = StableDiffusion3Pipeline.from_pretrained("tiny_sd3")
    edge = size.transformer.config.sample_size * size.vae_scale_factor
    assert sizes(own) == [edge, edge]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, r"cosmos_rl\.nft: steps: found 0; allowed: a whole number >= 1"),
        ({"prompts_per_step": 2.5}, r"prompts_per_step: found 2\.5"),
        ({"lora": 8}, r"lora: found 8; allowed: True or False, with its rank"),
        ({"lora": False, "overrides": {"policy.lora.r": 4}}, r"policy\.lora\.r: there is no adapter with lora=False"),
        ({"overrides": {"train.max_num_steps": 9}}, r"train\.max_num_steps: is set by the argument steps"),
        ({"overrides": {"train": {"seed": 1}}}, r'train: found a dictionary; write its keys as "train\.seed"'),
        ({"overrides": {"train.sede": 1}}, r"train\.sede.*train\.seed"),
        ({"overrides": {"train.output_dir.deep": 1}}, r"train\.output_dir\.deep: output_dir is not a table"),
        ({"reward": "red"}, "reward: found 'red'; a function"),
        ({"reward": None}, "reward: found None; a function"),
        ({"reward": [3]}, "reward"),
        ({"prompts": "a red apple"}, r"'a red apple', which is not a file; a list of texts"),
        ({"prompts": []}, "prompts: none"),
        ({"pipeline": "./no_such_model"}, r"no_such_model does not exist"),
        ({"samples_per_prompt": 1}, "n_generation"),
        ({"size": 33}, r"inference_size"),
        ({"reward": []}, "reward"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", str(value))[:30],
)
def test_invalid_arguments_are_named_and_leave_nothing(folder: Path, arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"pipeline": "tiny_sd3", "prompts": ["a", "b"], "reward": brightness, "steps": 2}
    with pytest.raises(UserError, match=f"(?s){message}"):
        cosmos_rl.nft(**given | arguments)
    assert not list(folder.glob("outputs/nft/2*"))


def test_what_the_command_refuses_before_training_python_refuses(folder: Path) -> None:
    for size in (1024, (32, 1024)):
        with pytest.raises(UserError, match=r"inference_size = \[.*1024\]: .*has positions for at most \d+ pixels"):
            cosmos_rl.sft("tiny_sd3", "my_images", steps=1, size=size)
        with pytest.raises(UserError, match="has positions for at most"):
            cosmos_rl.nft("tiny_sd3", ["a", "b"], brightness, steps=1, size=size)
    with pytest.raises(UserError, match="12 captions, 0 of them held out, make no whole step of 13 samples"):
        cosmos_rl.sft("tiny_sd3", "my_images", steps=1, batch_size=13)
    with pytest.raises(UserError, match="'attn' matches no layer"):
        cosmos_rl.sft("tiny_sd3", "my_images", steps=1, overrides={"policy.lora.target_modules": ["attn"]})
    assert not list(folder.glob("outputs/*/2*"))


@pytest.mark.slow
def test_a_guard_that_stops_the_run_says_so(folder: Path) -> None:
    overrides = {
        "train.train_policy.reward_hacking_guard.max_loss_ratio": 1.001,
        "train.train_policy.reward_hacking_guard.freq": 1,
    }
    with pytest.raises(TrainingStoppedError, match="loss_ratio"):
        cosmos_rl.nft(
            "tiny_sd3",
            ["a", "b"],
            brightness,
            steps=4,
            prompts_per_step=2,
            samples_per_prompt=2,
            learning_rate=0.1,
            overrides=overrides,
        )


def test_a_run_without_an_export_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is exported yet; continue with resume=True"):
        _ = cosmos_rl.FinishedRun(tmp_path, True, "tiny_sd3").result


def test_importing_the_package_needs_no_torch() -> None:
    code = "import sys, cosmos_rl; dir(cosmos_rl); sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ)).returncode == 0


def test_the_recipe_of_nft_is_the_published_one() -> None:
    """What both set is equal; only the argument `steps` ends a run from Python."""

    def values(path: Path) -> dict[str, object]:
        return dict(_flatten(tomllib.loads(path.read_text())))

    ours = values(Path(cosmos_rl.__file__).parent / "launcher" / "recipes" / "nft.toml")
    published = values(ROOT / "configs" / "stable-diffusion-3-5" / "stable-diffusion-3-5-medium-nft.toml")
    common = ours.keys() & published.keys() - {"train.epoch"}
    assert {key: ours[key] for key in common} == {key: published[key] for key in common}
    assert ours.keys() - published.keys() == {"train.train_policy.reward_hacking_guard.samples"}


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'stf'"):
        _ = cosmos_rl.stf  # pyright: ignore
