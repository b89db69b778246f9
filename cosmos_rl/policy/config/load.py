"""Reading a configuration: TOML file, then `--a.b=value` overrides, then one report of everything that is wrong."""

import contextlib
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TypeGuard

import tomli_w

from cosmos_rl import __version__
from cosmos_rl.errors import UserError, explain_decoding
from cosmos_rl.policy.config.checks import cross_check
from cosmos_rl.policy.config.keys import find_field, is_text_only, suggestion
from cosmos_rl.policy.config.problems import ConfigError, Problem, drop_unknown, format_value, validate
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.wfm.notes import Note, Translation
from cosmos_rl.policy.config.wfm.schema import older_config
from cosmos_rl.policy.config.wfm.translate import translate
from cosmos_rl.text_files import read_text
from cosmos_rl.utils.logging import logger

_already_described: set[str] = set()
"""Older files whose translation was shown."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    fit: Callable[[Config], Config] = lambda config: config,
    lenient: bool = False,
    rules: Callable[[Config], Iterable[str]] = lambda config: (),
) -> Config:
    """The checked configuration of a TOML file; one of the older form is translated, and the translation is shown.

    Args:
        path: the file, or the folder of a run.
        overrides: `a.b.0.c=VALUE`, with or without leading dashes, of the present form.
        fit: sets the number of ranks for a machine before the rules between keys are checked.
        lenient: leave out unknown keys of an older file.
        rules: further ones of the caller, on rewards; not checked where a value of such a key is wrong.

    Raises:
        UserError: no such file.
        ConfigError: names every problem.
    """
    tree, notes, given = read_toml(path), tuple[Note, ...](), frozenset[str]()
    if is_older(tree):
        translation = translate_file(path, lenient=lenient)
        tree, notes, given = dict(translation.tables), translation.notes, translation.given
        if str(path) not in _already_described:
            _already_described.add(str(path))
            logger.info(
                "\n  ".join([f"{path}: a configuration of the older form, translated:", *translation.describe()])
            )
    set_them = [_refuse_older(override, notes) or _apply(tree, override) for override in overrides]
    problems = [problem for problem in set_them if problem]
    config, invalid = _check(tree, problems, fit, rules)
    problems = [*problems, *_join_older(tree, invalid)]
    if problems or config is None:
        flags, old_keys = [override.lstrip("-") for override in overrides], _list_old_keys(notes, given)
        problems = [_name_old_key(problem, old_keys, flags) for problem in problems]
        raise _config_error(problems, path, flags)
    return config


def _list_old_keys(notes: Sequence[Note], given: Set[str]) -> dict[str, str]:
    """Present keys -> those of an older file that they came from."""
    return {note.new: note.old for note in reversed(notes) if note.new and note.old in given}


def _name_old_key(problem: Problem, old_keys: Mapping[str, str], overrides: Sequence[str]) -> Problem:
    """A problem with a value of an older file, under the key that it has there."""
    key, _, text = str(problem).partition(":")
    if key not in old_keys or _name_override(str(problem), overrides) is not None:
        return problem
    return Problem(old_keys[key], f"as {key}:{text}")


def is_older(tree: Mapping[str, object]) -> bool:
    """Whether a file is of the older form: it has `[model]` and no `[policy]`."""
    return isinstance(tree.get("model"), Mapping) and "policy" not in tree


def translate_file(path: str | Path, *, lenient: bool = False) -> Translation:
    """The present form of an older file.

    Raises:
        ConfigError: names every unknown key (unless `lenient`) and every invalid value.
    """
    tree, unknown = read_toml(path), list[str]()
    if lenient:
        tree, unknown = drop_unknown(older_config(), tree)
    config, problems = validate(older_config(), tree)
    if problems or config is None:
        raise _config_error(problems, path, [])
    return translate(config, tree, unknown, output_root=os.environ.get("COSMOS_OUTPUT_DIR") or "./outputs")


def _join_older(tree: Mapping[str, object], problems: Sequence[Problem]) -> Sequence[Problem]:
    """The problems, with one for all tables of the older form in a file that is not of that form."""
    unknown = [name for name in tree if name not in Config.model_fields]
    older = [name for name in unknown if name in older_config().model_fields]
    if not older:
        return problems
    first, *others = older
    many = f", like {', '.join(others)}" if others else ""
    text = f"unknown key, of the older form{many}; a file of that form has [model] and no [policy] (docs/legacy.md)"
    return [Problem(first, text), *(problem for problem in problems if problem.key not in older)]


def _refuse_older(override: str, notes: Sequence[Note]) -> Problem | None:
    """An override with a key of the older form is named with its present key, by the ``notes`` of the translation."""
    key = override.lstrip("-").partition("=")[0]
    root = key.partition(".")[0]
    if root in Config.model_fields or root not in older_config().model_fields:
        return None
    present = " and ".join(dict.fromkeys(note.new for note in notes if note.old == key and note.new))
    return Problem(key, f"a key of the older form; flags have the present keys{present and ', here '}{present}")


def _config_error(problems: Sequence[Problem], path: str | Path, overrides: Sequence[str]) -> ConfigError:
    """Every problem with its override, else with its line in the file."""
    toml, lines, places = _read_text(path), list[str](), set[str]()
    for problem in map(str, problems):
        line, in_file = _name_override(problem, overrides), _add_line(problem, toml)
        if line is None and in_file == problem:  # no such table in the file: one of an override
            line = _name_override(problem, overrides, around=True)
        if line is None:
            lines.append(in_file)
            places.add(str(path))
        else:
            lines.append(line)
            places.add("the command line")
    shown = {str(path): f"{path}{_describe_writer(path)}", "the command line": "the command line"}
    return ConfigError(lines, " and ".join(text for place, text in shown.items() if place in places))


def _describe_writer(path: str | Path) -> str:
    """Of the resolved configuration of a run which other version wrote it; keys of that one may be gone."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    version = ""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        version = json.loads((folder / "run.json").read_text(encoding="utf-8"))["versions"]["cosmos-rl"]
    if version in ("", __version__):
        return ""
    return f" (written by cosmos-rl {version}; this is {__version__}: take out keys that are gone)"


