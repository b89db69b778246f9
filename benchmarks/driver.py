"""CPU time that a driven velocity costs over the bare call of the transformer, the two taken in turn."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.driver.probe import prove
from cosmos_rl.policy.model.tiny import build

ROUNDS = 100


def measure() -> list[tuple[str, str, str]]:
    """One row per kind of call."""
    with tempfile.TemporaryDirectory() as folder:
        path = build("sd3", Path(folder) / "sd3", "unit", seed=0)
        driver = Driver(load_pipeline(str(path)), call={"max_sequence_length": 16})
        started = time.process_time()
        prove(driver)
        probe = time.process_time() - started
        rows = [_overhead(driver, 1.0), _overhead(driver, 4.0)]
        return [*rows, ("driver: all checks on tiny SD3", f"{probe:.1f} s CPU", "<= 10 s")]


def _overhead(driver: Driver, guidance: float) -> tuple[str, str, str]:
    cond = driver.encode(["a", "b"], guidance=guidance)
    x, level = torch.randn(2, 4, 8, 8), driver.training_level(torch.tensor(0.5))
    scalar = (float(level.t), float(level.sigma))
    leaves = driver.first_inputs(x, scalar, cond, guidance, driver.size).leaves
    inputs = {key.split("'")[1]: value for key, value in leaves.items()}
    transformer = driver.denoisers["transformer"]

    def bare() -> None:
        transformer(**inputs)

    def driven() -> None:
        driver.velocity(x, level, cond, guidance)

    with torch.no_grad():
        pairs = [(_seconds(driven), _seconds(bare)) for _ in range(ROUNDS)]
    more = statistics.median(a - b for a, b in pairs)
    return f"driver: velocity over bare call, guidance {guidance:g}", f"{1000 * more:.2f} ms CPU", "<= 2 ms"


def _seconds(call: Callable[[], None]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started
