"""The map of all configuration keys: dotted names, what each accepts and does, and the nearest to a misspelt one."""

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cosmos_rl.policy.config.base import Choices, Description, Support

T = TypeVar("T", bound=BaseModel)
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a table"}


@dataclass(frozen=True)
class Key:
    """A key with a value, its place and what it does in this version."""

    path: str
    field: FieldInfo
    kind: Support
    value: object

    @property
    def default(self) -> object:
        """The value of a key that is not set."""
        return self.field.get_default(call_default_factory=True)


def list_keys(
    table: BaseModel, prefix: str = "", kind: Support = Support.WORKS, *, in_lists: bool = False
) -> Iterator[Key]:
    """Every key of a filled table that is not a table itself.

    ``in_lists``: those of the tables in lists that work here too, as ``list.0.key``, after the list.
    """
    for name, field in type(table).model_fields.items():
        value, own = getattr(table, name), read_support(field.metadata, kind)
        if isinstance(value, BaseModel):
            branches = dict(list_branches(field.annotation, own))
            yield from list_keys(value, f"{prefix}{name}.", branches[type(value)], in_lists=in_lists)
            continue
        yield Key(prefix + name, field, own, value)
        if in_lists and own is Support.WORKS and isinstance(value, tuple):
            for number, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from list_keys(item, f"{prefix}{name}.{number}.", own, in_lists=True)


