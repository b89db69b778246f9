"""The ``README.md`` of an export: what it is, how to load it, what it makes, and how it was made.

Written whether or not the export is uploaded: a folder that is copied by hand should say what it is as well.
"""

import html
import importlib.metadata
import json
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_rl.policy.config import Config
from cosmos_rl.storage import atomic

MAX_IMAGES = 4
_OTHER_TOOLS = (
    "The adapter's strength is in its weights (alpha is the rank of every layer), so it acts alike in diffusers and in "
    "tools that look for no alpha, ComfyUI among them: strength 1 is that of the training."
)
_LONGEST_PROMPT = 80
"""Characters of a prompt that stands in the code."""
_PACKAGES = ("cosmos_rl", "torch", "diffusers", "transformers", "peft")
_PRIVATE = {"custom", "redis", "eth_ips"}  # a user's own table may hold anything, the others name machines


def write_card(export: Path, config: Config, media: Path, *, step: int, repository: str | None = None) -> None:
    """Write the card of the export of ``step`` and copies of up to four of its newest validation images next to it.

    Args:
        export: the folder that is loaded: a pipeline, or a ``lora`` folder.
        config: configuration of the run; paths of this machine are left out.
        media: the run's folder of images.
        step: steps that the run has done.
        repository: where the export will be found; None: the snippet names the folder in words.
    """
    images = _find_newest_images(media / "validation", step)
    shutil.rmtree(export / "media", ignore_errors=True)
    if images:
        with atomic.staging(export / "media") as stage:
            for file, _ in images:
                shutil.copyfile(file, stage / file.name)
    parts = [_front_matter(config), _about(config, step), _snippet(config, repository, images, export)]
    parts += [_gallery(images), _configuration(config), _versions()]
    atomic.write_text(export / "README.md", "\n\n".join(part for part in parts if part) + "\n")


def _front_matter(config: Config) -> str:
    base = config.policy.model_name_or_path
    task, kind = "text-to-image", "full"
    if config.policy.diffusers.is_video:
        task = "text-to-video"
    if config.policy.lora is not None:
        kind = "lora"
    tags = ["cosmos-rl", config.train.train_policy.type, kind]
    lines = ["---"]
    if not is_local(base):
        lines.append(f"base_model: {json.dumps(base)}")
    lines += ["library_name: diffusers", f"pipeline_tag: {task}", "tags:", *(f"- {tag}" for tag in tags), "---"]
    return "\n".join(lines)


def _about(config: Config, step: int) -> str:
    lora, base = config.policy.lora, config.policy.model_name_or_path
    model, what = f"[{base}](https://huggingface.co/{base})", "All weights of"
    if is_local(base):
        model = f"a local pipeline, `{Path(base).name}`"
    if lora is not None:
        what = f"A LoRA adapter (rank {lora.r}) for"
    name = config.logging.experiment_name or config.logging.project_name
    text = f"# {name}\n\n{what} {model}, trained with cosmos-rl for {step} steps."
    if config.train.ema_enable:
        text += " These are the averaged (EMA) weights."
    return text


def _snippet(config: Config, repository: str | None, images: list[tuple[Path, str]], export: Path) -> str:
    here = source = repository or "path/to/this/folder"
    lora, pinned = config.policy.lora is not None, ""
    if lora:
        source = config.policy.model_name_or_path
        if is_local(source):
            source = "path/to/the/base"
        if config.policy.model_revision:
            pinned = f', revision="{config.policy.model_revision}"'
    load = f'pipe = DiffusionPipeline.from_pretrained("{source}"{pinned}, torch_dtype=torch.{config.train.param_dtype})'
    lines = ["import torch", "from diffusers import DiffusionPipeline", "", load]
    if lora:
        options = 'weight_name="model.safetensors", adapter_name="default"'
        second = (export / "transformer_2").is_dir()
        if not second or (export / "model.safetensors").is_file():
            lines.append(f'pipe.load_lora_weights("{here}", {options})')
        if second:
            where = f'"{here}", subfolder="transformer_2", load_into_transformer_2=True'
            lines.append(f"pipe.load_lora_weights({where}, {options})")
        lines.append('pipe.set_adapters("default")')
    diffusers = config.policy.diffusers
    if not diffusers.is_video:
        fits = (prompt for _, prompt in images if len(prompt) <= _LONGEST_PROMPT and "`" not in prompt)
        prompt = next(fits, "a prompt like those of the training")
        sample, (height, width) = diffusers.sample, diffusers.inference_size
        lines += [
            "image = pipe(",
            f"    {prompt!r},",
            f"    height={height},",
            f"    width={width},",
            f"    num_inference_steps={sample.eval_num_steps or sample.num_steps},",
            f"    guidance_scale={sample.guidance_scale},",
            f"    max_sequence_length={diffusers.max_prompt_length},  # as in training; another changes images",
            ").images[0]",
        ]
    text = "## Load\n\n```python\n" + "\n".join(lines) + "\n```"
    if lora:
        text += f"\n\n{_OTHER_TOOLS}"
    return text


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


def _gallery(images: list[tuple[Path, str]]) -> str:
    if not images:
        return ""
    rows = [f"| ![](media/{file.name}) | {_cell(prompt)} |" for file, prompt in images]
    return "\n".join(["## Validation images", "", "| image | prompt |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split())).replace("|", "&#124;") or "(empty)"


def _configuration(config: Config) -> str:
    toml = tomli_w.dumps(_shorten_local_paths(config.model_dump(exclude_none=True, exclude=_PRIVATE)))
    return f"<details><summary>Configuration</summary>\n\n````toml\n{toml}````\n\n</details>"


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


def _versions() -> str:
    found = [f"python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "Made with " + ", ".join(found) + "."
