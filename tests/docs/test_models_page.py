"""The tables of docs/models.md are those of the code."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.driver.rows import Row, find_row
from cosmos_rl.policy.model.tiny.zoo import MAKERS
from tests.config.test_recipes import CONFIGS, NAMED, opening
from tests.config.test_recipes_run import FROM_AN_IMAGE, family_of
from tests.support import driven, family_runs
from tests.support.family_runs import folder_of
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
MODEL = re.compile(
    r"^\| `([\w.-]+)` \| \[([\w./-]+)\]\(https://huggingface\.co/([\w./-]+)\) \| (.+?) \| (.+?) \| (.+?) \| .* "
    r"\| (\S+(?: \w+)?) \| (\S+(?: \w+)?) \|$",
    re.MULTILINE,
)
GIVEN = {(0, 0): "text", (0, 2): "text, image, video", (1, 1): "image"}
FAMILY = re.compile(r"^\| `([\w.-]+)` \| (\w+Pipeline)\b.*\| ([^|]+) \| (test|zoo) \|$", re.MULTILINE)


def set_fields(pipeline_class: str) -> str:
    """Fields of the class's row that are not the defaults, as the page has them."""
    row, plain = find_row(pipeline_class), Row()
    return ", ".join(f"`{f.name}`" for f in fields(Row) if getattr(row, f.name) != getattr(plain, f.name)) or "none"


def test_every_tiny_family_is_in_the_table_once_with_its_suite() -> None:
    listed = [(name, suite) for name, _, _, suite in FAMILY.findall(PAGE)]
    suites = dict.fromkeys(driven.CONDITIONED, "zoo")
    suites |= {one.name: "test" for one in driven.ORDINARY} | {one.name: "zoo" for one in driven.ZOO}
    assert sorted(listed) == sorted(suites.items())
    assert set(suites) == {"sd3", *MAKERS}


def test_every_row_is_that_of_the_code() -> None:
    for name, kind, row, _ in FAMILY.findall(PAGE):
        assert row.removesuffix("; a class of its own") == set_fields(kind), name


def test_every_field_of_a_row_is_explained() -> None:
    section = PAGE.partition("## Adding a row")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(field.name for field in fields(Row))


@pytest.mark.parametrize("family", ["sana", "flux", "wan"])
def test_a_family_has_the_pipeline_class_of_the_table(family: str) -> None:
    listed = {name: kind for name, kind, _, _ in FAMILY.findall(PAGE)}
    index = json.loads((Path(folder_of(family)) / "model_index.json").read_text(encoding="utf-8"))
    assert index["_class_name"] == listed[family]


def test_the_models_are_the_families_that_can_be_trained() -> None:
    trained = {one.name: one for one in (family_runs.SD3, *family_runs.ORDINARY, *family_runs.ZOO)}
    kinds = {name: kind for name, kind, _, _ in FAMILY.findall(PAGE)}
    rows = MODEL.findall(PAGE)
    assert {name for name, *_ in rows} == {*trained, *driven.CONDITIONED} - FROM_AN_IMAGE.keys()
    assert all(f"`{name}`" in PAGE.partition("## The models")[2].partition("\n## ")[0] for name in FROM_AN_IMAGE)
    for name, shown, address, sft, nft, given, *_ in rows:
        assert shown == address
        expected = "LoRA, all"
        if name in trained and not trained[name].ranks:
            expected = "LoRA, all (one rank)"
        assert sft == nft == expected
        assert given == GIVEN[find_row(kinds[name]).clean_frames]


def test_the_models_are_those_of_the_recipes_with_their_memory() -> None:
    listed = {address: (name, {"sft": sft, "nft": nft}) for name, _, address, *_, sft, nft in MODEL.findall(PAGE)}
    found: dict[str, dict[str, str]] = {address: {} for address in listed}
    for recipe in NAMED:
        config = load_config(CONFIGS / recipe)
        if config.policy.lora is None or "-dpo" in recipe:
            continue
        (memory,) = re.findall(r"^Memory: (\S+ \w+) on each GPU", opening(recipe), re.MULTILINE)
        found[config.policy.model_name_or_path]["nft" if "-nft" in recipe else "sft"] = memory
        assert listed[config.policy.model_name_or_path][0] == family_of(recipe)
    assert {address: memory for address, (_, memory) in listed.items()} == found
