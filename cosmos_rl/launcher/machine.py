"""What this machine has, found without torch: GPUs, memory, disk, tokens."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cosmos_rl.storage.disk import find_existing_folder


def gpus() -> int:
    """GPUs that a worker would see."""
    present = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])


def gpu_lines() -> list[str]:
    """One line for each GPU: name and memory from nvidia-smi, else the device file."""
    found = _query(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    if found:
        return found
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    return [f"{device} (nvidia-smi does not answer)" for device in devices]


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU; None when nvidia-smi does not say."""
    found = _query(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
    sizes = [int(line) for line in found if line.strip().isdecimal()]
    smallest = min(sizes, default=None)
    return smallest and smallest * 2**20


def host_memory() -> int | None:
    """Bytes of memory that are free for new processes, within the limit of a container."""
    free = _number_after("/proc/meminfo", "MemAvailable:")
    limit, used = _whole_file("/sys/fs/cgroup/memory.max"), _whole_file("/sys/fs/cgroup/memory.current")
    sizes = list[int]()
    if free is not None:
        sizes.append(free * 1024)
    if limit is not None and used is not None:
        sizes.append(max(limit - used, 0))
    return min(sizes, default=None)


def free_disk(path: Path) -> int:
    """Free bytes on the disk that holds `path` or will hold it."""
    return shutil.disk_usage(find_existing_folder(path)).free


def format_bytes(size: float) -> str:
    """`1.5 GB`; decimal units, as disks and drivers count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_count(number: int, noun: str, plural: str = "") -> str:
    """`1 step`, `2 steps`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {plural or noun + 's'}"


def _query(command: Sequence[str]) -> list[str]:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _number_after(path: str, word: str) -> int | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(word)), None)


def _whole_file(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
