"""``cosmos-rl-reward-prepare``: environments and weights of the enabled rewards, with a report that can be trusted."""

import asyncio
import importlib.metadata
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement

from cosmos_rl_reward.config import RewardArgs, ServiceConfig
from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.worker.host import decode_spec, reward_spec
from cosmos_rl_reward.worker.pool import PoolSpec
from cosmos_rl_reward.worker.replica import Failed, Replica

_ALWAYS = ("numpy", "pillow")  # what every reward's environment needs
# read as text only: its own pins are for training and do not fit the environment
_WITHOUT_DEPENDENCIES = {"hpsv3": ["hpsv3==1.0.0"]}
_SCRIPT_S = 3 * 3600.0


def requirements(reward: str) -> list[str]:
    """What pip installs for a reward: the extra of that name, and what every worker needs."""
    found = list(_ALWAYS)
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
    failed, wants_decoder = 0, False
    for args in chosen:
        spec = reward_spec(args, config.max_attempts)
        try:
            if not check:
                await _install(args, offline, wheels, locks)
                note = await _start(spec, {**spec.message, "op": "fetch", "offline": offline})
            else:
                note = await _start(spec, spec.message)
            wants_decoder |= note.pop("needs_latent_decoder", False)
            print(f"{args.reward_type}: ok{_words(note)}", flush=True)
        except (Failed, UserError) as error:
            failed += 1
            print(f"{args.reward_type}: failed: {error}", flush=True)
    if check and wants_decoder and not config.no_latent_decoder:
        spec = decode_spec(config)
        try:
            await _start(spec, spec.message)
            print("latent decoder: ok", flush=True)
        except Failed as error:
            failed += 1
            print(f"latent decoder: failed: {error}", flush=True)
    return int(failed > 0)


def _words(note: dict[str, object]) -> str:
    words = [str(note[key]) for key in ("warning", "fetched") if note.get(key)]
    return f" ({'; '.join(words)})" if words else ""


async def _start(spec: PoolSpec, message: dict[str, object]) -> dict[str, object]:
    """Start the worker as the service would, and end it."""
    replica = Replica(spec.name, spec.venv_python, spec.environment)
    try:
        return await replica.start(message, spec.start_timeout_s)
    finally:
        await replica.kill()


async def _install(args: RewardArgs, offline: bool, wheels: Path | None, locks: Path | None) -> None:
    """Make the environment and install into it: by the reward's script, by a lock file, or by the package's extra."""
    python = sys.executable if args.venv_python == "python" else str(Path(args.venv_python).expanduser())
    folder = Path(python).parents[1]
    if not Path(python).exists():
        venv.EnvBuilder(with_pip=bool(args.setup_script)).create(folder)
        if not Path(python).exists():
            raise UserError(f"venv_python = {args.venv_python!r}: not the interpreter of the environment {folder}")
    if args.setup_script:
        await _run(["bash", args.setup_script, args.download_path, str(folder)], "setup_script")
        return
    lock = locks / f"{args.reward_type}.txt" if locks is not None else None
    locked = lock is not None and lock.exists()
    # a lock names everything, and pip would find what is installed without dependencies at odds with it
    what = ["--no-deps", "-r", str(lock)] if locked else requirements(args.reward_type)
    source = ["--no-index"] if offline else []
    source += ["--find-links", str(wheels)] if wheels is not None else []
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--no-input"]
    await _run([*pip, "install", "--quiet", *source, *what], "pip")
    if bare := [] if locked else _WITHOUT_DEPENDENCIES.get(args.reward_type, []):
        await _run([*pip, "install", "--quiet", "--no-deps", *source, *bare], "pip")
    if lock is not None and not locked:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.write_text(await _run([*pip, "freeze", "--exclude-editable"], "pip freeze"), encoding="utf-8")


async def _run(command: list[str], what: str) -> str:
    """Run a command without a shell; returns its output.

    Raises:
        UserError: it failed; with its last lines.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _SCRIPT_S)
    except TimeoutError:
        process.kill()
        raise UserError(f"{what} did not end within {_SCRIPT_S / 3600:g} h") from None
    text = output.decode(errors="replace")
    if process.returncode:
        raise UserError(f"{what} ended with code {process.returncode}: {' | '.join(text.strip().splitlines()[-4:])}")
    return text
