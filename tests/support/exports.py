"""The images of a trained policy, and those of its export by the documented loading code."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.trainer.diffusers_trainer.common import prepare_export
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SFTTrainer
from cosmos_rl.policy.trainer.rl.online import OnlineTask

PROMPT = "a photo of the number 3"


def snippet(base: str, adapter_dir: Path | None, latents: torch.Tensor) -> torch.Tensor:
    """The documented loading code; fp32, local, CPU, and fixed start noise."""
    pipe: Any = DiffusionPipeline.from_pretrained(base, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if adapter_dir is not None:
        pipe.load_lora_weights(str(adapter_dir), weight_name="model.safetensors", adapter_name="default")
        pipe.set_adapters("default")
    pipe = pipe.to("cpu")
    result = pipe(
        prompt=PROMPT, num_inference_steps=4, guidance_scale=4.5, latents=latents, height=32, width=32, output_type="pt"
    )
    return result.images


def noise_for(model: FlowModel) -> torch.Tensor:
    return torch.randn(1, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(11))


def export_policy(task: OnlineTask, folder: Path) -> None:
    """What the task would export, as ``folder``."""
    assert isinstance(task.model, PipelineModel)
    prepare_export(task.model)(folder)


def policy_image(trainer: SFTTrainer | OnlineTask, noise: torch.Tensor) -> torch.Tensor:
    """The image of the trained policy: the EMA weights when they are kept."""
    ema = trainer.ema
    if ema is None:
        return trainer.model.sample([PROMPT], noise, num_steps=4, guidance=4.5)
    with ema.average_parameters():
        return trainer.model.sample([PROMPT], noise, num_steps=4, guidance=4.5)
