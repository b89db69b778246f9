"""Validation that names every problem at once, in the words of the TOML file."""

import copy
import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.aliases import with_present_names
from cosmos_rl.policy.config.keys import allowed, field_of, suggestion, tables_of

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the dotted key, and what was found and what is allowed."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


class ConfigError(UserError):
    """The configuration cannot be used; the message lists all problems, one a line."""

    def __init__(self, problems: Sequence[Problem | str], source: str = "") -> None:
        self.problems = tuple(str(problem) for problem in problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        heading = f"{count} in {source}:" if source else f"{count}:"
        super().__init__("\n".join([heading, *(f"  {problem}" for problem in self.problems)]))


def validated(model: type[Model], values: Mapping[str, object]) -> tuple[Model | None, list[Problem]]:
    """The model of `values` and all problems.

    With problems the model holds defaults in their places, so that further rules can be checked on the rest.
    """
    tree = copy.deepcopy(dict(values))
    problems = [Problem(key, text) for key, text in with_present_names(tree)]
    try:
        return model.model_validate(tree), problems
    except ValidationError as error:
        found = _located(model, error)
    problems += [_problem(model, tree, path, unknown) for path, unknown in found.items()]
    for path in found:
        _remove(tree, path)
    try:
        return model.model_validate(tree), problems
    except ValidationError:
        return None, problems


def _located(model: type[BaseModel], error: ValidationError) -> dict[tuple[str, ...], bool]:
    """The keys that failed, each with whether it is unknown; a key with several complaints appears once."""
    found: dict[tuple[str, ...], bool] = {}
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        tables, path = [model], []
        for part in item["loc"]:
            field = field_of(tables, part)
            if field is not None:
                path.append(part)
                tables = tables_of(field.annotation)
            elif not tables:
                break  # inside a plain value: a list index, a key of a free table, the branch of a union
        unknown = item["type"] == "extra_forbidden"
        if unknown:
            path.append(str(item["loc"][-1]))
        found.setdefault(tuple(path), unknown)
    return found


def _problem(model: type[BaseModel], tree: Mapping[str, object], path: tuple[str, ...], unknown: bool) -> Problem:
    key = ".".join(path)
    if not path:
        return Problem("", "the configuration is not a table")
    if unknown:
        near = suggestion(model, key)
        return Problem(key, f"unknown key; did you mean {near}?" if near else f"unknown key; {_known(model, path)}")
    field = None
    tables: list[type[BaseModel]] = [model]
    value: object = tree
    for name in path:
        field = field_of(tables, name)
        tables = tables_of(field.annotation) if field else []
        value = value.get(name) if isinstance(value, Mapping) else None
    what = allowed(field.annotation, field.metadata) if field else "a value"
    return Problem(key, f"found {shown(value)}; allowed: {what}")


def _known(model: type[BaseModel], path: tuple[str, ...]) -> str:
    tables: list[type[BaseModel]] = [model]
    for name in path[:-1]:
        field = field_of(tables, name)
        tables = tables_of(field.annotation) if field else []
    names = dict.fromkeys(name for table in tables for name in table.model_fields)
    return f"known in [{'.'.join(path[:-1])}]: {', '.join(names)}" if len(path) > 1 else f"known: {', '.join(names)}"


def shown(value: object) -> str:
    """A value as it would look in TOML, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _remove(tree: MutableMapping[str, object], path: tuple[str, ...]) -> None:
    node: object = tree
    for name in path[:-1]:
        node = node.get(name) if isinstance(node, Mapping) else None
    if isinstance(node, MutableMapping) and path:
        node.pop(path[-1], None)