def config_from_tables(tree: Mapping[str, object], source: str) -> Config:
    """The configuration of tables as a TOML file would hold them; `source` names them in messages.

    Raises:
        ConfigError: names every problem.
    """
    config, problems = _check(tree, [], lambda config: config, lambda config: ())
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


def _check(
    tree: Mapping[str, object],
    known: Sequence[Problem],
    fit: Callable[[Config], Config],
    rules: Callable[[Config], Iterable[str]],
) -> tuple[Config | None, list[Problem]]:
    """The configuration, and all that is wrong with its values and between them, except what is `known`."""
    config, problems = validate(Config, tree)
    if config is None:
        return None, problems
    try:
        config = fit(config)
    except UserError as error:
        problems.append(Problem("", str(error)))
    # A rule that involves a rejected value would complain about the default in its place.
    wrong = [problem.key for problem in [*known, *problems]]
    problems += [Problem("", line) for line in cross_check(config) if not _mentions(line, wrong)]
    if not any(re.search(r"_reward\b", key) for key in wrong):
        problems += [Problem("", line) for line in rules(config)]
    return config, problems


def read_toml(path: str | Path) -> dict[str, object]:
    """The content of a TOML file; `UserError` names file and line of an error."""
    try:
        return tomllib.loads(_read_text(path))
    except FileNotFoundError:
        if Path(path).is_dir():
            raise UserError(
                f"{path}: this folder has no config.toml; give a TOML file or the folder of a run"
            ) from None
        raise UserError(f"{path}: no such file; give the TOML file of the run with --config") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {explain_decoding(error)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def dump_toml(config: Config) -> str:
    """The whole configuration as TOML; keys without a value are left out, and those that mean something else then."""
    tables = config.model_dump(exclude_none=True)
    if "max_prompt_length" not in config.policy.diffusers.model_fields_set:
        del tables["policy"]["diffusers"]["max_prompt_length"]
    return tomli_w.dumps(tables)


def _mentions(line: str, keys: Sequence[str]) -> bool:
    return any(re.search(rf"\b{re.escape(key)}\b", line) for key in keys if key)


def _read_text(path: str | Path) -> str:
    path = Path(path)
    if path.is_dir():
        path = path / "config.toml"
    return read_text(path)


def _name_override(problem: str, overrides: Sequence[str], *, around: bool = False) -> str | None:
    """The problem with the override that it is about, or with the one within the table that it is about; None: none."""
    key = problem.partition(":")[0]
    if key.lstrip("-") in overrides and "=" not in key:  # no override at all
        return problem
    for override in reversed(overrides):
        name = override.partition("=")[0]
        if key == name or key.startswith(f"{name}.") or (around and name.startswith(f"{key}.")):
            if len(override) >= 80:
                override = name
            return f"{problem} (from --{override})"
    return None


def _add_line(problem: str, toml: str) -> str:
    """The problem with the line of the file that it is about, where there is one."""
    key = problem.partition(":")[0]
    table, items = "", Counter[str]()
    for number, line in enumerate(toml.splitlines(), 1):
        header = re.match(r"\s*\[+([^\]]+)\]", line)
        assignment = re.match(r"\s*([\w.\-\"' ]+?)\s*=", line)
        if header:
            table = name = re.sub(r"[\s\"']", "", header[1])
            if line.lstrip().startswith("[["):
                items[name] += 1
                table = name = f"{name}.{items[name] - 1}"
        elif assignment:
            name = ".".join(filter(None, [table, re.sub(r"[\s\"']", "", assignment[1])]))
        else:
            continue
        if name == key or name.startswith(f"{key}."):
            return f"{problem} (line {number})"
    return problem


def _apply(tree: dict[str, object], override: str) -> Problem | None:
    """Sets one override in `tree`; returns what is wrong with it."""
    key, equals, text = override.lstrip("-").partition("=")
    names = key.split(".")
    if not equals or not all(names):
        right = key
        if find_field(Config, names) is None:
            right = suggestion(Config, key) or "table.key"
        return Problem("", f"{override}: not an override; write --{right}=VALUE")
    node: object = tree
    for depth, name in enumerate(names[:-1]):
        if isinstance(node, dict):
            node = node.setdefault(name, {})
        elif _has_item(node, name):
            node = node[int(name)]
        else:
            return _no_place(names[:depth], name, node)
    leaf = names[-1]
    if isinstance(node, dict):
        node.pop(leaf, None)
        if text != "none":
            node[leaf] = _value(names, text)
    elif not _has_item(node, leaf):
        return _no_place(names[:-1], leaf, node)
    elif text == "none":
        del node[int(leaf)]
    else:
        node[int(leaf)] = _value(names, text)
    return None


def _has_item(node: object, name: str) -> TypeGuard[list[object]]:
    return isinstance(node, list) and name.isdecimal() and int(name) < len(node)


def _no_place(table: Sequence[str], name: str, node: object) -> Problem:
    key = ".".join(table)
    if isinstance(node, list):
        return Problem(key, f"has no item {name}; it holds {len(node)} items, counted from 0")
    return Problem(key, f"found {format_value(node)}, which has no keys, so {key}.{name} cannot be set")


def _value(names: Sequence[str], text: str) -> object:
    """The value of an override: a TOML literal, else a Python number or truth value, else the text itself."""
    field = find_field(Config, names)
    text_only = field is not None and is_text_only(field.annotation)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        value = _loose_number(text)
    if text_only and not isinstance(value, str):
        return text
    return value


def _loose_number(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
