"""What libraries say again and again is not in the log, and what they say once is."""

import logging
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
