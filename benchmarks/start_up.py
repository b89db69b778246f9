"""CPU time of the command until it has said what it can do, against an import of what every such command needs."""

import resource
import statistics
import subprocess
import sys

HELP = "from cosmos_rl.launcher.cli import main; main(['--help'])"
IMPORTS = "import argparse, pydantic"
ROUNDS = 7


def cpu_seconds(code: str) -> float:
    """CPU time of a Python process that runs ``code``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    ratios, seconds = [], []
    for _ in range(ROUNDS):
        seconds.append(cpu_seconds(HELP))
        ratios.append(seconds[-1] / cpu_seconds(IMPORTS))
    result = f"{statistics.median(ratios):.2f} ({statistics.median(seconds):.2f} s)"
    return [("cosmos-rl --help, against importing argparse and pydantic", result, "<= 3")]
