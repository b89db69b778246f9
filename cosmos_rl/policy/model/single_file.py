"""A model in one file, as model-sharing sites offer it: recognised, and what it lacks found. No torch."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import PolicyConfig
from cosmos_rl.policy.model.digest import find_folder

_LARGE_BLOCKS = 38
_LARGE_BYTES = 16e9
"""Between the 2 B and the 14 B model of Cosmos-Predict2.5, in any dtype."""


@dataclass(frozen=True)
class SingleFile:
    """A transformer in one file, and what it lacks."""

    file: Path
    base: Path
    """Folder of the pipeline that has the other parts."""


def find_single_file(policy: PolicyConfig) -> SingleFile | None:
    """The file that ``policy.model_name_or_path`` names; None: it names no file.

    Raises:
        UserError: it cannot be a base: what it is, and what to do.
    """
    name = policy.model_name_or_path
    path = Path(name).expanduser()
    if not path.is_file():
        return None
    what = f'policy.model_name_or_path = "{name}": is one file, and a pipeline is a folder with a model_index.json'
    if path.suffix == ".pt":
        command = _write_import_command(path)
        raise UserError(f"{what}. Of a checkpoint of Cosmos-Predict2.5 this makes one:\n  {command}")
    if path.suffix != ".safetensors":
        raise UserError(f"{what}; only .safetensors files can take its place, and .pt files of Cosmos-Predict2.5")
    try:
        with safe_open(path, framework="np") as file:
            keys = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{what}; it is not a complete .safetensors file either ({error})") from error
    if any(".lora_" in key or ".lora." in key for key in keys):
        raise UserError(f"{what}; it holds an adapter: name its base there, and this file as policy.lora.lora_path")
    base = policy.single_file_base or find_base(keys)
    if base is None:
        raise UserError(
            f"{what}; it does not hold the transformer of Stable Diffusion 3 or 3.5. Of another family: set "
            "policy.single_file_base to the pipeline (folder or hub name) that has its other parts"
        )
    folder = find_folder(base, policy.model_revision)
    if folder is None or not (folder / "model_index.json").is_file():
        fetch = f"`hf download {base}` fetches it, or set" if _is_hub_name(base) else "there is no such pipeline; set"
        raise UserError(
            f"{what}. VAE, text encoders and tokenizers would be those of {base}, which is not here: {fetch} "
            "policy.single_file_base to a pipeline (folder or hub name)"
        )
    return SingleFile(path, folder)


def find_single_file_problem(policy: PolicyConfig) -> str | None:
    """Why the model cannot be trained when it is a file, and what to do; None: it is no file, or a good one."""
    try:
        find_single_file(policy)
    except UserError as error:
        return str(error)
    return None


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _write_import_command(file: Path) -> str:
    size = "2B"
    if file.stat().st_size > _LARGE_BYTES:
        size = "14B"
    base = f"--base nvidia/Cosmos-Predict2.5-{size} --revision diffusers/base/post-trained"
    return f"cosmos-rl import {shlex.quote(str(file))} {base} --out {shlex.quote(str(file.with_suffix('')))}"


def find_base(keys: Sequence[str]) -> str | None:
    """The published pipeline whose transformer has these names of tensors; None: another family."""
    blocks = {part.split(".")[0] for key in keys for part in key.split("joint_blocks.")[1:]}
    if not blocks:
        blocks = {key.split(".")[1] for key in keys if key.startswith("transformer_blocks.")}
    if not blocks or not any("context" in key or "add_q_proj" in key for key in keys):
        return None
    if len(blocks) >= _LARGE_BLOCKS:
        return "stabilityai/stable-diffusion-3.5-large"
    two_attentions = any("x_block.attn2." in key or ".attn2." in key for key in keys)
    if two_attentions:
        return "stabilityai/stable-diffusion-3.5-medium"
    return "stabilityai/stable-diffusion-3-medium-diffusers"
