"""The trainer of DiffusionNFT, at the path that the documents name.

``DiffusionNft`` (``policy/trainer/rl/nft.py``) holds what is DiffusionNFT's own: which policy samples, what advantages
become, which noise levels are trained, and the loss. ``OnlineTask`` (``policy/trainer/rl/online.py``) runs a step of
every online algorithm with it. The velocities of the loss come from ``FlowModel.velocity``; of a ``DiffuserModel``
that is a call of the transformer with the arguments that ``nft_prepare_transformer_input`` makes.
"""

from cosmos_rl.policy.trainer.rl.nft import DiffusionNft
from cosmos_rl.policy.trainer.rl.online import OnlineTask

__all__ = ["DiffusionNft", "OnlineTask"]
