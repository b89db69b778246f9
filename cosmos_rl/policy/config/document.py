"""The configuration described for people and editors: JSON schema, Markdown page, commented TOML."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cosmos_rl.policy.config.aliases import PRESENT_NAMES
from cosmos_rl.policy.config.base import Kind
from cosmos_rl.policy.config.keys import allowed, branches_of, kind_of
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.train_policy import GrpoPolicyConfig, TrainPolicyConfig

# Draft 7 is what editors know; anyOf because an absent key fits several tables.
_DRAFT_7 = {"prefixItems": "items", "oneOf": "anyOf"}
_SCHEMA = "http://json-schema.org/draft-07/schema#"
_PAGE = """# Configuration

Made by `cosmos-rl schema --markdown`; do not edit. A run is described by one TOML file. Every key can also be
set on the command line: `--train.optm_lr=1e-4`, `--policy.diffusers.inference_size='[512, 512]'`, `--policy.lora=none`.
`cosmos-rl schema --toml` prints all defaults as a file to start from
([`configs/cosmos_rl_config.toml`](../configs/cosmos_rl_config.toml)), `cosmos-rl schema` the JSON schema. A first line
`#:schema <path of cosmos_rl_config.json>` gives completion and checks in editors that know TOML schemas.

**Status** says which jobs read a key: all of them ("works"), or only those of reinforcement learning. Keys that do
nothing in this version are in the [appendix](#appendix-keys-without-effect).

Unknown keys are errors. Old names that are still read: {aliases}.
"""
_APPENDIX = """## Appendix: keys without effect

These keys do nothing in this version.

| Status | Meaning |
|---|---|
| no effect | accepted so that older files load; named in one line when a run is started |
| not yet | accepted; a value other than the default is refused when a run is started ("not runnable yet") |
| videos, not yet (vision-language models, not yet) | read only by such jobs, refused as a whole |

| Key | Value | Default | Meaning | Status |
|---|---|---|---|---|
"""
_EFFECTIVE = (Kind.WORKS, Kind.RL)
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
    kind: Kind
    default: object

    @property
    def meaning(self) -> str:
        """Its docstring, on one line."""
        return " ".join((self.field.description or "").split())

    @property
    def values(self) -> str:
        """What it accepts, in words."""
        return allowed(self.field.annotation, self.field.metadata)


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
    def status(self) -> Kind:
        """What all its keys do, if that is the same for all and not the usual."""
        kinds = {entry.kind for entry in self.entries} - {Kind.NO_EFFECT}
        return kinds.pop() if len(kinds) == 1 else Kind.WORKS

    @property
    def about(self) -> str:
        """What the table is for."""
        text = " ".join((self.table.__doc__ or "").split())
        _, _, meaning = text.partition("`: ")
        return f"{meaning[:1].upper()}{meaning[1:]}" if meaning else text


def sections() -> list[Section]:
    """All tables of the configuration, parents first, each with its keys."""
    return list(_sections(Config, Config(), "", Kind.WORKS, given=True))


def _sections(
    table: type[BaseModel], filled: BaseModel | None, name: str, kind: Kind, *, given: bool, in_list: bool = False
) -> Iterator[Section]:
    fields = dict(table.model_fields)
    heading = f"[{name}]" if name else ""
    if in_list:
        heading = f"[{heading}]"
    if issubclass(table, TrainPolicyConfig):
        heading += f' with type = "{fields["type"].default}"'
        fields = {"type": fields["type"], **fields}
    if table is GrpoPolicyConfig:  # what it shares with "sft" is described there
        fields = {key: field for key, field in fields.items() if key not in TrainPolicyConfig.model_fields}
    entries, inner = [], []
    for key, field in fields.items():
        own = kind_of(field.metadata, kind)
        default = getattr(filled, key) if filled else field.get_default(call_default_factory=True)
        branches = list(branches_of(field.annotation, own))
        if not branches:
            entries.append(Entry(key, field, own, default))
        listed = isinstance(default, tuple)
        item = next(iter(default), None) if listed else default
        path = f"{name}.{key}" if name else key
        for branch, branch_kind in branches:
            there = item if isinstance(item, branch) else None
            present = given and there is not None
            inner.append(_sections(branch, there, path, branch_kind, given=present, in_list=listed))
    yield Section(heading, table, given, tuple(entries))
    for sub in inner:
        yield from sub


def json_schema() -> str:
    """The JSON schema of the configuration, as text."""
    schema = Config.model_json_schema()
    first_places = {section.table: section for section in reversed(sections())}
    for section in first_places.values():
        place = schema if section.table is Config else schema["$defs"][section.table.__name__]
        for entry in section.entries:
            status = "" if entry.kind is Kind.WORKS else f" ({entry.kind.value})"
            place["properties"][entry.name]["description"] = entry.meaning + status
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
        heading = f"`{section.heading}`" if section.heading else "Top level"
        if section.table in described:
            parts.append(f"## {heading}\n\nThe keys of {described[section.table]}.\n")
            continue
        described[section.table] = heading
        rows = [_row(entry) for entry in entries]
        head = ["", "| Key | Value | Default | Meaning | Status |", "|---|---|---|---|---|"] if rows else []
        parts.append("\n".join([f"## {heading}", "", section.about, *head, *rows]) + "\n")
    return "\n".join([*parts, _APPENDIX + "\n".join(idle) + "\n"])


def _row(entry: Entry, table: str = "") -> str:
    name = f"{table}.{entry.name}" if table else entry.name
    cells = [f"`{name}`", entry.values, _shown_default(entry), entry.meaning, entry.kind.value]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def _shown_default(entry: Entry) -> str:
    if entry.field.is_required():
        return "required"
    return "unset" if entry.default is None else f"`{json.dumps(entry.default)}`"


def toml_template() -> str:
    """A TOML file with all keys that mean something here, their defaults and what they mean."""
    lines = [_TEMPLATE.rstrip()]
    for section in sections():
        entries = [entry for entry in section.entries if entry.kind is not Kind.NO_EFFECT]
        off = "" if section.given else "# "
        if section.heading and entries:
            heading, condition, rest = section.heading.partition(" with ")
            lines += ["", f"{off}{heading}{f'  # {rest}' if condition else ''}"]
            lines += [] if section.status is Kind.WORKS else [f"# {section.status.value}"]
        for entry in entries:
            status = "" if entry.kind in (Kind.WORKS, section.status) else f" ({entry.kind.value})"
            lines += textwrap.wrap(entry.meaning + status, 118, initial_indent="# ", subsequent_indent="# ")
            value = f"<{entry.values}>" if entry.default in (None, PydanticUndefined) else json.dumps(entry.default)
            lines.append(f"{off or ('# ' if entry.default is None else '')}{entry.name} = {value}")
    return "\n".join(lines) + "\n"
