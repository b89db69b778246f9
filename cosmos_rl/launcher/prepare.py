"""Before the first worker starts: the checks, the run folder, and the record of how the run was started."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.prompt_lists import record_prompts
from cosmos_rl.launcher.resume import ResumePlan, plan_resume
from cosmos_rl.launcher.shared_data import shared_notes
from cosmos_rl.policy.config import Config, dump_toml
from cosmos_rl.storage.atomic import write_text
from cosmos_rl.storage.disk import find_missing_abilities, report_full_disk
from cosmos_rl.storage.run_folder import RunFolder, check_links, claim_run, find_free_timestamp, lock_run
from cosmos_rl.utils.logging import logger

_PACKAGES = ("cosmos-rl", "torch", "torchvision", "diffusers", "transformers", "peft", "safetensors", "pydantic")


@contextlib.contextmanager
def prepare_run(config: Config, argv: Sequence[str], *, own_data: bool) -> Iterator[RunFolder]:
    """Decide, make and describe the run folder; within the block it is this command's.

    The description waits in `.next` until training begins. A new folder in which nothing began is removed again.

    Args:
        config: of the run.
        argv: the command.
        own_data: the caller brings the data, whatever the configuration names.
    """
    plan = plan_resume(config)
    if plan.run is not None:
        check_links(plan.run.root.parent, plan.run)
    run = plan.run or claim_run(Path(config.train.output_dir), config.train.timestamp)
    with report_full_disk(run.root), _try_disk(run), lock_run(run):
        if plan.message:
            starts_anew = config.train.resume is True and plan.step_path is None
            (logger.warning if starts_anew else logger.info)(plan.message)
        for note in [] if own_data else shared_notes(config):
            logger.info(note)
        write_text(run.next / run.config.name, dump_toml(config))
        write_text(run.next / run.run_json.name, json.dumps(_record(config, run, plan, argv), indent=2) + "\n")
        logger.info("run folder: %s", run.root)
        try:
            yield run
        finally:
            shutil.rmtree(run.next if run.has_begun else run.root, ignore_errors=True)


@contextlib.contextmanager
def _try_disk(run: RunFolder) -> Iterator[None]:
    """One warning for all that the disk lacks; what no run can do without ends the command here."""
    try:
        lacks = find_missing_abilities(run.root)
    except UserError:
        with contextlib.suppress(OSError):  # a new folder must not stay
            run.root.rmdir()
        raise
    if lacks:
        logger.warning("%s: this disk has %s", run.root.parent, "; ".join(lacks))
    yield


def _record(config: Config, run: RunFolder, plan: ResumePlan, argv: Sequence[str]) -> dict[str, object]:
    started = {
        "argv": list(argv),
        "cwd": os.getcwd(),
        "started": find_free_timestamp(run.root.parent).isoformat(),
        "seed": config.train.seed,
        "prompts": record_prompts(config),
        "resumed_from": str(plan.step_path) if plan.step_path else None,
        "git_commit": _git_commit(),
        "host": platform.node(),
        "versions": {"python": platform.python_version(), **_versions()},
    }
    return {**started, "earlier": _earlier(run.run_json)}


def _earlier(run_json: Path) -> list[object]:
    """The records of the commands that worked on this run before, oldest first."""
    try:
        record = json.loads(run_json.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(record, dict):
        return []
    return [*record.pop("earlier", []), record]


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
