"""The live page in a browser: it shows new steps of several runs without being loaded again."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl.tracking.metrics import MetricsFile
from tests.support.browser import browse
from tests.support.documents import blocks
from tests.support.made_up_run import PROMPTS, write_nft_run
from tests.support.paths import ROOT
from tests.support.patience import HANG_S, wait_until

pytestmark = [pytest.mark.zoo, pytest.mark.timeout(HANG_S)]

LOOK = """(() => {
    const chart = document.querySelector('#section0 svg');
    const colours = name => [...chart.querySelectorAll(name)].map(one => getComputedStyle(one).stroke);
    return {
        steps: [...document.querySelectorAll('.run .steps b')].map(one => one.textContent),
        states: [...document.querySelectorAll('.run .state')].map(one => one.innerText),
        curves: colours('polyline.curve:not(.d1)'),
        ends: [...chart.querySelectorAll('text.last')].map(one => one.textContent),
        images: [...document.images].map(one => [one.complete, one.naturalWidth]),
        galleries: [...document.querySelectorAll('#galleries h3')].map(one => one.innerText.split(',')[0]),
        wide: document.documentElement.scrollWidth > innerWidth,
        away: !document.getElementById('away').hidden,
        kept: window.kept === true,
    };
})()"""
IS_DRAWN = "document.querySelectorAll('#section0 svg').length > 0 && [...document.images].every(one => one.complete)"


def test_a_page_that_is_open_shows_the_new_step_and_both_runs(tmp_path: Path, program: str) -> None:
    _, documented = blocks(ROOT / "docs/watching.md", "bash")
    arguments = shlex.split(documented.replace("--port 9000", "--port 0"))[1:]
    outputs = [tmp_path / place for place in arguments if place.startswith("outputs/")]
    runs = [
        write_nft_run(output / "20260101000000", steps, 60, prompts=PROMPTS[:2])
        for output, steps in zip(outputs, (30, 20), strict=True)
    ]
    for run in runs:
        (run / "checkpoints").mkdir()  # made when training begins
    command = [sys.executable, "-m", "cosmos_rl.launcher.cli", *arguments]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        with browse(program, tmp_path / "profile") as page:
            page.open(url)
            wait_until(lambda: page.evaluate(IS_DRAWN), "the first charts")
            page.evaluate("window.kept = true")  # gone where the page is loaded again
            before: dict[str, Any] = page.evaluate(LOOK)
            assert before["steps"] == ["30", "20"]
            assert before["states"] == ["running", "running"]
            assert len(set(before["curves"])) == 2  # one colour for each run
            assert before["images"]
            assert all(width > 0 for _, width in before["images"])
            assert not before["wide"]
            MetricsFile(runs[1] / "metrics.jsonl").log(21, {"reward/mean": 0.9375, "time/iteration": 3.0})
            shutil.copytree(runs[1] / "media/validation/step_20", runs[1] / "media/validation/step_21")
            wait_until(lambda: page.evaluate(LOOK)["steps"] == ["30", "21"], "the new step")
            after: dict[str, Any] = page.evaluate(LOOK)
            assert "0.9375" in after["ends"]
            assert "0.9375" not in before["ends"]
            assert before["galleries"][0] == "Step 30"
            assert "Step 21" not in before["galleries"]
            assert "Step 21" in after["galleries"]
            assert after["kept"]
            assert not after["away"]
            server.terminate()
            wait_until(lambda: page.evaluate(LOOK)["away"], "the page saying that nobody answers")
    finally:
        server.kill()
        server.wait()
