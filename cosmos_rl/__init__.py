"""cosmos-rl: post-training (SFT and reinforcement learning) of diffusion world models."""

__version__ = "0.1.0"
