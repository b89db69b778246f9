"""What stands inside a page: images as data URIs, all of them together below a number of bytes, and clean text."""

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from cosmos_rl.tracking.report.record import Entry

MAX_CLIP_BYTES = 1_000_000
"""Of all videos of a page; those beyond it are shown by their first frames."""
MAX_BYTES = 3_500_000
"""Of all data URIs of a page."""
_SMALL = 96
"""Images up to this size in pixels stay as they are and are enlarged by the browser, with hard edges."""
_JPEG_QUALITY = 85


@dataclass(frozen=True, eq=False)
class Placed:
    """An image that the page wants."""

    entry: Entry
    side: int
    """Longest side in pixels."""
    moves: bool = True
    """Whether a video is played, not only its first frame shown."""

    @property
    def clip(self) -> Path | None:
        """The video that is played."""
        if self.moves:
            return self.entry.clip
        return None


class Inliner:
    """Encodes the images of a page once they are all known, so that the page stays below its size."""

    def __init__(self, wanted: Sequence[Placed]) -> None:
        """Encode ``wanted``; sides are halved as often as it takes, one step for all."""
        shrink = 1
        while True:
            self._found = {one: encode_image(one.entry.file, max(one.side // shrink, 16)) for one in wanted}
            if sum(len(uri or "") for uri in self._found.values()) <= MAX_BYTES or shrink >= 16:
                break
            shrink *= 2
        self._clips = _encode_clips([one for one in wanted if one.clip is not None])

    def find_sources(self, placed: Placed) -> tuple[Markup | None, Markup | None]:
        """The image, None when it is not there or no image; the video, where there is one with room for it."""
        return self._found[placed], self._clips.get(placed)


def _encode_clips(wanted: Sequence[Placed]) -> dict[Placed, Markup]:
    """Data URIs of small versions of the videos, in the order of the page, until the room is used up."""
    found: dict[Placed, Markup] = {}
    for one in wanted:
        from cosmos_rl.tracking.clips import shrink_clip  # most runs have no videos

        if one.clip is None or not one.clip.is_file():
            continue
        uri = _to_uri("video/mp4", shrink_clip(one.clip, one.side))
        if sum(map(len, found.values())) + len(uri) > MAX_CLIP_BYTES:
            break
        found[one] = uri
    return found


def encode_image(file: Path, side: int) -> Markup | None:
    """The image as a data URI: small ones as PNG without loss, others as JPEG with a longest side of ``side``."""
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except OSError:
        return None
    target = io.BytesIO()
    if max(image.size) <= min(_SMALL, side):
        image.save(target, "png", optimize=True)
        return _to_uri("image/png", target.getvalue())
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    image.save(target, "jpeg", optimize=True, quality=_JPEG_QUALITY)
    return _to_uri("image/jpeg", target.getvalue())


def _to_uri(kind: str, data: bytes) -> Markup:
    """Marked as safe: it has no character that a page must escape, and is long."""
    return Markup(f"data:{kind};base64,{base64.b64encode(data).decode()}")


def clean(value: Any, limit: int | None = None) -> Any:
    """Text without what no document may hold, cut after ``limit`` characters; other values as they are.

    Control characters and lone surrogates become a replacement mark; the direction marks of other scripts stay, the
    overrides that turn the text around them are removed.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    if limit is not None and len(value) > limit:
        value = value[:limit].rstrip() + "…"
    value = re.sub(r"[\u202a-\u202e\u2066-\u2069]", "", value)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", value)