def with_values(table: T, change: Callable[[str, object], object], prefix: str = "") -> T:
    """The table with `change(dotted key, value)` in place of each value, those in lists of tables included."""
    changed: dict[str, object] = {}
    for name in type(table).model_fields:
        value, key = getattr(table, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            changed[name] = with_values(value, change, f"{key}.")
        elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
            changed[name] = tuple(with_values(item, change, f"{key}.{i}.") for i, item in enumerate(value))
        else:
            changed[name] = change(key, value)
    # a value that stays is not set by this: some keys mean something else when they are left out
    changed = {name: value for name, value in changed.items() if value is not getattr(table, name)}
    return table.model_copy(update=changed)


def read_support(metadata: Sequence[object], inherited: Support) -> Support:
    """What a key with this metadata does; without a mark of its own, what its table does."""
    return next((mark for mark in metadata if isinstance(mark, Support)), inherited)


def list_branches(annotation: object, kind: Support) -> Iterator[tuple[type[BaseModel], Support]]:
    """The tables a key may hold, or a list in it, each with its kind: none for a plain value."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, kind
    elif origin is Annotated:
        yield from list_branches(arguments[0], read_support(arguments[1:], kind))
    elif origin in (Union, UnionType) or (origin is tuple and arguments[-1] is Ellipsis):
        for part in arguments:
            yield from list_branches(part, kind)


def list_tables(annotation: object) -> list[type[BaseModel]]:
    """The tables a key may hold, or a list in it: none for a plain value, several for a union of tables."""
    return [table for table, _ in list_branches(annotation, Support.WORKS)]


def find_field_in(tables: Sequence[type[BaseModel]], name: object) -> FieldInfo | None:
    """The field called `name` in the first of `tables` that has it."""
    if not isinstance(name, str):
        return None
    return next((table.model_fields[name] for table in tables if name in table.model_fields), None)


def dotted_keys(model: type[BaseModel]) -> list[str]:
    """Every key and table of `model`, as dotted names, each once."""
    return list(dict.fromkeys(_list_dotted(model, "")))


def _list_dotted(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for table in list_tables(field.annotation):
            yield from _list_dotted(table, f"{prefix}{name}.")


def find_field(model: type[BaseModel], path: Sequence[str]) -> FieldInfo | None:
    """The field at a dotted path, or None when there is no such key; numbers count the items of a list."""
    tables, field = [model], None
    for name in path:
        if name.isdecimal() and field is not None:
            continue
        field = find_field_in(tables, name)
        if field is None:
            return None
        tables = list_tables(field.annotation)
    return field


def is_text_only(annotation: object) -> bool:
    """Whether every value this annotation accepts is text, so that `2025` on the command line means "2025"."""
    if annotation is str or annotation is NoneType:
        return True
    if get_origin(annotation) is Annotated:
        return is_text_only(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    return get_origin(annotation) in (Union, UnionType) and all(is_text_only(part) for part in get_args(annotation))


def describe_allowed(annotation: object, metadata: Sequence[object] = ()) -> str:
    """What a key accepts, in words: "a whole number > 0", "one of "async", "sync""."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return describe_allowed(inner, [*more, *metadata])
    limits = list(_flatten(metadata))
    words = next((limit.text for limit in limits if isinstance(limit, Description)), None)
    if words:
        return words
    pattern = next((found for limit in limits if (found := getattr(limit, "pattern", None))), None)
    bounds = [f"{sign} {getattr(limit, name)}" for limit in limits for name, sign in _BOUNDS if hasattr(limit, name)]
    plain = _plain(annotation)
    if any(getattr(limit, "min_length", None) for limit in limits):
        filled = plain.replace("a list of ", "a list of one or more ", 1)
        plain = filled if filled != plain else f"{plain} that is not empty"
    return " ".join([plain, *([f"matching {pattern}"] if pattern else []), " and ".join(bounds)]).rstrip()


def _flatten(metadata: Sequence[object]) -> Iterator[object]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _flatten(item.metadata)
        else:
            yield item


def _plain(annotation: object) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if list_tables(annotation):
        return "a list of tables" if origin is tuple else "a table"
    if origin in (Union, UnionType):
        return " or ".join(describe_allowed(part) for part in arguments if part is not NoneType)
    if origin is Literal:
        choices = ", ".join(json.dumps(choice) for choice in arguments)
        return f"one of {choices}" if len(arguments) > 1 else choices
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list of values, each {describe_allowed(arguments[0])}"
    if origin is tuple and len(arguments) == 1:
        return f"a list of one value: {describe_allowed(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)} values: " + ", ".join(describe_allowed(part) for part in arguments)
    if origin is dict:
        return "a table" if arguments[1] is object else f"a table of values, each {describe_allowed(arguments[1])}"
    return _NAMES.get(annotation if isinstance(annotation, type) else object, "a value")


def near_choice(field: FieldInfo, value: object) -> str | None:
    """The name that was probably meant by a text that is none of those that a key accepts."""
    if not isinstance(value, str):
        return None
    marks = [mark for mark in _flatten(field.metadata) if isinstance(mark, Choices)]
    names = [*(name for mark in marks for name in mark.names), *_list_literals(field.annotation)]
    spelt = {other: name for mark in marks for other, name in mark.other_spellings.items()}
    spelt |= {name.lower(): name for name in names}
    near = difflib.get_close_matches(value.lower(), spelt, n=1, cutoff=0.7)
    return spelt[near[0]] if near else None


def _list_literals(annotation: object) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (choice for choice in get_args(annotation) if isinstance(choice, str))
        return
    for part in get_args(annotation):
        yield from _list_literals(part)


def suggestion(model: type[BaseModel], unknown: str) -> str | None:
    """The key that was probably meant: the same name in another table first, then the nearest spelling."""
    known = dotted_keys(model)
    unknown = ".".join(name for name in unknown.split(".") if not name.isdecimal())
    table, _, leaf = unknown.rpartition(".")
    same_name = [key for key in known if key.rpartition(".")[2].lower() == leaf.lower()]
    if same_name:
        return max(same_name, key=lambda key: difflib.SequenceMatcher(a=unknown, b=key).ratio())
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == table}
    near_leaf = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if near_leaf:
        return siblings[near_leaf[0]]
    if table in known:  # names that share only their table are not alike
        return None
    near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.75)
    return next(iter(near), None)
