"""One set of settings for all loops, and the recipes that are compared."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Recipe:
    """An epoch: ``prompts`` x ``group`` samples, and what is learnt from them."""

    prompts: int = 10
    group: int = 8
    micro_batch: int = 40
    """Rows of a forward pass with gradient."""
    updates: int = 2
    """Optimiser steps in each pass over the samples."""
    passes: int = 1
    sampling_steps: int = 10
    levels: int = 4
    """Of the sampling steps' noise levels, those that each sample is trained at."""
    lr: float = 3e-3
    kl: float = 1e-3
    beta: float = 1.0
    """DiffusionNFT's."""
    decay: int = 1
    """Type of the decay of DiffusionNFT's old policy; 0 copies."""
    clip: float = 1e-4
    """flow_grpo's, of the likelihood ratio."""

    @property
    def samples(self) -> int:
        """Of an epoch."""
        return self.prompts * self.group


PUBLISHED = Recipe(prompts=4, group=24, micro_batch=24, updates=1, levels=9, lr=3e-4, kl=1e-4)
"""DiffusionNFT's for PickScore, with fewer prompts."""
STEP_RECIPES = {
    "published": PUBLISHED,
    "no KL": replace(PUBLISHED, kl=0.0),
    "no KL, old policy copied": replace(PUBLISHED, kl=0.0, decay=0),
}
# Chosen on the reward and the first judge, seed 0; benchmarks/README.md has all that was tried.
_SAME = Recipe()
_TUNED = Recipe(lr=6e-3, levels=2, beta=0.3)
_MORE_STEPS = Recipe(lr=6e-3, levels=2, updates=4, micro_batch=20)
OURS = {
    "quickstart's settings": _SAME,
    "beta 0.3": replace(_TUNED, kl=0.0, decay=0),
    "4 updates": replace(_MORE_STEPS, kl=0.0, decay=0),
}
NFT = {"quickstart's settings": _SAME, "beta 0.3": _TUNED, "4 updates": _MORE_STEPS}
GRPO = {
    "its settings": Recipe(levels=9, kl=0.0),
    "4 steps, clip 0.01": Recipe(levels=4, kl=0.0, lr=6e-3, clip=1e-2),
}
