"""Every key that is documented as having an effect is read somewhere."""

import ast
from pathlib import Path

import cosmos_rl
from cosmos_rl.policy.config.base import Support
from cosmos_rl.policy.config.document import sections

ROOT = Path(cosmos_rl.__file__).parent


def read_names() -> set[str]:
    """Attributes that any file reads, and words with which attributes are read by name outside the schema."""
    found: set[str] = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "config" not in path.parts:
                found.add(node.value)
    return found


def test_every_key_that_works_is_read() -> None:
    read = read_names()
    entries = [(section.heading, entry) for section in sections() for entry in section.entries]
    unread = [f"{at} {e.name}" for at, e in entries if e.kind in (Support.WORKS, Support.RL) and e.name not in read]
    assert unread == []
