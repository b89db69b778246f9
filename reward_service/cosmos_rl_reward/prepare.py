"""``cosmos-rl-reward-prepare``: environments and weights of the enabled rewards, with a report that can be trusted."""

import asyncio
import contextlib
import functools
import importlib.metadata
import os
import sys
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from cosmos_rl_reward.config import RewardArgs, ServiceConfig
from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.rewards.weights import write_atomically
from cosmos_rl_reward.worker.host import make_decode_spec, make_reward_spec
from cosmos_rl_reward.worker.replica import Failed, Replica, find_interpreter
from cosmos_rl_reward.worker.spec import PoolSpec

_ALWAYS = ("numpy", "pillow")  # what every reward's environment needs
# read as text only: its own pins are for training and do not fit the environment
_WITHOUT_DEPENDENCIES = {"hpsv3": ["hpsv3==1.0.0"]}
_SCRIPT_S = 3 * 3600.0


@dataclass(frozen=True)
class _Tools:
    """Where packages come from: nothing from the network if ``offline``, a folder of wheels, one of lock files."""

    offline: bool
    wheels: Path | None
    locks: Path | None
    say: Callable[[str], None]
    """Shows what is being done."""


def list_requirements(reward: str) -> list[str]:
    """What pip installs for a reward: the extra of that name, and what every worker needs."""
    found: list[str] = [*_ALWAYS]
    for line in importlib.metadata.requires("cosmos_rl_reward") or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": ""}) and marker.evaluate({"extra": reward}):
            requirement.marker = None
            found.append(str(requirement))
    return found


async def prepare(
    config: ServiceConfig, only: list[str], check: bool, offline: bool, wheels: Path | None, locks: Path | None
) -> int:
    """Prepare (or only check) the enabled rewards; prints one line for each. Returns 1 when one of them failed.

    Raises:
        UserError: a name in ``only`` is not an enabled reward.
    """
    chosen = [args for args in config.enabled if not only or args.reward_type in only]
    if missing := [name for name in only if name not in {args.reward_type for args in chosen}]:
        raise UserError(f"--reward {missing[0]}: not an enabled reward of the configuration")
    jobs = [(args.reward_type, args, make_reward_spec(args, config.max_attempts)) for args in chosen]
    failed, wants_decoder = 0, False
    with _show_progress() as show:
        for number, (name, args, spec) in enumerate(jobs, 1):
            tools = _Tools(offline, wheels, locks, functools.partial(show, f"[{number}/{len(jobs)}] {name}:"))
            try:
                if check:
                    tools.say("starting")
                    note = await _start(spec)
                else:
                    note = await _fetch(args, spec, tools)
                print(f"{name}: ok{_format_note(note)}", flush=True)
                if note.get("needs_latent_decoder") and not wants_decoder and not config.no_latent_decoder:
                    wants_decoder = True
                    fields = {"reward_type": "latent", "venv_python": config.decode_args.venv_python}
                    latent = RewardArgs.model_validate(fields)
                    jobs.append(("latent decoder", latent, make_decode_spec(config)))
            except (Failed, UserError) as error:
                failed += 1
                print(f"{name}: failed: {error}", flush=True)
    return int(failed > 0)


@contextlib.contextmanager
def _show_progress() -> Iterator[Callable[[str, str], None]]:
    """What is being prepared, what of it and for how long: a line under the others on a terminal, nothing elsewhere."""
    from rich.markup import escape  # the service needs none of it
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    off = not sys.stdout.isatty() or os.environ.get("COSMOS_PROGRESS") == "0"
    with Progress(*columns, transient=True, disable=off) as progress:
        task = progress.add_task("")

        def show(what: str, step: str) -> None:
            progress.reset(task, description=escape(f"{what} {step}"))

        yield show


def _format_note(note: dict[str, object]) -> str:
    if texts := [str(note[key]) for key in ("warning", "fetched") if note.get(key)]:
        return f" ({'; '.join(texts)})"
    return ""


async def _fetch(args: RewardArgs, spec: PoolSpec, tools: _Tools) -> dict[str, Any]:
    """Make the environment, and have the worker download what it needs."""
    await _install(args, tools)
    tools.say("looking for its weights" if tools.offline else "downloading what it needs")
    op = {"score": "fetch", "decode": "fetch decoder"}[spec.message["op"]]
    return await _start(spec, {"op": op, "offline": tools.offline}, downloads=not tools.offline)


async def _start(spec: PoolSpec, more: dict[str, Any] | None = None, downloads: bool = False) -> dict[str, Any]:
    """Start the worker as the service would, and end it."""
    replica = Replica(spec.name, spec.workers.venv_python, spec.workers.environment, downloads)
    try:
        return await replica.start({**spec.message, **(more or {})}, spec.workers.start_timeout_s)
    finally:
        await replica.kill()


async def _install(args: RewardArgs, tools: _Tools) -> None:
    """Make the environment and install into it: by the reward's script, by a lock file, or by the package's extra."""
    python = find_interpreter(args.venv_python)
    folder = Path(python).parents[1]
    if not Path(python).exists() or (args.setup_script and await _half_made(python)):
        tools.say(f"making the environment {folder}")
        venv.EnvBuilder(with_pip=bool(args.setup_script)).create(folder)
        if not Path(python).exists():
            raise UserError(f"venv_python = {args.venv_python!r}: not the interpreter of the environment {folder}")
    if args.setup_script:
        tools.say(f"running {args.setup_script}")
        await _run(["bash", args.setup_script, args.download_path, str(folder)], "setup_script")
        return
    tools.say("installing packages")
    await _install_packages(args.reward_type, python, tools)


async def _install_packages(reward: str, python: str, tools: _Tools) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", "--quiet"]
    if tools.offline:
        install.append("--no-index")
    if tools.wheels is not None:
        install += ["--find-links", str(tools.wheels)]
    lock = None
    if tools.locks is not None:
        lock = tools.locks / f"{reward}.txt"
        if lock.exists():  # it names everything, and pip would reject what is installed without its dependencies
            await _run([*install, "--no-deps", "-r", str(lock)], "pip")
            return
    await _run([*install, *list_requirements(reward)], "pip")
    if bare := _WITHOUT_DEPENDENCIES.get(reward):
        await _run([*install, "--no-deps", *bare], "pip")
    if lock is not None:
        lock.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(lock, (await _run([*pip, "freeze", "--exclude-editable"], "pip freeze")).encode())


async def _half_made(python: str) -> bool:
    """Whether this is an environment that was left without pip, as by a kill while it was made."""
    if not (Path(python).parents[1] / "pyvenv.cfg").is_file() or Path(python) == Path(sys.executable):
        return False
    try:
        await _run([python, "-m", "pip", "--version"], "pip")
    except UserError:
        return True
    return False


async def _run(command: list[str], what: str) -> str:
    """Run a command without a shell; returns its output.

    Raises:
        UserError: it failed; with its last lines.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(_SCRIPT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise UserError(f"{what} did not end within {_SCRIPT_S / 3600:g} h") from None
    text = output.decode(errors="replace")
    if process.returncode:
        raise UserError(f"{what} ended with code {process.returncode}: {' | '.join(text.strip().splitlines()[-4:])}")
    return text
