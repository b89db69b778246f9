"""Writes the recipes of the families that the documents do not name: `python -m scripts.write_recipes`.

A row of `FAMILIES` is what the card of the published model says, and what our estimate says about it; the two templates
next to this file hold what all families share. Recipes of the documents are written by hand.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

CONFIGS = Path(__file__).parents[1] / "configs"
_HEADS = ("to_q", "to_k", "to_v", "to_out.0")
_JOINT = tuple(f"attn.{layer}" for layer in _HEADS)
_ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")
_CROSS = tuple(f"{attention}.{layer}" for attention in ("attn1", "attn2") for layer in _HEADS)
_COSMOS = (*_HEADS, "ff.net.0.proj", "ff.net.2")
_MOCHI = tuple(f"attn1.{layer}" for layer in (*_HEADS, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"))


@dataclass(frozen=True)
class Family:
    """One published model and its recipes."""

    folder: str
    name: str
    """Of the recipes' files."""
    title: str
    model: str
    """Repository on the hub."""
    size: tuple[int, int]
    """Height and width that its card shows."""
    steps: int
    """Sampling steps and guidance of its card."""
    guidance: float
    length: int
    """Tokens of a prompt: its pipeline's own."""
    targets: tuple[str, ...]
    memory: tuple[str, str]
    """Of a GPU, for SFT and DiffusionNFT, by `cosmos-rl check`; tests compute it again. -: it does not run."""
    rl_size: tuple[int, int] = (512, 512)
    mini_batch: int = 2
    """Of DiffusionNFT."""
    frames: int = 1
    """1: it makes images."""
    rl_frames: int = 1
    video_vae: bool = False
    """It makes images with an autoencoder of videos, whose work is not estimated."""
    from_image: bool = False
    """Its videos start from an image."""
    gpus: int = 8
    revision: str = ""
    """Of the repository, where it is not the newest."""
    guidance_note: str = ""
    notes: tuple[str, ...] = ()
    """Lines for the head of both recipes."""

    @property
    def is_video(self) -> bool:
        return self.frames > 1

    @property
    def hardware(self) -> str:
        if self.gpus == 1:
            return "1 GPU; several ranks cannot train this model"
        return f"{self.gpus} GPUs on one machine"

    @property
    def lacks_vae(self) -> bool:
        return self.is_video or self.video_vae


_EMBEDDED = "off: the model has it as an input, which stays at the pipeline's default"
_EXPERTS = "Both experts are trained; policy.diffusers.trained_denoiser chooses one."
_TERMS = "The hub asks for the model's terms to be accepted before it gives out the weights."

