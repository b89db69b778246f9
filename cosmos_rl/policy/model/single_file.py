"""A model in one file, as model-sharing sites offer it: recognised, and refused with the command that makes a folder.

No torch.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

_LARGE_BLOCKS = 38
_LARGE_BYTES = 16e9
"""Between the 2 B and the 14 B model of Cosmos-Predict2.5, in any dtype."""
_TO_FOLDER = (
    "from diffusers import SD3Transformer2DModel as T, StableDiffusion3Pipeline as P; base = {base!r}; "
    "P.from_pretrained(base, transformer=T.from_single_file({file!r}, config=base, subfolder='transformer'))"
    ".save_pretrained({folder!r})"
)


def find_single_file_problem(name: str) -> str | None:
    """Why the model ``name`` cannot be trained when it is a file, and what to do; None: it is no file."""
    path = Path(name).expanduser()
    if not path.is_file():
        return None
    what = f'policy.model_name_or_path = "{name}": is one file, and a pipeline is a folder with a model_index.json'
    if path.suffix == ".pt":
        return f"{what}. Of a checkpoint of Cosmos-Predict2.5 this makes one:\n  {_write_import_command(path)}"
    if path.suffix != ".safetensors":
        return f"{what}; only of .safetensors and .pt files it is known how to make one"
    try:
        with safe_open(path, framework="np") as file:
            keys = list(file.keys())
    except (SafetensorError, OSError) as error:
        return f"{what}; it is not a complete .safetensors file either ({error})"
    if any(".lora_" in key or ".lora." in key for key in keys):
        return f"{what}; it holds an adapter: name its base there, and this file as policy.lora.lora_path"
    base = find_base(keys)
    if base is None:
        return f"{what}; it does not hold the transformer of Stable Diffusion 3 or 3.5"
    folder = str(path.with_suffix(""))
    code = _TO_FOLDER.format(base=base, file=str(path), folder=folder)
    return (
        f"{what}. This makes one, with the VAE and the text encoders of {base}:\n  python -c {shlex.quote(code)}\n"
        f"  then policy.model_name_or_path = {folder!r}"
    )


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
