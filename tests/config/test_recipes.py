"""The starter recipes that the documents name: they load, say honestly what they need, and use what there is."""

import re

import pytest

from cosmos_rl.policy.config import ConfigError, load_config, notes, unsupported_settings, world_size
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"
NAMED = {
    "stable-diffusion-3-5/stable-diffusion-3-5-image-sft.toml": [],
    "stable-diffusion-3-5/stable-diffusion-3-5-image-sft-lora.toml": [],
    "stable-diffusion-3-5/stable-diffusion-3-5-medium-nft.toml": [],
    "sana/sana-image-sft.toml": [],
    "sana/sana-image-sft-lora.toml": [],
    "sana/sana-video-sft.toml": [],
    "sana/sana-video-sft-lora.toml": [],
    "sana/sana-image-nft.toml": [],
    "sana/sana-video-nft.toml": [],
    "cosmos-predict2-5/cosmos-predict2-5-2b-720-nft.toml": [],
}


def opening(recipe: str) -> str:
    """The comment that opens a recipe, without the marks."""
    lines = (CONFIGS / recipe).read_text().splitlines()[1:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#").strip() for line in lines[:end])


def test_every_recipe_of_the_documents_is_shipped_and_no_other() -> None:
    shipped = {str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.toml")}
    assert shipped == {*NAMED, "cosmos_rl_config.toml"}


@pytest.mark.parametrize("recipe", NAMED)
def test_a_recipe_has_no_problems_and_its_missing_parts_are_named(recipe: str) -> None:
    config = load_config(CONFIGS / recipe)
    missing = unsupported_settings(config)
    assert all(any(part in line for line in missing) for part in NAMED[recipe]), missing
    assert bool(missing) == bool(NAMED[recipe])
    assert notes(config) == []
    assert world_size(config.policy.parallelism) == 8


@pytest.mark.parametrize("recipe", NAMED)
def test_a_recipe_opens_with_its_command_hardware_and_memory(recipe: str) -> None:
    text = opening(recipe)
    command = re.sub(r"\s*\\\n\s*", " ", text).split("\n")[2].strip()
    assert command.startswith(f"cosmos-rl --config ./configs/{recipe} ")
    assert command.endswith(("cosmos_rl.tools.dataset.diffusers_dataset", "cosmos_rl.tools.dataset.diffusion_nft"))
    assert all(f"\n{word}: " in text for word in ("Hardware", "Memory", "Result"))
    tried = recipe.startswith("stable")
    assert ("\nVerified: " in text) != tried
    assert ("On one GPU: " in text) == (tried or "sft" in recipe)


@pytest.mark.parametrize("recipe", NAMED)
def test_a_recipe_writes_where_its_opening_says(recipe: str) -> None:
    config = load_config(CONFIGS / recipe)
    result = re.search(r"^Result: (.*)$", opening(recipe), re.MULTILINE)
    assert result
    expected = f"{config.train.output_dir}/safetensors/step_<N>{'/lora' if config.policy.lora else ''}"
    assert result[1] == expected


@pytest.mark.parametrize("recipe", [recipe for recipe in NAMED if "nft" in recipe])
def test_a_reinforcement_learning_recipe_trains_nine_of_ten_steps_in_whole_groups(recipe: str) -> None:
    config = load_config(CONFIGS / recipe)
    diffusers, group = config.policy.diffusers, config.rollout.n_generation
    assert diffusers.trained_levels == 9
    assert config.train.train_batch_per_replica == 6 * group * 8
    assert config.policy.lora
    assert config.policy.lora.lora_names == ("default", "old")


def test_the_template_lacks_nothing_but_a_model() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / "cosmos_rl_config.toml")
    [line] = caught.value.problems
    assert line.startswith("policy.model_name_or_path: missing")
