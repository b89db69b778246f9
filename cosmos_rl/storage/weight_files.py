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
        UserError: it cannot be read, is cut off, or of another kind. Its length is compared with its header.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with file.open("rb"):  # of a file that may not be read safetensors says that it is not there
            pass
        opened = safe_open(file, framework=framework)
    except OSError as error:
        raise _explain_unreadable(file, error) from error
    except SafetensorError as error:
        raise UserError(
            f"{file}: is not a complete .safetensors file ({error}); copy, download or write it again"
        ) from error
    with opened:
        yield opened


def read_table(file: Path) -> dict[str, Any]:
    """The JSON object in a file such as ``model_index.json`` or ``adapter_config.json``.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _explain_unreadable(file, error) from error
    except ValueError as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); copy, download or write it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{file}: holds no table (a JSON object); copy, download or write it again")
    return found


def _explain_unreadable(file: Path, error: OSError) -> UserError:
    return UserError(f"{file}: cannot be read ({error.strerror or error}); look at its path and its permissions")
