"""Reading files of models that a user has brought: weights, and the tables next to them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmos_rl.errors import UserError


@contextlib.contextmanager
def open_weights(file: Path, framework: str = "pt") -> Iterator[Any]:
    """A safetensors file, opened for reading: what ``safetensors.safe_open`` gives.

    Args:
        framework: ``pt`` or ``np``.

    Raises:
        UserError: it is not there, cut off, or of another kind. Its length is compared with its header.
    """
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(file, framework=framework)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: is not a complete .safetensors file ({error}); copy, download or write it again"
        ) from error
    with opened:
        yield opened


def read_table(file: Path) -> dict[str, Any]:
    """The JSON object in a file such as ``model_index.json`` or ``adapter_config.json``.

    Raises:
        UserError: it is not there, or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); copy, download or write it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: holds no table (a JSON object); copy, download or write it again")
    return found
