"""Whether a family can be trained by the scripts of the package, known before anything is loaded."""

import json
import re
from typing import Any

from cosmos_rl.launcher.pipeline_files import Unknown, locate_base, served_classes
from cosmos_rl.launcher.pipeline_source import in_diffusers
from cosmos_rl.policy.config import PolicyConfig

_BY_NAME = {"cogvideox": "CogVideoX", "stable-diffusion-xl": "Stable Diffusion XL"}
"""Word of a hub name -> a family whose models predict noise."""


def unsupported_family(policy: PolicyConfig) -> list[str]:
    """One line when no class can train the model, as far as its files or its hub name say."""
    if not policy.is_diffusers or not policy.model_name_or_path:
        return []
    name = policy.model_name_or_path
    kind = _read_json(policy, "model_index.json").get("_class_name")
    if kind is None:
        family = _guess_family(name)
        if family is None:
            return []
        return [f'policy.model_name_or_path = "{name}" ({family}); it predicts noise']
    if kind in served_classes():
        return []
    if not in_diffusers(kind):
        served = ", ".join(sorted(served_classes()))
        return [f'policy.model_name_or_path = "{name}" ({kind}); today only {served} and pipelines of diffusers']
    scheduler = _read_json(policy, "scheduler/scheduler_config.json")
    prediction = scheduler.get("prediction_type", "flow_prediction")
    if "FlowMatch" not in scheduler.get("_class_name", "FlowMatch") and prediction != "flow_prediction":
        return [f'policy.model_name_or_path = "{name}" ({kind}, {prediction}); today only flow matching']
    return []


def _read_json(policy: PolicyConfig, file: str) -> dict[str, Any]:
    """A JSON file of the pipeline, in its folder or in the hub cache; empty when it is not there."""
    try:
        folder = locate_base(policy)
        found = json.loads((folder / file).read_text(encoding="utf-8"))
    except (Unknown, OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return found


def _guess_family(name: str) -> str | None:
    for word, family in _BY_NAME.items():
        if re.search(rf"(^|[-_./]){word}(?![a-z])", name.lower()):
            return family
    return None
