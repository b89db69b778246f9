"""The recipes: they load, say honestly what they need, and use what there is."""

import re

import pytest

from cosmos_rl.launcher.acceptance.media_size import media_problems
from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.machine import format_bytes
from cosmos_rl.policy.config import (
    ConfigError,
    is_older,
    load_config,
    notes,
    read_toml,
    unsupported_settings,
    world_size,
)
from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.validation_sets import list_validation_sets, unknown_rewards
from scripts.write_recipes import render_recipes
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"
DOCUMENTED = (
    "stable-diffusion-3-5/stable-diffusion-3-5-image-sft.toml",
    "stable-diffusion-3-5/stable-diffusion-3-5-image-sft-lora.toml",
    "stable-diffusion-3-5/stable-diffusion-3-5-medium-nft.toml",
    "stable-diffusion-3-5/stable-diffusion-3-5-medium-nft-multi-reward.toml",
    "stable-diffusion-3-5/stable-diffusion-3-5-medium-dpo-lora.toml",
    "sana/sana-image-sft.toml",
    "sana/sana-image-sft-lora.toml",
    "sana/sana-video-sft.toml",
    "sana/sana-video-sft-lora.toml",
    "sana/sana-image-nft.toml",
    "sana/sana-video-nft.toml",
    "cosmos-predict2-5/cosmos-predict2-5-2b-720-nft.toml",
)
WRITTEN = render_recipes()
NAMED = (*DOCUMENTED, *WRITTEN)
SLOW_OR_ZOO = [pytest.param(recipe, marks=pytest.mark.slow) for recipe in DOCUMENTED]
SLOW_OR_ZOO += [pytest.param(recipe, marks=pytest.mark.zoo) for recipe in WRITTEN]


def opening(recipe: str) -> str:
    """The comment that opens a recipe, without the marks."""
    lines = (CONFIGS / recipe).read_text().splitlines()[1:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:end])


def test_the_recipes_of_the_table_are_what_it_writes() -> None:
    shipped = {recipe: (CONFIGS / recipe).read_text(encoding="utf-8") for recipe in WRITTEN}
    assert shipped == WRITTEN, "python -m scripts.write_recipes"


def test_every_recipe_is_known() -> None:
    shipped = {str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.toml") if not is_older(read_toml(path))}
    assert shipped == {*NAMED, "cosmos_rl_config.toml"}


@pytest.mark.parametrize("recipe", NAMED)
def test_a_recipe_has_no_problems(recipe: str) -> None:
    config = load_config(CONFIGS / recipe)
    assert unsupported_settings(config) == []
    assert notes(config) == []
    assert world_size(config.policy.parallelism) == (1 if "cosmos-predict2-2b" in recipe else 8)


def script_of(recipe: str) -> str:
    return job_kind(load_config(CONFIGS / recipe)).script


@pytest.mark.parametrize("recipe", NAMED)
def test_a_recipe_opens_with_its_command_hardware_and_memory(recipe: str) -> None:
    text = opening(recipe)
    command = re.sub(r"\s*\\\n\s*", " ", text).split("\n")[2].strip()
    assert command.startswith(f"cosmos-rl --config ./configs/{recipe} ")
    assert command.endswith(script_of(recipe))
    assert all(f"\n{word}: " in text for word in ("Verified", "Hardware", "Memory", "Result"))
    several = "Hardware: 8 GPUs" in text
    assert ("On one GPU: " in text) == (several and (recipe.startswith("stable") or "sft" in recipe))


@pytest.mark.parametrize("recipe", SLOW_OR_ZOO)
def test_a_recipe_fits_its_published_model_and_takes_the_memory_that_it_says(recipe: str) -> None:
    from tests.support.published import files_of  # builds the transformers without memory

    config = load_config(CONFIGS / recipe)
    files = files_of(config)
    assert list(files.selection.problems) == []
    assert all(count > 0 for count in files.selection.targets.values())
    assert list(media_problems(config, files.pipeline)) == []
    memory = estimate.memory(config, files, on_cpu=False, saves=None)
    without = ""
    if memory.without:
        assert all(line.startswith("work of the VAE") for line in memory.without)
        without = ", without the work of the VAE"
    said = f"Memory: {format_bytes(memory.peak)} on each GPU, by the estimate of `cosmos-rl check`{without}."
    assert said in opening(recipe).splitlines()


@pytest.mark.parametrize("recipe", NAMED)
def test_a_recipe_writes_where_its_opening_says(recipe: str) -> None:
    config = load_config(CONFIGS / recipe)
    result = re.search(r"^Result: (.*)$", opening(recipe), re.MULTILINE)
    assert result
    expected = f"{config.train.output_dir}/safetensors/step_<N>{'/lora' if config.policy.lora else ''}"
    assert result[1] == expected


@pytest.mark.parametrize("recipe", [recipe for recipe in NAMED if "nft" in recipe])
def test_a_reinforcement_learning_recipe_trains_all_steps_but_the_last_in_whole_groups(recipe: str) -> None:
    config = load_config(CONFIGS / recipe)
    diffusers, group = config.policy.diffusers, config.rollout.n_generation
    assert diffusers.trained_levels == diffusers.sample.num_steps - 1
    assert config.train.train_batch_per_replica == 6 * group * world_size(config.policy.parallelism)
    assert config.policy.lora
    assert config.policy.lora.lora_names == ("default", "old")


def test_the_template_lacks_nothing_but_a_model() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / "cosmos_rl_config.toml")
    [line] = caught.value.problems
    assert line.startswith("policy.model_name_or_path: missing")


def test_the_recipe_of_several_rewards_may_be_validated() -> None:
    """Each of its prompt sets is scored by the rewards that train it."""
    recipe = "stable-diffusion-3-5/stable-diffusion-3-5-medium-nft-multi-reward.toml"
    config = load_config(CONFIGS / recipe, ["validation.enable=true"])
    trained = {one.name: one.rewards for one in online_table(config).dataset.sets}
    assert {one.label: one.rewards for one in list_validation_sets(config)} == trained
    assert list(unknown_rewards(config)) == []
