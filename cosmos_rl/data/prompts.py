"""Lists of prompts without pictures."""

import json
from collections.abc import Sequence
from pathlib import Path

from cosmos_rl.errors import UserError


class PromptFile(Sequence[str]):
    """A JSON file that holds a list of objects with the key ``prompt``."""

    def __init__(self, path: str | Path) -> None:
        """Read the whole file.

        Raises:
            UserError: no such file, not JSON, not such a list, or an empty one.
        """
        self.path = Path(path).expanduser()
        expected = 'expected a JSON list of objects like {"prompt": "..."}'
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{self.path.absolute()}: cannot be read ({error.strerror}); {expected}") from error
        except ValueError as error:
            raise UserError(f"{self.path.absolute()}: is not valid JSON ({error}); {expected}") from error
        if not isinstance(content, list) or not content:
            raise UserError(f"{self.path.absolute()}: holds no list of prompts; {expected}")
        wrong = [
            i for i, row in enumerate(content) if not isinstance(row, dict) or not isinstance(row.get("prompt"), str)
        ]
        if wrong:
            raise UserError(f'{self.path.absolute()}: rows {wrong[:10]} have no string under "prompt"; {expected}')
        self._prompts = [row["prompt"] for row in content]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._prompts[index]