FAMILIES = (
    Family(
        "flux",
        "flux-1-dev",
        "FLUX.1 [dev] (12 B)",
        "black-forest-labs/FLUX.1-dev",
        (1024, 1024),
        50,
        1.0,
        512,
        (*_JOINT, *_ADDED),
        ("12.5 GB", "12.6 GB"),
        guidance_note=_EMBEDDED,
        notes=(_TERMS,),
    ),
    Family(
        "flux",
        "flux-2-klein-base-4b",
        "FLUX.2 [klein] base (4 B)",
        "black-forest-labs/FLUX.2-klein-base-4B",
        (1024, 1024),
        50,
        4.0,
        512,
        (*_JOINT, *_ADDED, "attn.to_qkv_mlp_proj"),
        ("9.03 GB", "9.08 GB"),
        mini_batch=4,
    ),
    Family(
        "qwen-image",
        "qwen-image",
        "Qwen-Image (20 B)",
        "Qwen/Qwen-Image",
        (1328, 1328),
        50,
        4.0,
        512,
        (*_JOINT, *_ADDED),
        ("21.8 GB", "21.9 GB"),
        video_vae=True,
    ),
    Family(
        "z-image",
        "z-image",
        "Z-Image (6 B)",
        "Tongyi-MAI/Z-Image",
        (1024, 1024),
        50,
        4.0,
        512,
        ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        ("9.61 GB", "9.67 GB"),
        mini_batch=4,
    ),
    Family(
        "cogview4",
        "cogview4-6b",
        "CogView4 (6 B)",
        "zai-org/CogView4-6B",
        (1024, 1024),
        50,
        3.5,
        1024,
        ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
        ("19.2 GB", "19.2 GB"),
        mini_batch=4,
    ),
    Family(
        "lumina2",
        "lumina-image-2",
        "Lumina-Image 2.0 (2.6 B)",
        "Alpha-VLLM/Lumina-Image-2.0",
        (1024, 1024),
        50,
        4.0,
        256,
        _JOINT,
        ("5.89 GB", "5.92 GB"),
        mini_batch=4,
    ),
    Family(
        "chroma",
        "chroma1-hd",
        "Chroma1-HD (8.9 B)",
        "lodestones/Chroma1-HD",
        (1024, 1024),
        40,
        3.0,
        512,
        (*_JOINT, *_ADDED),
        ("11.8 GB", "11.9 GB"),
    ),
    Family(
        "aura-flow",
        "aura-flow-0-3",
        "AuraFlow 0.3 (6.8 B)",
        "fal/AuraFlow-v0.3",
        (1024, 1024),
        50,
        3.5,
        256,
        (*_JOINT, *_ADDED),
        ("6.54 GB", "6.86 GB"),
    ),
    Family(
        "wan",
        "wan-2-1-1-3b",
        "Wan 2.1 text to video (1.3 B)",
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        (480, 832),
        50,
        5.0,
        512,
        _CROSS,
        ("11.7 GB", "11.8 GB"),
        rl_size=(240, 416),
        frames=81,
        rl_frames=33,
    ),
    Family(
        "wan",
        "wan-2-1-14b",
        "Wan 2.1 text to video (14 B)",
        "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        (480, 832),
        50,
        5.0,
        512,
        _CROSS,
        ("34.8 GB", "15.2 GB"),
        rl_size=(240, 416),
        mini_batch=1,
        frames=81,
        rl_frames=33,
    ),
    Family(
        "wan",
        "wan-2-2-5b",
        "Wan 2.2 text to video (5 B)",
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        (704, 1280),
        50,
        5.0,
        512,
        _CROSS,
        ("14.6 GB", "12.7 GB"),
        rl_size=(256, 448),
        frames=121,
        rl_frames=33,
        notes=("The model is made for 24 frames a second; galleries and rewards show its videos at 16.",),
    ),
    Family(
        "wan",
        "wan-2-2-a14b",
        "Wan 2.2 text to video (two experts of 14 B)",
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        (480, 832),
        40,
        4.0,
        512,
        _CROSS,
        ("38.4 GB", "19 GB"),
        rl_size=(240, 416),
        mini_batch=1,
        frames=81,
        rl_frames=33,
        notes=(_EXPERTS,),
    ),
    Family(
        "wan",
        "wan-2-1-i2v-14b",
        "Wan 2.1 image to video (14 B)",
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        (480, 832),
        50,
        5.0,
        512,
        _CROSS,
        ("35.7 GB", "15.7 GB"),
        rl_size=(240, 416),
        mini_batch=1,
        frames=81,
        rl_frames=33,
        from_image=True,
    ),
    Family(
        "wan",
        "wan-2-2-i2v-a14b",
        "Wan 2.2 image to video (two experts of 14 B)",
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        (480, 832),
        40,
        3.5,
        512,
        _CROSS,
        ("38.4 GB", "19 GB"),
        rl_size=(240, 416),
        mini_batch=1,
        frames=81,
        rl_frames=33,
        from_image=True,
        notes=(_EXPERTS,),
    ),
    Family(
        "hunyuan-video",
        "hunyuan-video",
        "HunyuanVideo (13 B)",
        "hunyuanvideo-community/HunyuanVideo",
        (320, 512),
        30,
        1.0,
        256,
        (*_JOINT, *_ADDED),
        ("18.3 GB", "18.4 GB"),
        rl_size=(256, 384),
        mini_batch=1,
        frames=61,
        rl_frames=33,
        guidance_note=_EMBEDDED,
    ),
    Family(
        "ltx",
        "ltx-video",
        "LTX-Video (2 B)",
        "Lightricks/LTX-Video",
        (512, 704),
        50,
        3.0,
        128,
        _CROSS,
        ("10 GB", "10.1 GB"),
        rl_size=(256, 384),
        frames=161,
        rl_frames=33,
    ),
    Family(
        "mochi",
        "mochi-1-preview",
        "Mochi 1 preview (10 B)",
        "genmo/mochi-1-preview",
        (480, 848),
        64,
        4.5,
        256,
        _MOCHI,
        ("18.1 GB", "12.2 GB"),
        rl_size=(240, 432),
        mini_batch=1,
        frames=85,
        rl_frames=31,
    ),
    Family(
        "cosmos-predict2",
        "cosmos-predict2-2b",
        "Cosmos-Predict2 text to image (2 B)",
        "nvidia/Cosmos-Predict2-2B-Text2Image",
        (768, 1360),
        35,
        7.0,
        512,
        _COSMOS,
        ("13.9 GB", "14.6 GB"),
        mini_batch=4,
        video_vae=True,
        gpus=1,
        notes=(_TERMS,),
    ),
    Family(
        "cosmos-predict2-5",
        "cosmos-predict2-5-2b",
        "Cosmos-Predict2.5 (2 B)",
        "nvidia/Cosmos-Predict2.5-2B",
        (704, 1280),
        36,
        7.0,
        512,
        _COSMOS,
        ("25.3 GB", "-"),
        frames=93,
        revision="diffusers/base/post-trained",
        notes=(
            "Videos from texts; policy.diffusers.conditional_frames = [0, 2] trains those from images and videos, too.",
            _TERMS,
        ),
    ),
)


def render_recipes() -> Mapping[str, str]:
    """Path below `configs/` -> the text of the recipe."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=folder,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return dict(_render(environment))


def _render(environment: Environment) -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        for job, memory in zip(("sft-lora", "nft"), family.memory, strict=True):
            if memory == "-":
                continue
            path = f"{family.folder}/{family.name}-{job}.toml"
            template = environment.get_template(f"recipe_{job.partition('-')[0]}.toml.jinja")
            yield path, template.render(family=family, path=path, run=f"{family.name}-{job}", memory=memory)


if __name__ == "__main__":
    for path, text in render_recipes().items():
        (CONFIGS / path).parent.mkdir(exist_ok=True)
        (CONFIGS / path).write_text(text, encoding="utf-8")
