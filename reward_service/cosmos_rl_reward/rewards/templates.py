"""Texts of questions, from files of the user's or of a published model."""

from __future__ import annotations

import ast
from pathlib import Path

from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.text_files import read_text


def read_template(path: Path) -> str:
    """The text of a file, its lines ended by ``\\n``.

    Raises:
        NotReady: the file is missing, or in another encoding than UTF-8.
    """
    if not path.is_file():
        raise NotReady(f"no file {path}")
    try:
        return read_text(path)
    except UserError as error:
        raise NotReady(str(error)) from error


def read_constants(path: Path, *names: str) -> list[str]:
    """Text constants of a Python file, without running it; an f-string keeps its names as ``{name}``.

    Raises:
        NotReady: as ``read_template``; or it is not Python, or has no such constant.
    """
    text, found = read_template(path), dict[str, str]()
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        raise NotReady(f"{path}, line {error.lineno}: not Python: {error.msg}") from error
    for node in statements:
        if isinstance(node, ast.Assign) and (value := _text(node.value)) is not None:
            found.update({target.id: value for target in node.targets if isinstance(target, ast.Name)})
    for name in names:
        if name not in found:
            raise NotReady(f"{path} has no text constant {name}; it is of another version")
    return [found[name] for name in names]


def _text(node: ast.expr) -> str | None:
    """The text that an expression is; None when it is something else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.FormattedValue):
        return f"{{{node.value.id}}}" if isinstance(node.value, ast.Name) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = [_text(part) for part in node.values]
    return None if None in parts else "".join(part for part in parts if part is not None)
