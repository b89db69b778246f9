"""The one table of what a pipeline itself does not show. Most families need no row; docs/models.md says more."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """Data of one pipeline class; every default is right for most.

    Attributes:
        guidance: argument that is real classifier-free guidance; None: ``true_cfg_scale``, else ``guidance_scale``.
        frames: argument with the number of frames; None: ``num_frames``, else ``frames``, else images.
        negative: negative prompt where none is given; None leaves the pipeline its own default.
        call: arguments that every call of the pipeline gets.
        one_frame: a single step may be asked for with one frame, since the number only serves to prepare latents.
        absent: components that are left out when the pipeline is loaded.
        fps: frames per second of its videos, as its documentation saves them.
    """

    guidance: str | None = None
    frames: str | None = None
    negative: str | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    one_frame: bool = False
    absent: tuple[str, ...] = ()
    fps: float = 16.0


# would replace the size that is asked for by one of a list
_NO_BINNING = {"use_resolution_binning": False}

ROWS: Mapping[str, Row] = {
    "SanaPipeline": Row(call=_NO_BINNING),
    "SanaVideoPipeline": Row(call=_NO_BINNING),
    "PRXPipeline": Row(call=_NO_BINNING),
    "QwenImagePipeline": Row(negative=" "),  # guidance is only switched on by a negative prompt; its own example is " "
    "LTXPipeline": Row(fps=24.0),
    "HunyuanVideoPipeline": Row(fps=15.0),
    "MochiPipeline": Row(fps=30.0),
    "Cosmos2TextToImagePipeline": Row(absent=("safety_checker",)),
    # makes a black video of the full size in each call, a gigabyte a row at the usual one, and does not look at it
    "Cosmos2_5_PredictBasePipeline": Row(one_frame=True, absent=("safety_checker",)),
}


def find_row(pipeline_class: str) -> Row:
    """The row of a pipeline class; one of defaults for a class without a row."""
    return ROWS.get(pipeline_class, Row())
