"""What the source of diffusers says about a class of its own, without importing it. No torch."""

import ast
import functools
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_RECOMPUTES = "_supports_gradient_checkpointing"


@functools.cache
def call_defaults(pipeline_class: str) -> Mapping[str, Any]:
    """Arguments of the class's `__call__` -> their defaults where those are plain values, else None.

    Empty for a class that the installed diffusers does not have.
    """
    found = _find_class(_diffusers_folder().glob("pipelines/*/pipeline_*.py"), pipeline_class)
    if found is None:
        return {}
    calls = [part for part in found.body if isinstance(part, ast.FunctionDef) and part.name == "__call__"]
    return {name: value for call in calls for name, value in _read_arguments(call.args).items()}


@functools.cache
def supports_recomputing(transformer_class: str) -> bool | None:
    """Whether a transformer supports gradient checkpointing; None for a class that is not among diffusers' own, or that
    leaves it to another class than `ModelMixin`, which does not."""
    found = _find_class(_diffusers_folder().glob("models/transformers/*.py"), transformer_class)
    if found is None:
        return None
    for part in found.body:
        if isinstance(part, ast.Assign) and _RECOMPUTES in map(ast.unparse, part.targets):
            return ast.unparse(part.value) == "True"
    return False if "ModelMixin" in map(ast.unparse, found.bases) else None


def makes_videos(pipeline_class: str) -> bool | None:
    """Whether the class's call takes a number of frames; None for a class that is not in diffusers."""
    arguments = call_defaults(pipeline_class)
    if not arguments:
        return None
    return "num_frames" in arguments or "frames" in arguments


def in_diffusers(pipeline_class: str) -> bool:
    """Whether the installed diffusers has the class."""
    names = _diffusers_folder() / "pipelines" / "__init__.py"
    return names.is_file() and f'"{pipeline_class}"' in names.read_text(encoding="utf-8")


@functools.cache
def _diffusers_folder() -> Path:
    found = importlib.util.find_spec("diffusers")
    if found is None or found.origin is None:
        return Path("no diffusers here")
    return Path(found.origin).parent


def _find_class(files: Iterable[Path], name: str) -> ast.ClassDef | None:
    for file in files:
        text = file.read_text(encoding="utf-8")
        if f"class {name}(" in text:
            classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
            return next((node for node in classes if node.name == name), None)
    return None


def _read_arguments(arguments: ast.arguments) -> dict[str, Any]:
    names = [argument.arg for argument in arguments.args]
    values = [getattr(default, "value", None) for default in arguments.defaults]
    return dict(zip(names, [None] * (len(names) - len(values)) + values, strict=True))
