"""What the source of diffusers says about a pipeline class, without importing it. No torch."""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def call_defaults(pipeline_class: str) -> Mapping[str, Any]:
    """Arguments of the class's `__call__` -> their defaults where those are plain values, else None.

    Empty for a class that the installed diffusers does not have.
    """
    for file in _pipelines_folder().glob("*/pipeline_*.py"):
        text = file.read_text(encoding="utf-8")
        if f"class {pipeline_class}(" in text:
            return _read_call(ast.parse(text), pipeline_class)
    return {}


def makes_videos(pipeline_class: str) -> bool | None:
    """Whether the class's call takes a number of frames; None for a class that is not in diffusers."""
    arguments = call_defaults(pipeline_class)
    if not arguments:
        return None
    return "num_frames" in arguments or "frames" in arguments


def in_diffusers(pipeline_class: str) -> bool:
    """Whether the installed diffusers has the class."""
    names = _pipelines_folder() / "__init__.py"
    return names.is_file() and f'"{pipeline_class}"' in names.read_text(encoding="utf-8")


@functools.cache
def _pipelines_folder() -> Path:
    found = importlib.util.find_spec("diffusers")
    if found is None or found.origin is None:
        return Path("no diffusers here")
    return Path(found.origin).parent / "pipelines"


def _read_call(module: ast.Module, pipeline_class: str) -> dict[str, Any]:
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == pipeline_class:
            calls = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__call__"]
            return {name: value for call in calls for name, value in _read_arguments(call.args).items()}
    return {}


def _read_arguments(arguments: ast.arguments) -> dict[str, Any]:
    names = [argument.arg for argument in arguments.args]
    values = [getattr(default, "value", None) for default in arguments.defaults]
    return dict(zip(names, [None] * (len(names) - len(values)) + values, strict=True))
