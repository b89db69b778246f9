"""The tables of the older configuration, made of `older.toml`."""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

from cosmos_rl.policy.config.base import AnyTable, Table
from cosmos_rl.policy.config.wfm import Count, PositiveNumber, RLConfig

_POSITIVE: Mapping[object, Any] = {int: Count, float: PositiveNumber}
_Factors = Annotated[tuple[PositiveNumber, ...], Field(min_length=1)]
_KINDS: Mapping[str, Any] = {
    "rl": RLConfig,
    "input_key": str | tuple[str, ...],
    "betas": tuple[float, float],
    "grad_scaler_args": dict[str, bool],
    "image_size": tuple[int, int],
    "video_size": tuple[int, int],
    "warm_up_steps": Annotated[tuple[int, ...], Field(min_length=1)],
    "f_start": Annotated[tuple[float, ...], Field(min_length=1)],
    "f_min": Annotated[tuple[float, ...], Field(min_length=1)],
    "f_max": _Factors,
    "cycle_lengths": _Factors,
}
"""What keys hold whose default does not show it."""


@cache
def older_config() -> type[Table]:
    """The model of a whole file; made when the first is read, for it takes a moment."""
    text = files("cosmos_rl.policy.config.wfm").joinpath("older.toml").read_text(encoding="utf-8")
    return _make_table(tomllib.loads(text), "root")


class _MadeTable(Table):
    """Without a source to search for docstrings, which takes long."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def _make_table(tables: Mapping[str, object], parts: object) -> type[Table]:
    fields: dict[str, Any] = {
        name: _make_field(tables, name, marks, value) for name, marks, value in _list_keys(tables, parts)
    }
    return create_model("OlderTable", __base__=_MadeTable, **fields)


def _list_keys(tables: Mapping[str, object], parts: object) -> Iterator[tuple[str, str, object]]:
    """Name, marks and value of each key of a table, or of all its parts."""
    if isinstance(parts, str):
        parts = tables[parts]
    if isinstance(parts, Mapping):
        for key, value in parts.items():
            name = key.rstrip("!?+[]")
            yield name, key.removeprefix(name), value
    elif isinstance(parts, list):
        for part in parts:
            yield from _list_keys(tables, part)


def _make_field(tables: Mapping[str, object], name: str, marks: str, value: object) -> tuple[Any, object]:
    """Type and default of a key."""
    kind, default = _read_value(tables, value)
    kind = _KINDS.get(name, kind)
    if "+" in marks:
        kind = _POSITIVE[kind]
    if "[]" in marks:
        return tuple[kind, ...], ()
    if "!" in marks:
        return kind, ...
    if "?" in marks:
        return kind | None, None
    return kind, default


def _read_value(tables: Mapping[str, object], value: Any) -> tuple[Any, object]:
    """The type that a value of `older.toml` stands for, and the default that it gives."""
    if value == "any":
        return Any, None
    if isinstance(value, str) and value.startswith("["):
        return _make_table(tables, value.strip("[]")), {}
    if isinstance(value, str) and " | " in value:
        choices = tuple(value.split(" | "))
        return Literal[choices], choices[0]
    if value == {}:
        return AnyTable, {}
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(part, dict) for part in value)):
        return _make_table(tables, value), {}
    if isinstance(value, list):
        return tuple[type(next(iter(value), "")), ...], value
    return type(value), value
