"""Names and wholeness of checkpoint folders: ``checkpoints/step_<N>/policy/``. No torch, so that a launcher can look.

A step is *whole* when its commit marker, written last, lists every file with the size that it has on disk.
"""

import json
import re
import shutil
from pathlib import Path

from cosmos_rl.errors import UserError

COMMIT_MARKER = "COMMITTED.json"
TRAINER_STATE = "trainer_state.json"
LORA_FILE = "model.safetensors"
"""Of the export of an adapter."""
_STEP = re.compile(r"step_(\d+)")


def step_dir(checkpoints: Path, step: int) -> Path:
    """``<checkpoints>/step_<step>``, the folder that is committed and removed as one."""
    return Path(checkpoints) / f"step_{step}"


def policy_dir(checkpoints: Path, step: int) -> Path:
    """``<checkpoints>/step_<step>/policy``, the folder that holds the state."""
    return step_dir(checkpoints, step) / "policy"


def list_committed_steps(checkpoints: Path) -> list[int]:
    """Step numbers that have a folder, ascending, whole or not. Staging folders are hidden and never listed."""
    checkpoints = Path(checkpoints)
    if not checkpoints.is_dir():
        return []
    found = (_STEP.fullmatch(entry.name) for entry in checkpoints.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in found if match)


def find_defect(policy: Path) -> str | None:
    """None when ``policy`` is a whole checkpoint, else one sentence that says what is missing."""
    marker = Path(policy) / COMMIT_MARKER
    if not marker.is_file():
        return f"{marker} is missing"
    try:
        files: dict[str, int] = json.loads(marker.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError):
        return f"{marker} cannot be read"
    for name, size in files.items():
        path = Path(policy) / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, {size} were written"
    return None


def list_whole_steps(checkpoints: Path) -> list[int]:
    """Step numbers that can be resumed, ascending."""
    return [n for n in list_committed_steps(checkpoints) if find_defect(policy_dir(checkpoints, n)) is None]


def find_broken_steps(checkpoints: Path) -> dict[int, str]:
    """Step number -> what is wrong, for folders that look like a checkpoint and are not whole."""
    reasons = {n: find_defect(policy_dir(checkpoints, n)) for n in list_committed_steps(checkpoints)}
    return {n: why for n, why in reasons.items() if why is not None}


def find_checkpoint(path: Path) -> Path:
    """The whole ``step_<N>/policy`` that ``path`` names: itself, the folder around it, or the newest of a run folder.

    Raises:
        UserError: no whole checkpoint there.
    """
    path = path.expanduser().resolve()
    step = path
    if path.name == "policy":
        step = path.parent
    if _STEP.fullmatch(step.name) and step.is_dir():
        why = find_defect(step / "policy")
        if why is None:
            return step / "policy"
        raise UserError(f"{path} is not a whole checkpoint: {why}")
    checkpoints = path / "checkpoints"
    if not checkpoints.is_dir():
        checkpoints = path
    whole, broken = list_whole_steps(checkpoints), find_broken_steps(checkpoints)
    if whole:
        return policy_dir(checkpoints, whole[-1])
    reasons = "".join(f"\n  {policy_dir(checkpoints, number)}: {why}" for number, why in broken.items())
    found = "does not exist"
    if path.exists():
        found = "holds no whole checkpoint"
        if reasons:
            found += ":"
    raise UserError(
        f"{path} {found}{reasons}\n  give a path such as <output_dir>/<timestamp>/checkpoints/step_<N>/policy"
    )


def build_marker_text(policy: Path) -> str:
    """The commit marker for all files that are now in ``policy``."""
    files = {p.relative_to(policy).as_posix(): p.stat().st_size for p in sorted(policy.rglob("*")) if p.is_file()}
    return json.dumps({"files": files}, indent=1)


def remove_staged(folder: Path) -> None:
    """Remove what interrupted writers left in ``folder`` (hidden ``.step_<N>.tmp`` and ``.step_<N>.old``)."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if re.fullmatch(r"\.step_\d+\.(tmp|old)", entry.name):
            shutil.rmtree(entry)
