"""Online reinforcement learning: one task for all algorithms, and one small object for each of them."""
