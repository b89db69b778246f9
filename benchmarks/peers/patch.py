"""Small named changes to a copy of somebody else's source files, which fail where the files are not as expected."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.errors import UserError


@dataclass(frozen=True)
class Change:
    """A regular expression that must match ``count`` times in a file, and what takes the place of each match."""

    name: str
    file: str
    pattern: str
    replacement: str
    count: int = 1


def copy_with_changes(checkout: Path, copy: Path, folders: Sequence[str], changes: Sequence[Change]) -> None:
    """Copy the Python files of some folders of a checkout, and change the copies.

    Raises:
        UserError: a folder is missing, or a change does not match as often as it must; nothing is left half changed
            in the checkout, which is never written.
    """
    for folder in folders:
        if not (checkout / folder).is_dir():
            raise UserError(f"{checkout}: no folder {folder}; give the root of a checkout (benchmarks/README.md)")
        shutil.copytree(checkout / folder, copy / folder, ignore=_all_but_python)
    for change in changes:
        path = copy / change.file
        if not path.is_file():
            raise UserError(
                f"{checkout / change.file}: no such file, for the change {change.name!r}; is this the checkout that "
                "benchmarks/README.md names?"
            )
        text, found = re.subn(change.pattern, change.replacement, path.read_text(encoding="utf-8"))
        if found != change.count:
            raise UserError(
                f"{checkout / change.file}: the change {change.name!r} matches {found} times in place of "
                f"{change.count}: {change.pattern}\n  This is another version than the one that benchmarks/README.md "
                "names; check that out, or adapt the change in benchmarks/peers"
            )
        path.write_text(text, encoding="utf-8")


def _all_but_python(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if not name.endswith(".py") and not (Path(folder) / name).is_dir()}
