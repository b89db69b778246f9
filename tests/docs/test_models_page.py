"""The tables of docs/models.md are those of the code."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from cosmos_rl.policy.model.driver.rows import Row, find_row
from cosmos_rl.policy.model.tiny.zoo import MAKERS
from tests.support import driven
from tests.support.family_runs import folder_of
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
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
