"""Builds the families that have one function for each preset."""

import importlib
import json
import shutil
from pathlib import Path

import torch

from cosmos_rl.policy.model.quiet import quiet_libraries

MAKERS = {
    "sana": "images:sana",
    "flux": "images:flux",
    "flux-kontext": "images:flux_kontext",
    "flux2-klein": "images:flux2_klein",
    "qwen-image": "images:qwen_image",
    "z-image": "images:z_image",
    "cogview4": "images:cogview4",
    "lumina2": "images:lumina2",
    "chroma": "images:chroma",
    "aura-flow": "images:aura_flow",
    "wan": "videos:wan",
    "wan2.2": "videos:wan22",
    "wan2.2-5b": "videos:wan22_5b",
    "wan-i2v": "videos:wan_i2v",
    "wan2.2-i2v": "videos:wan22_i2v",
    "wan2.2-5b-i2v": "videos:wan22_5b_i2v",
    "sana-video": "videos:sana_video",
    "sana-video-i2v": "videos:sana_video_i2v",
    "cosmos-predict2": "videos:cosmos2",
    "cosmos-predict2.5": "videos:cosmos2_5",
    "hunyuan-video": "videos:hunyuan_video",
    "hunyuan-video-i2v": "videos:hunyuan_video_i2v",
    "ltx": "videos:ltx",
    "ltx-i2v": "videos:ltx_i2v",
    "mochi": "videos:mochi",
}
"""Of the preset ``unit``."""
LARGER = {("wan", "shapes"): "videos:wan_shapes"}


def build_family(out: Path, *, family: str, preset: str, seed: int) -> None:
    """Writes the whole pipeline folder of a family into ``out``. The same seed gives the same bytes."""
    module, _, function = LARGER.get((family, preset), MAKERS[family]).partition(":")
    make = getattr(importlib.import_module(f"cosmos_rl.policy.model.tiny.{module}"), function)
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(seed)
        make().save_pretrained(out)
    _name_real_checker(out)


def _name_real_checker(out: Path) -> None:
    """Have the index name the checker that published Cosmos pipelines name, and leave ours out."""
    index = json.loads((out / "model_index.json").read_text(encoding="utf-8"))
    if "safety_checker" in index:
        index["safety_checker"] = ["cosmos_guardrail", "CosmosSafetyChecker"]
        (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(out / "safety_checker")
