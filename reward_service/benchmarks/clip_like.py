"""A scorer of CLIP's size (ViT-B/32 with random weights), to see what merging jobs is worth."""

import os
from typing import Any

from cosmos_rl_reward.handler import BaseRewardHandler


class ClipLike(BaseRewardHandler):
    """First feature of each image."""

    reward_name = "clip_like"
    mergeable = True
    max_batch = 16

    def set_up(self) -> None:
        """Build the model; nothing is downloaded."""
        import torch
        from transformers import CLIPVisionConfig, CLIPVisionModel

        torch.manual_seed(0)
        torch.set_num_threads(os.cpu_count() or 1)  # on one thread merging is worth less
        self.torch = torch
        self.model = CLIPVisionModel(CLIPVisionConfig()).eval()

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        """Images of 224 x 224, scaled to 0..1."""
        with self.torch.inference_mode():
            features = self.model(pixel_values=images.permute(0, 3, 1, 2).float() / 255).pooler_output
        return {"scores": {"clip_like": features[:, 0]}}

    def probes(self) -> list[tuple[Any, dict[str, Any]]]:
        """Two images of the size that the model takes."""
        return [(p.repeat(4, 1)[:, :224].repeat(4, 2)[:, :, :224], m) for p, m in super().probes()]
