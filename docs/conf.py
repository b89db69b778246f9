"""The documentation site (`make docs`): Sphinx over the Markdown pages of this folder."""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/nvidia-cosmos/cosmos-rl/blob/main"
"""Where pages and sources outside of this folder are shown."""

project = "cosmos-rl"
author = "the cosmos-rl authors"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
html_theme = "furo"
html_title = "cosmos-rl"
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"

_LINK = re.compile(r"\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")


def link_outside(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links to files of the repository that are not of this site lead to the repository; one to nowhere is a warning,
    which `make docs` makes an error."""
    here = (Path(app.srcdir) / docname).parent

    def repaired(match: re.Match[str]) -> str:
        target, anchor = match.groups()
        if target.startswith(("http:", "https:")) or (here / target).resolve().is_relative_to(app.srcdir):
            return match[0]
        path = (here / target).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            logging.getLogger(__name__).warning("link to a file that does not exist: %s", target, location=docname)
            return match[0]
        return f"]({REPOSITORY}/{path.relative_to(ROOT)}{anchor})"

    source[0] = _LINK.sub(repaired, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the hook."""
    app.connect("source-read", link_outside)
    return {"parallel_read_safe": True}
