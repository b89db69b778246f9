"""The configuration described for people and editors: JSON schema, Markdown page, commented TOML."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cosmos_rl.policy.config.aliases import PRESENT_NAMES
from cosmos_rl.policy.config.base import Support
from cosmos_rl.policy.config.keys import describe_allowed, list_branches, read_support
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import SftPolicyConfig, TrainPolicyConfig

# Draft 7 is what editors know; anyOf because an absent key fits several tables.
_DRAFT_7 = {"prefixItems": "items", "oneOf": "anyOf"}
_SCHEMA = "http://json-schema.org/draft-07/schema#"
_PAGE = """# Configuration

Made by `cosmos-rl schema --markdown`; do not edit. A run is described by one TOML file. Every key can also be
set on the command line: `--train.optm_lr=1e-4`, `--policy.diffusers.inference_size='[512, 512]'`, `--policy.lora=none`.
`cosmos-rl schema --toml` prints all defaults as a file to start from
([`configs/cosmos_rl_config.toml`](../configs/cosmos_rl_config.toml)), `cosmos-rl schema` the JSON schema. A first line
`#:schema <path of cosmos_rl_config.json>` gives completion and checks in editors that know TOML schemas.

**Status** says which jobs read a key: all of them ("works"), or only those of preference optimisation, of
reinforcement learning or of videos. Keys that do nothing in this version are in the
[appendix](#appendix-keys-without-effect).

Unknown keys are errors. Old names that are still read: {aliases}.
"""
_APPENDIX = """## Appendix: keys without effect

These keys do nothing in this version.

| Status | Meaning |
|---|---|
| no effect | accepted so that older files load; named in one line when a run is started |
| not yet | accepted; a value other than the default is refused when a run is started ("not supported yet") |
| vision-language models, not yet | read only by such jobs, refused as a whole |

| Key | Value | Default | Meaning | Status |
|---|---|---|---|---|
"""
_EFFECTIVE = (Support.WORKS, Support.DPO, Support.RL, Support.VIDEO)
_TEMPLATE = """\
#:schema ./schemas/cosmos_rl_config.json
# All keys with their defaults, made by `cosmos-rl schema --toml`. A run needs policy.model_name_or_path and
# train.train_policy.dataset.local_dir. Left out are the keys without effect: docs/configuration.md has those too.
"""


@dataclass(frozen=True)
class Entry:
    """A key that holds no table."""

    name: str
    field: FieldInfo
    kind: Support
    default: object

    @property
    def meaning(self) -> str:
        """Its docstring, on one line."""
        return " ".join((self.field.description or "").split())

    def describe(self, *usual: Support) -> str:
        """Its meaning, and what it does in this version unless that is usual."""
        if self.kind in (Support.WORKS, *usual):
            return self.meaning
        return f"{self.meaning} ({self.kind.value})"

    @property
    def values(self) -> str:
        """What it accepts, in words."""
        return describe_allowed(self.field.annotation, self.field.metadata)


@dataclass(frozen=True)
class Section:
    """One TOML table and the keys in it that are no tables."""

    heading: str
    table: type[BaseModel]
    given: bool  # whether the table is there when the file does not name it
    entries: tuple[Entry, ...]

    @property
    def path(self) -> str:
        """Dotted name of the table; empty for the top level."""
        return self.heading.partition(" with ")[0].strip("[]")

    @property
    def status(self) -> Support:
        """What all its keys do, if that is the same for all and not the usual."""
        kinds = {entry.kind for entry in self.entries} - {Support.NO_EFFECT}
        if len(kinds) == 1:
            return kinds.pop()
        return Support.WORKS

    @property
    def about(self) -> str:
        """What the table is for."""
        text = " ".join((self.table.__doc__ or "").split())
        _, _, meaning = text.partition("`: ")
        if not meaning:
            return text
        return f"{meaning[:1].upper()}{meaning[1:]}"


def sections() -> list[Section]:
    """All tables of the configuration, parents first, each with its keys."""
    return list(_sections(Config, Config(), "", Support.WORKS, given=True))


def _sections(
    table: type[BaseModel], filled: BaseModel | None, name: str, kind: Support, *, given: bool, in_list: bool = False
) -> Iterator[Section]:
    entries, inner, prefix = [], [], ""
    if name:
        prefix = f"{name}."
    for key, field in _fields(table).items():
        own = read_support(field.metadata, kind)
        default = field.get_default(call_default_factory=True)
        if filled is not None:
            default = getattr(filled, key)
        branches = list(list_branches(field.annotation, own))
        if not branches:
            entries.append(Entry(key, field, own, default))
        items = default
        if not isinstance(default, tuple):
            items = (default,)
        for branch, branch_kind in branches:
            there = next((item for item in items[:1] if isinstance(item, branch)), None)
            present, listed = given and there is not None, isinstance(default, tuple)
            inner.append(_sections(branch, there, prefix + key, branch_kind, given=present, in_list=listed))
    yield Section(_heading(table, name, in_list=in_list), table, given, tuple(entries))
    for sub in inner:
        yield from sub


def _fields(table: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a table in the order in which they are shown."""
    fields = dict(table.model_fields)
    if issubclass(table, TrainPolicyConfig):
        fields = {"type": fields["type"], **fields}
    if issubclass(table, TrainPolicyConfig) and table is not SftPolicyConfig:  # what it shares is described with "sft"
        fields = {key: field for key, field in fields.items() if key not in TrainPolicyConfig.model_fields}
    return fields


def _heading(table: type[BaseModel], name: str, *, in_list: bool) -> str:
    heading = ""
    if name:
        heading = f"[{name}]"
    if in_list:
        heading = f"[{heading}]"
    if issubclass(table, TrainPolicyConfig):
        heading += f' with type = "{table.model_fields["type"].default}"'
    return heading


def json_schema() -> str:
    """The JSON schema of the configuration, as text."""
    schema = Config.model_json_schema()
    first_places = {section.table: section for section in reversed(sections())}
    for section in first_places.values():
        place = schema
        if section.table is not Config:
            place = schema["$defs"][section.table.__name__]
        for entry in section.entries:
            place["properties"][entry.name]["description"] = entry.describe()
    plain = _for_editors(schema)
    assert isinstance(plain, dict)
    return json.dumps({"$schema": _SCHEMA, "title": "cosmos-rl", **plain}, indent=2, ensure_ascii=False) + "\n"


def _for_editors(node: object) -> object:
    """In draft 7, without titles, which repeat the names, and without OpenAPI's discriminator."""
    if isinstance(node, list):
        return [_for_editors(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key != "discriminator" and not _is_title(key, value)}
    return {_DRAFT_7.get(key, key): _for_editors(value) for key, value in kept.items()}


def _is_title(key: str, value: object) -> bool:
    return key == "title" and isinstance(value, str)


def markdown() -> str:
    """The documentation page of all keys; those that do nothing come last."""
    names = ", ".join(f"`{old}` (now `{new}`)" for old, new in PRESENT_NAMES.items())
    parts, idle = [_PAGE.format(aliases=names)], []
    described: dict[type[BaseModel], str] = {}
    for section in sections():
        idle += [_row(entry, section.path) for entry in section.entries if entry.kind not in _EFFECTIVE]
        entries = [entry for entry in section.entries if entry.kind in _EFFECTIVE]
        if section.entries and not entries:
            continue
        heading = "Top level"
        if section.heading:
            heading = f"`{section.heading}`"
        if section.table in described:
            parts.append(f"## {heading}\n\nThe keys of {described[section.table]}.\n")
            continue
        described[section.table] = heading
        lines = [f"## {heading}", "", section.about]
        if entries:
            lines += ["", "| Key | Value | Default | Meaning | Status |", "|---|---|---|---|---|"]
        parts.append("\n".join([*lines, *map(_row, entries)]) + "\n")
    return "\n".join([*parts, _APPENDIX + "\n".join(idle) + "\n"])


def _row(entry: Entry, table: str = "") -> str:
    name = entry.name
    if table:
        name = f"{table}.{name}"
    cells = [f"`{name}`", entry.values, _shown_default(entry), entry.meaning, entry.kind.value]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def _shown_default(entry: Entry) -> str:
    if entry.field.is_required():
        return "required"
    if entry.default is None:
        return "unset"
    return f"`{json.dumps(entry.default)}`"


def toml_template() -> str:
    """A TOML file with all keys that mean something here, their defaults and what they mean."""
    lines = [_TEMPLATE.rstrip()]
    for section in sections():
        entries = [entry for entry in section.entries if entry.kind is not Support.NO_EFFECT]
        if section.heading and entries:
            lines += ["", *_opening(section)]
        for entry in entries:
            text = entry.describe(section.status)
            lines += textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="# ")
            lines.append(_assignment(section, entry))
    return "\n".join(lines) + "\n"


def _opening(section: Section) -> Iterator[str]:
    """The lines with which a table begins; one that a file without it has not is commented out."""
    heading, _, condition = section.heading.partition(" with ")
    if condition:
        heading += f"  # {condition}"
    if not section.given:
        heading = f"# {heading}"
    yield heading
    if section.status is not Support.WORKS:
        yield f"# {section.status.value}"


def _assignment(section: Section, entry: Entry) -> str:
    """`key = default`, commented out where nothing is set."""
    value = f"<{entry.values}>"
    if entry.default not in (None, PydanticUndefined):
        value = json.dumps(entry.default)
    line = f"{entry.name} = {value}"
    if not section.given or entry.default is None:
        line = f"# {line}"
    return line
