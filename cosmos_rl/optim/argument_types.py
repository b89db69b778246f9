"""Whether the value of a keyword argument is of a type that a class takes, as far as its signature says so."""

import inspect
import json
import types
import typing
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from cosmos_rl.policy.config.problems import format_value

_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", tuple: "a list"}
_BY_DEFAULT = ((bool, bool), (int, float), (float, float), (str, str), (tuple, tuple), (list, tuple))
"""The type of a default -> the type that is meant; the first that fits counts. A default of 0 may mean any number."""


def find_wrong_types(cls: Any, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) of each of the ``values``, as TOML has them, that ``cls`` cannot be meant to take.

    The annotation of a parameter counts, and where there is none that can be read its default. Whole numbers are
    numbers, also as 1e3, lists are tuples, and 0 and 1 are also false and true. A parameter of neither takes anything.
    """
    for name, kind, default in _read_kinds(cls, values):
        value = _fit(kind, default, values[name])
        same = type(value) is type(default) and value == default
        if same or _fits(kind, value) or (kind is not Any and value in (0, 1) and _fits(kind, bool(value))):
            continue
        usual = "" if default is None or default is inspect.Parameter.empty else f", by default {_show(default)}"
        yield name, f"found {_show(value)}; allowed: {_describe(kind)}{usual}"


def fit_values(cls: Any, values: Mapping[str, object]) -> dict[str, object]:
    """The ``values``, as TOML has them, in the types that ``cls`` takes: lists as tuples, and 1e3 as 1000 where a whole
    number is meant."""
    fitted = {name: _fit(kind, default, values[name]) for name, kind, default in _read_kinds(cls, values)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in {**values, **fitted}.items()}


def _read_kinds(cls: Any, names: Container[str]) -> Iterator[tuple[str, Any, object]]:
    """(name, type, default) of those parameters of ``cls`` that have one of the ``names``."""
    hints = _read_hints(cls)
    for name, parameter in inspect.signature(cls).parameters.items():
        if name not in names or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        kind = hints.get(name, _kind_of_default(parameter.default))
        if kind is int and parameter.default == 0:  # as many packages annotate any number
            kind = float
        default = parameter.default
        if hints.get(name) is float and type(default) is int:
            default = float(default)
        yield name, kind, default


def _fit(kind: Any, default: object, value: object) -> object:
    """``value``, with its floats as whole numbers where these are what fits, or what the default is."""
    whole = _with_whole_numbers(value)
    if (not _fits(kind, value) and _fits(kind, whole)) or (type(default) is int and isinstance(whole, int)):
        return whole
    return value


def _with_whole_numbers(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_with_whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_hints(cls: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls.__init__)
    except (NameError, AttributeError, TypeError, SyntaxError):  # names for type checkers alone, or of another Python
        return {}


def _kind_of_default(default: object) -> Any:
    return next((meant for kind, meant in _BY_DEFAULT if isinstance(default, kind)), Any)


def _fits(kind: Any, value: object) -> bool:
    try:
        adapter = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # something that cannot be known here
        return True
    try:  # as JSON, whose lists are tuples too
        adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError:
        return False
    except PydanticUserError:
        return True
    return True


def _describe(kind: Any) -> str:
    """In words, without what no configuration can hold."""
    if kind in _WORDS:
        return _WORDS[kind]
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(map(_show, parts))
    if origin in (typing.Union, types.UnionType):
        shown = [part for part in parts if part not in (types.NoneType, torch.Tensor)]
        return " or ".join(dict.fromkeys(map(_describe, shown)))
    if origin is tuple and Ellipsis not in parts:
        return f"[{', '.join(map(_describe, parts))}]"
    return inspect.formatannotation(kind)


def _show(value: object) -> str:
    return format_value(list(value) if isinstance(value, tuple) else value)
