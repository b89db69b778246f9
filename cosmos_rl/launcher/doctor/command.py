"""`cosmos-rl doctor`: what is installed and found, each red line with how to fix it; with a configuration, whether its
model loads, adapts, trains and exports as promised."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cosmos_rl.launcher import machine
from cosmos_rl.launcher.arguments import split_overrides
from cosmos_rl.launcher.doctor.finding import FAIL, INFO, OK, WARN, Finding, choose_mark
from cosmos_rl.launcher.flags import FlagParser
from cosmos_rl.launcher.machine import format_bytes

_NEEDED = ("torch", "torchvision", "diffusers", "transformers", "accelerate", "peft", "safetensors", "huggingface_hub")
_LEAST_PYTHON = (3, 11)
_LOW_DISK, _NO_DISK = 10e9, 1e9


def doctor(argv: Sequence[str]) -> int:
    """Look at the installation, and with --config at whether the model that it names really trains."""
    parser = FlagParser(
        prog="cosmos-rl doctor",
        usage="cosmos-rl doctor [--config X.toml] [--table.key=value ...]",
        description=doctor.__doc__,
    )
    parser.add_argument("--config", metavar="X.toml", help="load its model, take one batch, export, compare (one rank)")
    overrides, rest = split_overrides(argv)
    given = parser.parse_args(rest)
    if overrides and given.config is None:
        parser.error(f"{overrides[0]} changes a configuration; name it with --config")
    failed = _print_findings(installation())
    if given.config is not None:
        from cosmos_rl.launcher.doctor.model_checks import examine  # imports torch: seconds

        print()
        failed |= _print_findings(examine(given.config, overrides))
    print("\nsomething is wrong: see the lines marked FAIL" if failed else "\nnothing is wrong")
    return 1 if failed else 0


def installation() -> Iterator[Finding]:
    """What is installed and found on this machine, without importing torch."""
    yield _python()
    yield from map(_package, _NEEDED)
    yield from _devices()
    yield from _extras()
    yield from _tokens()
    yield _disk("disk here", Path.cwd())
    yield _disk("disk of the hub cache", _hub_cache())
    offline = os.environ.get("HF_HUB_OFFLINE")
    yield Finding(INFO, "HF_HUB_OFFLINE", f"{offline}: nothing is downloaded" if _is_on(offline) else "not set")
    memory = machine.host_memory()
    yield Finding(INFO, "memory", f"{format_bytes(memory)} free" if memory else "unknown")
    yield Finding(INFO, "cores", str(machine.cores()))
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding(INFO, "OMP_NUM_THREADS", threads or "not set; the launcher sets cores / ranks")


def _print_findings(findings: Iterator[Finding]) -> bool:
    """Prints lines as they come; whether one of them failed."""
    failed = False
    for finding in findings:
        print(finding, flush=True)
        failed |= finding.mark == FAIL
    return failed


# ---- packages ----------------------------------------------------------------------------------------------------


def _python() -> Finding:
    wanted = ".".join(map(str, _LEAST_PYTHON))
    if sys.version_info >= _LEAST_PYTHON:
        return Finding(OK, "python", platform.python_version())
    return Finding(FAIL, "python", f"{platform.python_version()}; needs >= {wanted}", f"python{wanted} -m venv .venv")


def _package(name: str) -> Finding:
    wanted = _specifiers().get(_normal(name), "")
    fix = f'pip install "{name}{wanted}"'
    version = _installed_version(name)
    if version is None:
        return Finding(FAIL, name, "is not installed", fix)
    if not _fits(version, wanted):
        return Finding(FAIL, name, f"{version}; needs {wanted}", fix)
    return Finding(OK, name, f"{version}{f' (needs {wanted})' if wanted else ''}")


def _specifiers() -> dict[str, str]:
    """Package -> supported versions, as `pyproject.toml` says."""
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in _requirements()]
    return {_normal(r.name): _sort_bounds(str(r.specifier)) for r in requirements if r.marker is None}


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("cosmos-rl") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _fits(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def _sort_bounds(specifier: str) -> str:
    return ",".join(sorted(specifier.split(","), reverse=True))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _extras() -> Iterator[Finding]:
    """Optional packages by the extra that brings them: never an error."""
    from packaging.requirements import Requirement

    wanted: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, _requirements()):
        extra = re.search(r"extra == [\"']([\w.-]+)[\"']", str(requirement.marker or ""))
        if extra and _normal(requirement.name) != "cosmos-rl":
            wanted.setdefault(extra[1], []).append(requirement)
    for extra, requirements in wanted.items():
        versions = {one.name: _installed_version(one.name) for one in requirements}
        missing = [name for name, version in versions.items() if version is None]
        wrong = [f"without {', '.join(missing)}"] if missing else []
        for one in requirements:
            version, specifier = versions[one.name], _sort_bounds(str(one.specifier))
            if version is not None and not _fits(version, specifier):
                wrong.append(f"{one.name} {version}; needs {specifier}")
        fix = f'pip install "cosmos_rl[{extra}]"' if wrong else ""
        yield Finding(INFO, f"optional: {extra}", "; ".join(wrong) or "installed", fix)


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- devices, disk, tokens ---------------------------------------------------------------------------------------


def _devices() -> Iterator[Finding]:
    gpus, build = machine.gpu_lines(), _torch_build()
    for line in gpus:
        yield Finding(OK, "GPU", line)
    if not gpus:
        yield Finding(INFO, "GPU", "none; training runs on the CPU")
    if build is None:
        return
    if gpus and build == "cpu":
        yield Finding(FAIL, "torch build", "for CPUs, but there is a GPU", "pip install --force-reinstall torch")
    else:
        yield Finding(OK, "torch build", build)


def _torch_build() -> str | None:
    """`cuda 12.8`, `rocm 6.4` or `cpu`, from the file that torch's build leaves; None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    for name, kind in (("cuda", "cuda"), ("hip", "rocm")):
        found = re.search(rf"^{name}\b[^=]*= *['\"]([\d.]+)", text, re.MULTILINE)
        if found:
            return f"{kind} {found[1]}"
    return "cpu"


def _disk(subject: str, place: Path) -> Finding:
    free = machine.free_disk(place)
    text = f"{format_bytes(free)} free for {place}"
    if free < _NO_DISK:
        return Finding(FAIL, subject, text, f"make room there, or work elsewhere: df -h {place}")
    return Finding(choose_mark(free >= _LOW_DISK, WARN), subject, text)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _tokens() -> Iterator[Finding]:
    """Whether tokens are there; they are never printed."""
    from huggingface_hub import get_token

    netrc = Path("~/.netrc").expanduser()
    places: dict[str, Callable[[], bool]] = {
        "hub": lambda: bool(get_token()),
        "wandb": lambda: bool(os.environ.get("WANDB_API_KEY")) or _mentions(netrc, "api.wandb.ai"),
        "reward service": lambda: bool(os.environ.get("REMOTE_REWARD_TOKEN")),
    }
    for name, found in places.items():
        yield Finding(INFO, f"token: {name}", "present" if found() else "not set")


def _mentions(path: Path, word: str) -> bool:
    try:
        return word in path.read_text(encoding="utf-8")
    except OSError:
        return False


def _is_on(value: str | None) -> bool:
    return (value or "0").lower() not in ("", "0", "false", "no")
