"""The one table of what a pipeline itself does not show. Most families need no row; docs/models.md says more."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmos_rl.storage.weight_files import read_table

if TYPE_CHECKING:  # the launcher reads the table without torch
    from cosmos_rl.policy.model.driver.contract import Medium


@dataclass(frozen=True)
class Row:
    """Data of one pipeline class; every default is right for most.

    Attributes:
        guidance: argument that is real classifier-free guidance; None: ``true_cfg_scale``, else ``guidance_scale``;
            empty: it has none that works.
        frames: argument with the number of frames; None: ``num_frames``, else ``frames``, else images.
        negative: negative prompt where none is given; None leaves the pipeline its own default.
        call: arguments that every call of the pipeline gets.
        one_frame: a single step may be asked for with one frame, since the number only serves to prepare latents.
        absent: components that are left out when the pipeline is loaded.
        fps: frames per second of its videos, as its documentation saves them.
        media: one sample's medium -> the arguments of the stock call that condition on it; None: it takes texts only.
        clean_frames: least and most latent frames that media give, 1 for an image that is edited; where the least is
            above 0 the pipeline always needs a medium.
        blank_each: with several prompts the stock call needs a medium for each of them.
        text_sees_media: the text encoder is given the medium too.
        call_at: height and width -> arguments of a call for media of that size.
    """

    guidance: str | None = None
    frames: str | None = None
    negative: str | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    one_frame: bool = False
    absent: tuple[str, ...] = ()
    fps: float = 16.0
    media: Callable[["Medium"], Mapping[str, Any]] | None = None
    clean_frames: tuple[int, int] = (0, 0)
    blank_each: bool = False
    text_sees_media: bool = False
    call_at: Callable[[int, int], Mapping[str, Any]] = lambda _height, _width: {}

    @property
    def guidance_names(self) -> tuple[str, ...]:
        """Arguments of which the first that a call has is its guidance."""
        if self.guidance == "":
            return ()
        return tuple(name for name in (self.guidance, "true_cfg_scale", "guidance_scale") if name)

    @property
    def needs_media(self) -> bool:
        """Whether the pipeline cannot be called without a medium."""
        return self.clean_frames[0] > 0

    def choose_clean_frames(self, wanted: tuple[int, int] | None) -> tuple[int, int]:
        """``policy.diffusers.conditional_frames``, or where it is not set as little as the pipeline can do with."""
        return wanted or (self.clean_frames[0], self.clean_frames[0])


def _to_images(medium: "Medium") -> list[Any]:
    """The frames as the stock examples give them; of the right size already, so that nothing is resized."""
    from PIL import Image

    return [Image.fromarray(frame.numpy()) for frame in medium.frames]


def _first_image(medium: "Medium") -> Mapping[str, Any]:
    return {"image": _to_images(medium)[0]}


def _first_frames(medium: "Medium") -> Mapping[str, Any]:
    return {"video": _to_images(medium), "num_latent_conditional_frames": medium.clean}


def _take_area(height: int, width: int) -> Mapping[str, Any]:
    return {"max_area": height * width}


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
    "Cosmos2_5_PredictBasePipeline": Row(
        one_frame=True, absent=("safety_checker",), media=_first_frames, clean_frames=(0, 2)
    ),
    "WanImageToVideoPipeline": Row(media=_first_image, clean_frames=(1, 1)),
    "SanaImageToVideoPipeline": Row(call=_NO_BINNING, media=_first_image, clean_frames=(1, 1)),
    # does not guide several prompts at once; its embedded guidance is that of its own example
    "HunyuanVideoImageToVideoPipeline": Row(
        guidance="",
        call={"guidance_scale": 6.0},
        fps=15.0,
        media=_first_image,
        clean_frames=(1, 1),
        blank_each=True,
        text_sees_media=True,
    ),
    # would make images of a megapixel whatever size is asked for, of an image of one of its own sizes
    "FluxKontextPipeline": Row(
        call={"_auto_resize": False}, media=_first_image, clean_frames=(1, 1), call_at=_take_area
    ),
    "LTXImageToVideoPipeline": Row(fps=24.0, media=_first_image, clean_frames=(1, 1), blank_each=True),
}


def find_row(pipeline_class: str) -> Row:
    """The row of a pipeline class; one of defaults for a class without a row."""
    return ROWS.get(pipeline_class, Row())


def find_absent(folder: Path) -> tuple[str, ...]:
    """Components that are left out when the pipeline of a folder is loaded; none where it holds no pipeline."""
    index = folder / "model_index.json"
    if not index.is_file():
        return ()
    return find_row(str(read_table(index).get("_class_name"))).absent
