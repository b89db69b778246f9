"""The form of the code: short functions and files, few levels of nesting, no conditional expression in another."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

PACKAGES = ("cosmos_rl", "reward_service/cosmos_rl_reward")
FUNCTION_LINES, FILE_LINES, DEPTH = 60, 500, 4
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def parsed(package: str) -> Iterator[tuple[str, str, ast.Module]]:
    """(name, text, tree) of each file."""
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield str(path.relative_to(ROOT)), text, ast.parse(text)


def depth(node: ast.AST, level: int = 0) -> int:
    """How deep the blocks of a function are nested; ``elif`` is no deeper than its ``if``."""
    deepest = level
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                continue
            is_elif = isinstance(node, ast.If) and name == "orelse" and value == [child] and isinstance(child, ast.If)
            deepest = max(deepest, depth(child, level + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_and_files_are_short_and_flat(package: str) -> None:
    problems = []
    for name, text, tree in parsed(package):
        if text.count("\n") > FILE_LINES:
            problems.append(f"{name}: {text.count(chr(10))} lines")
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    problems.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
                if depth(node) > DEPTH:
                    problems.append(f"{name}:{node.lineno} {node.name}: nested {depth(node)} deep")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_conditional_expression_holds_another_one(package: str) -> None:
    chained = [
        f"{name}:{node.lineno}"
        for name, _, tree in parsed(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse))
    ]
    assert not chained, chained
