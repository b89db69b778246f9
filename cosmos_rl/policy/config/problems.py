"""Validation that names every problem at once, in the words of the TOML file."""

import copy
import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from cosmos_rl.diffusion.solver_names import SAMPLING_ONLY, explain_sampling_only
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.aliases import RENAMED, rename_old_keys
from cosmos_rl.policy.config.keys import (
    describe_allowed,
    find_field,
    find_field_in,
    list_tables,
    near_choice,
    suggestion,
)

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the dotted key, and what was found and what is allowed."""

    key: str
    text: str

    def __str__(self) -> str:
        if not self.key:
            return self.text
        return f"{self.key}: {self.text}"


class ConfigError(UserError):
    """The configuration cannot be used; the message lists all problems, one a line."""

    def __init__(self, problems: Sequence[Problem | str], source: str = "") -> None:
        self.problems = tuple(str(problem) for problem in problems)
        heading = f"{len(self.problems)} problems"
        if len(self.problems) == 1:
            heading = "1 problem"
        if source:
            heading += f" in {source}"
        super().__init__("\n".join([f"{heading}:", *(f"  {problem}" for problem in self.problems)]))


def validate(model: type[Model], values: Mapping[str, object]) -> tuple[Model | None, list[Problem]]:
    """The model of `values` and all problems.

    With problems the model holds defaults in their places, so that further rules can be checked on the rest.
    """
    tree = copy.deepcopy(dict(values))
    problems = [Problem(key, text) for key, text in rename_old_keys(tree)]
    try:
        return model.model_validate(tree), problems
    except ValidationError as error:
        found = _locate(model, error)
    problems += [_problem(model, tree, path, unknown) for path, unknown in found.items()]
    for path in found:
        _remove(tree, path)
    try:
        return model.model_validate(tree), problems
    except ValidationError:
        return None, problems


def drop_unknown(model: type[BaseModel], values: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The values without keys that `model` does not have, and these keys."""
    tree = copy.deepcopy(dict(values))
    try:
        model.model_validate(tree)
        return tree, []
    except ValidationError as error:
        found = [path for path, unknown in _locate(model, error).items() if unknown]
    for path in found:
        _remove(tree, path)
    return tree, [".".join(path) for path in found]


def _locate(model: type[BaseModel], error: ValidationError) -> dict[tuple[str, ...], bool]:
    """The keys that failed, each with whether it is unknown; a key with several complaints appears once."""
    found: dict[tuple[str, ...], bool] = {}
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        tables, path = [model], []
        unknown = item["type"] == "extra_forbidden"
        for part in item["loc"][: -1 if unknown else None]:
            field = find_field_in(tables, part)
            if field is not None:
                path.append(part)
                tables = list_tables(field.annotation)
            elif not tables:
                break  # inside a plain value: a list index, a key of a free table, the branch of a union
            elif isinstance(part, int):
                path.append(str(part))
        if unknown or item["type"] == "union_tag_invalid":
            path.append(str(item["loc"][-1]) if unknown else "type")
        found.setdefault(tuple(path), unknown)
    return found


def _problem(model: type[BaseModel], tree: Mapping[str, object], path: tuple[str, ...], unknown: bool) -> Problem:
    key = ".".join(path)
    if not path:
        return Problem("", "the configuration is not a table")
    tables = _tables_at(model, path[:-1])
    holder = _value_at(tree, path[:-1])
    if unknown:
        return Problem(key, _unknown(model, tables, holder, path))
    fields = [table.model_fields[path[-1]] for table in tables if path[-1] in table.model_fields]
    kinds = dict.fromkeys(describe_allowed(field.annotation, field.metadata) for field in fields)
    if path[-1].isdecimal():
        kinds = {"a table": None}
    if isinstance(holder, Mapping) and path[-1] not in holder:
        return Problem(key, f"missing; allowed: {' or '.join(kinds)}")
    value = _value_at(tree, path)
    reason = "; or leave the key out" if value in ("", [], {}) and not any(f.is_required() for f in fields) else ""
    near = next((name for field in fields if (name := near_choice(field, value))), None)
    if near is not None:
        reason = f"; did you mean {format_value(near)}?"
    if path[-1] == "solver" and isinstance(value, str) and value in SAMPLING_ONLY:
        reason = f"; {explain_sampling_only(value)}"
    return Problem(key, f"found {format_value(value)}; allowed: {' or '.join(kinds)}{reason}")


def _unknown(model: type[BaseModel], tables: list[type[BaseModel]], holder: object, path: tuple[str, ...]) -> str:
    """Why a key is not known where it stands, and which was probably meant."""
    elsewhere = [table for table in tables if path[-1] in table.model_fields]
    if elsewhere:  # several tables can stand here, and this is a key of another one
        chosen = holder.get("type", "sft") if isinstance(holder, Mapping) else None
        right = " or ".join(format_value(table.model_fields["type"].default) for table in elsewhere)
        return f"belongs to type = {right}; here is type = {format_value(chosen)}"
    if ".".join(path) in RENAMED:
        return f"is now called {RENAMED['.'.join(path)]}"
    near = suggestion(model, ".".join(path))
    if near:
        return f"unknown key; did you mean {near}?"
    names, where = ", ".join(dict.fromkeys(name for table in tables for name in table.model_fields)), ""
    if len(path) > 1:
        where = f" in [{'.'.join(path[:-1])}]"
    return f"unknown key; known{where}: {names}"


def _tables_at(model: type[BaseModel], path: Sequence[str]) -> list[type[BaseModel]]:
    field = find_field(model, path)
    if field is None:
        return [model]
    return list_tables(field.annotation)


def _value_at(tree: object, path: Sequence[str]) -> object:
    for name in path:
        if isinstance(tree, Mapping):
            tree = tree.get(name)
        elif isinstance(tree, Sequence) and name.isdecimal() and int(name) < len(tree):
            tree = tree[int(name)]
        else:
            return None
    return tree


def format_value(value: object) -> str:
    """A value as it would look in TOML, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    if len(text) > 80:
        text = text[:77] + "..."
    return text


def _remove(tree: MutableMapping[str, object], path: tuple[str, ...]) -> None:
    node = _value_at(tree, path[:-1])
    if isinstance(node, MutableMapping) and path:
        node.pop(path[-1], None)
