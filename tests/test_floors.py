"""Imports only go down: the table of docs/architecture.md, checked on every import of the package."""

import ast
from pathlib import Path

import cosmos_rl

ROOT = Path(cosmos_rl.__file__).parent
FLOORS = {
    "errors": 0,
    "utils": 0,
    "policy.config": 1,
    "storage": 1,
    "diffusion": 0,
    "algorithms": 1,
    "distributed": 2,
    "data": 2,
    "reward": 2,
    "policy.model": 3,
    "optim": 3,
    "checkpoint": 3,
    "tracking": 3,
    "rollout": 4,
    "policy.trainer": 5,
    "launcher": 6,
    "tools": 7,
}


def room_of(module: str) -> str | None:
    """``cosmos_rl.policy.config.load`` -> ``policy.config``; None for the package itself."""
    parts = module.split(".")[1:]
    for length in (2, 1):
        name = ".".join(parts[:length])
        if name in FLOORS:
            return name
    return None


def imports_of(path: Path, source: str) -> set[str]:
    """Absolute names of all modules that a file imports, relative imports resolved, late imports included."""
    module = ["cosmos_rl", *path.relative_to(ROOT).with_suffix("").parts]
    package = module[:-1]  # also for __init__.py, whose last part is "__init__"
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("cosmos_rl")}


def test_imports_go_down_and_never_sideways() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        own = room_of(".".join(["cosmos_rl", *path.relative_to(ROOT).with_suffix("").parts]))
        if own is None:
            continue
        for name in imports_of(path, path.read_text()):
            other = room_of(name)
            if other is not None and other != own and FLOORS[other] >= FLOORS[own]:
                wrong.append(f"{path.relative_to(ROOT)} ({own}) imports {name} ({other})")
    assert wrong == []


def test_every_file_is_in_a_room() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")}
    homeless = {f for f in files if room_of("cosmos_rl." + f.removesuffix(".py").replace("/", ".")) is None}
    assert homeless <= {"__init__.py", "policy/__init__.py"}


def test_relative_imports_are_resolved() -> None:
    source = "from ...launcher import cli\nfrom . import base\nimport cosmos_rl.optim.ema\n"
    names = imports_of(ROOT / "policy" / "config" / "example.py", source)
    assert {"cosmos_rl.launcher.cli", "cosmos_rl.policy.config.base", "cosmos_rl.optim.ema"} <= names


def test_only_the_device_room_names_cuda() -> None:
    """It would tie a room to one device; the sample verb alone has to pick where plain diffusers runs."""
    allowed = {"launcher/verbs.py"}
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if "torch.cuda" in path.read_text() and path.parent.name != "distributed"
    }
    assert found <= allowed
