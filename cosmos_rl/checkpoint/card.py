"""The ``README.md`` of an export: what it is, how to load it, what it makes, and how it was made.

Written whether or not the export is uploaded: a folder that is copied by hand should say what it is as well.
"""

import functools
import html
import importlib.metadata
import json
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_rl.checkpoint.export import read_sampling
from cosmos_rl.policy.config import Config
from cosmos_rl.storage import atomic

MAX_IMAGES = 4
_LONGEST_PROMPT = 80
"""Characters of a prompt that stands in the code."""
_PACKAGES = ("cosmos_rl", "torch", "diffusers", "transformers", "peft")
_PRIVATE = {"custom", "redis", "eth_ips"}  # a user's own table may hold anything, the others name machines


def write_card(
    export: Path, config: Config, media: Path, *, step: int, repository: str | None = None, guardrail: bool = False
) -> None:
    """Write the card of the export of ``step`` and copies of up to four of its newest validation images next to it.

    Args:
        export: the folder that is loaded: a pipeline, or a ``lora`` folder.
        config: configuration of the run; paths of this machine are left out.
        media: the run's folder of images.
        step: steps that the run has done.
        repository: where the export will be found; None: the snippet names the folder in words.
        guardrail: whether diffusers builds the pipeline with the guardrail of Cosmos.
    """
    images = _find_newest_images(media / "validation", step)
    shutil.rmtree(export / "media", ignore_errors=True)
    if images:
        with atomic.staging(export / "media") as stage:
            for file, _ in images:
                shutil.copyfile(file, stage / file.name)
    text = _load_template().render(
        config=config,
        diffusers=config.policy.diffusers,
        lora=config.policy.lora,
        step=step,
        guardrail=guardrail,
        here=repository or "path/to/this/folder",
        first=(export / "model.safetensors").is_file() or not (export / "transformer_2").is_dir(),
        second=(export / "transformer_2").is_dir(),
        sampling=", ".join(f"{name}={value!r}" for name, value in read_sampling(export).items()),
        prompt=_choose_prompt(images),
        images=images,
        toml=tomli_w.dumps(_shorten_local_paths(config.model_dump(exclude_none=True, exclude=_PRIVATE))),
        versions=_list_versions(),
    )
    atomic.write_text(export / "README.md", text)


@functools.cache
def _load_template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # most processes write no card

    environment = Environment(  # Markdown, not HTML: what could be taken for either is escaped by its filter
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"cell": _escape_cell, "json": json.dumps, "repr": repr}
    environment.filters["last_name"] = lambda path: Path(path).name
    environment.tests["local"] = is_local
    return environment.get_template("card.md.jinja")


def _choose_prompt(images: list[tuple[Path, str]]) -> str:
    """One that the code can hold."""
    fits = (prompt for _, prompt in images if len(prompt) <= _LONGEST_PROMPT and "`" not in prompt)
    return next(fits, "a prompt like those of the training")


def _find_newest_images(validation: Path, step: int) -> list[tuple[Path, str]]:
    """Up to four images of different prompts from the last validation up to ``step``."""
    found = (re.fullmatch(r"step_(\d+)", path.name) for path in validation.glob("step_*"))
    steps = [int(match[1]) for match in found if match and int(match[1]) <= step]
    if not steps:
        return []
    folder = validation / f"step_{max(steps)}"
    first_of_prompt: dict[str, Path] = {}
    for row in json.loads((folder / "index.json").read_text(encoding="utf-8")):
        first_of_prompt.setdefault(row["prompt"], folder / row["file"])
    return [(file, prompt) for prompt, file in first_of_prompt.items()][:MAX_IMAGES]


def _escape_cell(text: str) -> str:
    return html.escape(" ".join(text.split())).replace("|", "&#124;") or "(empty)"


def _shorten_local_paths(value: Any) -> Any:
    """``value`` with local paths cut down to their last name."""
    if isinstance(value, dict):
        return {key: _shorten_local_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shorten_local_paths(item) for item in value]
    if is_local(value):
        return f".../{Path(value).name}"
    return value


def is_local(value: object) -> bool:
    """Whether ``value`` is a path of this machine. The launcher makes existing paths absolute; hub names never are."""
    return isinstance(value, str) and value.startswith(("/", "~", "./", "../", "file:"))


def _list_versions() -> list[str]:
    found = [f"python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
