"""What libraries say again and again is not in the log, and what they say once is."""

import logging
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest

from cosmos_rl.policy.model.quiet import mute_unused_guidance

UNUSED = (
    " negative_prompt is passed but classifier-free guidance is not enabled since true_cfg_scale <= 1",
    "true_cfg_scale is passed as 4, but classifier-free guidance is not enabled since no negative_prompt is provided.",
)


class Pipeline:
    """Its logger is that of its module, as in diffusers."""


def test_guidance_that_training_does_not_use_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(__name__)
    logger.warning(UNUSED[0])
    assert len(caplog.records) == 1
    mute_unused_guidance(Pipeline())
    mute_unused_guidance(Pipeline())
    assert len(logger.filters) == 1
    for text in (*UNUSED, "something else"):
        logger.warning(text)
    assert [record.getMessage() for record in caplog.records[1:]] == ["something else"]


def test_diffusers_still_words_it_so() -> None:
    source = Path(diffusers.__file__).parent / "pipelines/qwenimage/pipeline_qwenimage.py"
    assert source.read_text(encoding="utf-8").count("classifier-free guidance is not enabled") == len(UNUSED)


COMMANDS = """
import sys, torch
from cosmos_rl.launcher.cli import main
model, images = sys.argv[1:]
assert main(["tiny-model", "sd3", "--preset", "unit", "--out", model]) == 0
assert main(["sample", model, "a cat", "--steps", "1", "--size", "32", "32", "--out", images]) == 0
assert "torchao" not in sys.modules
from cosmos_rl.optim.eight_bit import eight_bit_optimizer
from cosmos_rl.policy.model.quantised import pack
eight_bit_optimizer("AdamW8bit"), pack(torch.ones(64, 64), "int8"), pack(torch.ones(64, 64), "nf4")
assert "torchao" in sys.modules
"""


@pytest.mark.zoo
@pytest.mark.process
def test_commands_and_a_quantised_base_print_nothing_of_torchao(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMANDS, str(tmp_path / "model"), str(tmp_path / "images")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "torchao" not in done.stdout + done.stderr
    assert "Enum subclass" not in done.stderr
    assert list((tmp_path / "images").rglob("*.png"))
