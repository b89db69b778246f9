"""How long the command takes to say what it can do, and whether torch was loaded for it."""

import subprocess
import sys
import time

CODE = """
import sys
from cosmos_rl.launcher.cli import main
code = main(["--help"])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    times, torch_loaded = [], "?"
    for _ in range(5):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, encoding="utf-8", errors="replace"
        )
        times.append(time.perf_counter() - began)
        torch_loaded = done.stderr.strip()
    return [("cosmos-rl --help, wall", f"{min(times):.2f} s, torch loaded: {torch_loaded}", "<= 0.5 s, False")]
