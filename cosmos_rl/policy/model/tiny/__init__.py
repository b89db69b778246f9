"""Tiny, complete, offline model folders made of the real classes: for tests, demonstrations and the quickstart.

`build` is the one entry; it knows families and presets without importing torch, so a command can list and check them
at no cost.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cosmos_rl.errors import UserError

# family -> preset -> one line for a help text
FAMILIES: Mapping[str, Mapping[str, str]] = {
    "sd3": {
        "digits": "32 x 32 images, 1.0 M weights, sized to learn ten digits in two CPU minutes",
        "unit": "2 layers of width 64, a forward in milliseconds, for tests",
    },
    "sana": {"unit": "images, DPM-Solver, deep-compression autoencoder"},
    "wan": {
        "unit": "videos, UniPC (Wan 2.1)",
        "shapes": "9 frames of 32 x 32 with a trained autoencoder, sized to learn moving shapes",
    },
    "flux": {"unit": "images, packed states, embedded guidance (FLUX.1 dev)"},
    "flux-kontext": {"unit": "images that edit an image (FLUX.1 Kontext)"},
    "flux2-klein": {"unit": "images, packed states, normalised latents (FLUX.2 klein)"},
    "qwen-image": {"unit": "images, packed states, a video autoencoder (Qwen-Image)"},
    "z-image": {"unit": "images, lists of tensors (Z-Image)"},
    "sana-video": {"unit": "videos, DPM-Solver"},
    "cosmos-predict2": {"unit": "images by a video autoencoder, states x0 + sigma * noise; text to image"},
    "cosmos-predict2.5": {"unit": "videos, UniPC with Karras levels, time per frame; from text, image or video"},
    "wan2.2": {"unit": "videos, an expert for high and one for low noise (Wan 2.2 A14B)"},
    "wan2.2-5b": {"unit": "videos, time per token (Wan 2.2 5B)"},
    "wan-i2v": {"unit": "videos from an image, which an encoder of its own sees too (Wan 2.1)"},
    "wan2.2-i2v": {"unit": "videos from an image, two experts (Wan 2.2 A14B)"},
    "wan2.2-5b-i2v": {"unit": "videos from an image, time per token (Wan 2.2 5B)"},
    "sana-video-i2v": {"unit": "videos from an image, whose frame is no part of the state"},
    "ltx-i2v": {"unit": "videos from an image, whose frame is no part of the state; packed"},
    "hunyuan-video": {"unit": "videos, embedded guidance"},
    "hunyuan-video-i2v": {"unit": "videos from an image, which the text encoder sees too"},
    "ltx": {"unit": "videos, packed states"},
    "cogview4": {"unit": "images, timesteps that are not shifted with the levels"},
    "lumina2": {"unit": "images, time from data to noise"},
    "chroma": {"unit": "images, packed states, masks"},
    "aura-flow": {"unit": "images, classifier-free guidance in one batch"},
    "mochi": {"unit": "videos, levels that count backwards"},
}


def build(family: str, out: Path, preset: str, seed: int) -> Path:
    """Writes a tiny pipeline folder that `DiffusionPipeline.from_pretrained` loads, and returns its path.

    The same seed gives the same bytes. The folder appears whole or not at all. Raises `UserError` for an unknown
    family or preset and for an output folder that already holds something.
    """
    _check_known(family, preset)
    out = Path(out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out} already holds something: name a new or an empty folder for the tiny model")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _build(family, aside, preset, seed)
        aside.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        os.replace(aside, out)  # replaces an empty folder too
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _build(family: str, folder: Path, preset: str, seed: int) -> None:
    """Imports torch and diffusers: seconds. The package of models does it without what prints warnings."""
    import cosmos_rl.policy.model.diffusers  # noqa: F401

    if family == "sd3":
        from cosmos_rl.policy.model.tiny.sd3 import build_sd3

        build_sd3(folder, size=preset, seed=seed)
    else:
        from cosmos_rl.policy.model.tiny.zoo import build_family

        build_family(folder, family=family, preset=preset, seed=seed)


def _check_known(family: str, preset: str) -> None:
    if family not in FAMILIES:
        raise UserError(f"no tiny model family {family!r}: choose one of {', '.join(FAMILIES)}")
    if preset not in FAMILIES[family]:
        raise UserError(f"no preset {preset!r} for tiny {family}: choose one of {', '.join(FAMILIES[family])}")
