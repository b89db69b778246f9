"""What counts as a text: one rule for caption files, files of prompts and the data sets of a script. No torch."""

import json
from collections.abc import Mapping

from cosmos_rl.errors import explain_decoding
from cosmos_rl.text_files import decode_text

_SHOWN_KEYS = 5


def parse_json(content: bytes | str) -> tuple[object, str | None]:
    """(what the JSON holds, None) or (None, what is wrong). A byte order mark, as Windows editors write it, is fine."""
    try:
        text = content if isinstance(content, str) else decode_text(content)
    except UnicodeDecodeError as error:
        return None, explain_decoding(error)
    try:
        return json.loads(text), None
    except ValueError as error:
        return None, f"is not valid JSON ({error})"
    except RecursionError:
        return None, "is not valid JSON (nested too deeply)"


def find_prompt_problem(row: object) -> str | None:
    """Why ``row`` is no mapping with a usable text under ``prompt``; None: it is one. White space alone is none."""
    if not isinstance(row, Mapping):
        return f"has no text under 'prompt'; it is not an object but {_describe_kind(row)}"
    if isinstance(prompt := row.get("prompt"), str):
        return find_text_problem(prompt) if prompt.strip() else "has an empty prompt"
    if "prompt" in row:
        return f"has no text under 'prompt'; that is {_describe_kind(row['prompt'])}"
    keys = [repr(printable(str(key))[:40]) for key in row]
    more = ""
    if len(keys) > _SHOWN_KEYS:
        more = f" and {len(keys) - _SHOWN_KEYS} more"
    return f"has no text under 'prompt'; it has {', '.join(keys[:_SHOWN_KEYS]) or 'nothing'}{more}"


def find_text_problem(text: str) -> str | None:
    """Why ``text`` is none that a tokenizer takes as it was meant; None: it is one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = printable(text[error.start : error.end])
        return f"has half of a character ({half}) at position {error.start} of its text"
    if "\0" in text:  # escaped in JSON, or from a script: `decode_text` lets none through
        return "has null characters (\\u0000); remove them"
    return None


def printable(text: str) -> str:
    """``text`` as every output takes it: halves of characters, also from file names that are not UTF-8, are escaped."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def _describe_kind(value: object) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number")
