"""Imports only go down: the table of docs/architecture.md, checked on every import of the package."""

import ast
from pathlib import Path

import cosmos_rl

ROOT = Path(cosmos_rl.__file__).parent
FLOORS = {
    "errors": 0,
    "text_files": 0,
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


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, over any number of others; by repeatedly leaving out those that import none."""
    left = {name: set(targets) for name, targets in graph.items()}
    while ends := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in ends:
            del left[name]
    while starts := [name for name in left if not any(name in left[other] for other in left)]:
        for name in starts:
            del left[name]
    return [[name, *sorted(targets & left.keys())] for name, targets in sorted(left.items())]


def test_no_file_imports_one_that_imports_it() -> None:
    """Over any number of others, late imports included; the face of the package stands outside."""
    paths = {".".join(["cosmos_rl", *p.relative_to(ROOT).with_suffix("").parts]): p for p in ROOT.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items() if name != "cosmos_rl.__init__"}
    graph = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text())
        typed = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
        only_types = {inner for node in typed for inner in ast.walk(node)}
        graph[name] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node in only_types:
                continue
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                graph[name].add(whole if whole in paths else str(node.module))
        graph[name].discard(name)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"], ["c", "b"]]
    assert circles(graph) == []


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
    allowed = {"launcher/commands.py"}
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if "torch.cuda" in path.read_text() and path.parent.name != "distributed"
    }
    assert found <= allowed
