"""Whether a family can be trained by the scripts of the package, known before anything is loaded."""

import json
import re

from cosmos_rl.launcher.pipeline_files import Unknown, folder_of, served_classes
from cosmos_rl.policy.config import PolicyConfig

_BY_NAME = {
    "sana": "SANA",
    "wan": "Wan",
    "cosmos": "Cosmos",
    "flux": "Flux",
    "qwen-image": "Qwen-Image",
    "hunyuan": "Hunyuan",
    "ltx": "LTX",
    "cogvideox": "CogVideoX",
    "stable-diffusion-xl": "Stable Diffusion XL",
}
"""Word of a hub name -> the family that models of that name are of."""


def family_not_runnable(policy: PolicyConfig) -> list[str]:
    """One line for `not_runnable_yet` when no class serves the model, as far as its files or its hub name say."""
    if not policy.is_diffusers or not policy.model_name_or_path:
        return []
    served = served_classes()
    kind = _pipeline_class(policy)
    if kind is None:
        kind = _family_of_name(policy.model_name_or_path)
    if kind is None or kind in served:
        return []
    name = policy.model_name_or_path
    return [f'policy.model_name_or_path = "{name}" ({kind}); today only {", ".join(sorted(served))}']


def _pipeline_class(policy: PolicyConfig) -> str | None:
    """`_class_name` of `model_index.json`, in the folder or in the hub cache; None: not there."""
    try:
        folder = folder_of(policy.model_name_or_path, policy.model_revision)
        return json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
    except (Unknown, OSError, ValueError, AttributeError):
        return None


def _family_of_name(name: str) -> str | None:
    for word, family in _BY_NAME.items():
        if re.search(rf"(^|[-_./]){word}(?![a-z])", name.lower()):
            return family
    return None
