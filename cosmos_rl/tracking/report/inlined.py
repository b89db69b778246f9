"""Images inside a page: scaled down, as data URIs, all of them together below a number of bytes."""

import base64
import html
import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

MAX_CLIP_BYTES = 1_000_000
"""Of all videos of a page; those beyond it are shown by their first frames."""
MAX_BYTES = 3_500_000
"""Of all data URIs of a page."""
_SMALL = 96
"""Images up to this size in pixels stay as they are and are enlarged by the browser, with hard edges."""
_JPEG_QUALITY = 85


@dataclass(frozen=True)
class Placed:
    """An image that the page wants."""

    file: Path
    side: int
    """Longest side in pixels."""
    clip: Path | None = None
    """The video of which the image is the first frame."""


class Inliner:
    """Encodes the images of a page once they are all known, so that the page stays below its size."""

    def __init__(self, wanted: Sequence[Placed]) -> None:
        """Encode ``wanted``; sides are halved as often as it takes, one step for all."""
        shrink = 1
        while True:
            self._found = {one: encode_image(one.file, max(one.side // shrink, 16)) for one in dict.fromkeys(wanted)}
            if sum(len(self._found[one] or "") for one in wanted) <= MAX_BYTES or shrink >= 16:
                break
            shrink *= 2
        self._clips = _encode_clips([one for one in wanted if one.clip is not None])

    def tag(self, placed: Placed, alt: str) -> str:
        """The ``<img>`` or ``<video>``, or words when the file is not there or no image."""
        uri = self._found[placed]
        if uri is None:
            return '<span class="missing">image missing</span>'
        if placed in self._clips:
            about = f'poster="{uri}" aria-label="{escape(alt, 120)}"'
            return f'<video autoplay loop muted playsinline controls {about} src="{self._clips[placed]}"></video>'
        sharp = ""
        if uri.startswith("data:image/png"):
            sharp = ' class="sharp"'
        return f'<img{sharp} src="{uri}" alt="{escape(alt, 120)}">'


def _encode_clips(wanted: Sequence[Placed]) -> dict[Placed, str]:
    """Data URIs of small versions of the videos, in the order of the page, until the room is used up."""
    found: dict[Placed, str] = {}
    for one in wanted:
        from cosmos_rl.tracking.clips import shrink_clip  # most runs have no videos

        if one in found or one.clip is None or not one.clip.is_file():
            continue
        uri = "data:video/mp4;base64," + base64.b64encode(shrink_clip(one.clip, one.side)).decode()
        if sum(map(len, found.values())) + len(uri) > MAX_CLIP_BYTES:
            break
        found[one] = uri
    return found


def encode_image(file: Path, side: int) -> str | None:
    """The image as a data URI: small ones as PNG without loss, others as JPEG with a longest side of ``side``."""
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except OSError:
        return None
    if max(image.size) <= min(_SMALL, side):
        return _uri(image, "png")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return _uri(image, "jpeg", quality=_JPEG_QUALITY)


def escape(text: object, limit: int | None = None) -> str:
    """Safe in HTML, also in attributes; cut after ``limit`` characters; without what no document may hold.

    Control characters and lone surrogates become a replacement mark; the direction marks of other scripts stay, the
    overrides that turn the text around them are removed.
    """
    plain = str(text)
    if limit is not None and len(plain) > limit:
        plain = plain[:limit].rstrip() + "…"
    return html.escape("".join(map(_replace_control_character, plain)), quote=True)


def _replace_control_character(character: str) -> str:
    if character in "\n\t":
        return character
    if character in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069":
        return ""
    if unicodedata.category(character) in ("Cc", "Cs"):
        return "\ufffd"
    return character


def _uri(image: Image.Image, kind: str, **options: int) -> str:
    target = io.BytesIO()
    image.save(target, kind, optimize=True, **options)
    return f"data:image/{kind};base64,{base64.b64encode(target.getvalue()).decode()}"
