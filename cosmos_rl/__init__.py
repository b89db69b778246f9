"""cosmos-rl: post-training (SFT and reinforcement learning) of diffusion world models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cosmos_rl.launcher.api import FinishedRun, nft, sft

__version__ = "0.1.0"
__all__ = ["FinishedRun", "__version__", "nft", "sft"]


def __getattr__(name: str) -> Any:
    """The functions that train from Python, imported when they are first used."""
    if name not in ("FinishedRun", "nft", "sft"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cosmos_rl.launcher import api

    return getattr(api, name)
