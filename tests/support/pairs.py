"""Changes of a folder of captioned images."""

import json
from pathlib import Path


def other_captions(folder: Path) -> None:
    (folder / "003.json").write_text(json.dumps({"prompt": "another caption"}))


def other_names(folder: Path) -> None:
    for suffix in ("json", "png"):
        (folder / f"003.{suffix}").rename(folder / f"0031.{suffix}")
