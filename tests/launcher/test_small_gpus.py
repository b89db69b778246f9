"""The table of docs/small-gpus.md: every LoRA recipe on one GPU, by the estimate."""

import re

import pytest

from cosmos_rl.launcher.check import estimate
from cosmos_rl.launcher.machine import format_bytes
from cosmos_rl.policy.config import is_older, load_config, read_toml
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"
PAGE = (ROOT / "docs" / "small-gpus.md").read_text(encoding="utf-8")
LINE = re.findall(r"--train\.\S+=\S+|--policy\.\S+=\S+", PAGE.partition("```bash")[2].partition("```")[0])
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if ".toml` |" in line]
OFFLOAD, PACKED = "--train.base_offload=true", "--policy.lora.quantize_base=nf4"
ONE_GPU = "--policy.parallelism.dp_shard_size=1"


def peak(recipe: str, *options: str) -> int:
    from tests.support.published import files_of  # builds the transformers without memory

    config = load_config(CONFIGS / recipe, [ONE_GPU, *options])
    files = files_of(config)
    assert list(files.selection.problems) == []
    return estimate.memory(config, files, on_cpu=False, saves=None).peak


def test_every_recipe_with_adapters_has_a_row() -> None:
    paths = [path for path in CONFIGS.rglob("*/*.toml") if not is_older(read_toml(path))]
    found = {str(path.relative_to(CONFIGS)) for path in paths if load_config(path).policy.lora is not None}
    assert sorted(row[0].strip("`") for row in ROWS) == sorted(found)
    assert len(LINE) == 4


@pytest.mark.zoo
@pytest.mark.parametrize("row", [pytest.param(row, id=row[0].strip("`")) for row in ROWS])
def test_a_recipe_takes_what_the_table_says_and_fits_on_24_gb(row: list[str]) -> None:
    recipe, plain, with_flags, offloaded, more = row
    recipe, options = recipe.strip("`"), re.findall(r"`(--[^`]+)`", more)
    size = peak(recipe, *LINE, OFFLOAD, *options)
    found = [peak(recipe), peak(recipe, *LINE), size]
    assert [plain, with_flags, offloaded] == [format_bytes(number) for number in found]
    assert size <= (24e9 if "2-5-2b-720-nft" in recipe else 16e9)
    published = [flag for flag in LINE if flag != PACKED]
    assert peak(recipe, *published, OFFLOAD, *options) - size <= 1.7e9


def test_five_recipes_need_more_than_the_line() -> None:
    assert sum(float(row[2].removesuffix(" GB")) > 24 for row in ROWS) == 5


@pytest.mark.slow
def test_what_wan_2_2_takes_of_host_memory_is_on_the_page() -> None:
    from tests.support.published import files_of

    found = []
    for flags in ((PACKED,), ()):
        options = [flag for flag in LINE if flag != PACKED and "text_blocks" not in flag]
        config = load_config(CONFIGS / "wan" / "wan-2-2-a14b-sft-lora.toml", [ONE_GPU, OFFLOAD, *options, *flags])
        memory = estimate.memory(config, files_of(config), on_cpu=False, saves=None)
        assert memory.peak <= 16e9
        found.append(format_bytes(memory.host))
    packed, published = found
    assert f"takes {packed} with the line above, and {published} without" in PAGE.replace("\n", " ")
