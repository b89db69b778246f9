"""Training of diffusers pipelines: fine-tuning, and what it shares with reinforcement learning."""

import cosmos_rl.policy.model.diffusers  # noqa: F401 (first: it keeps out what diffusers imports and no job here uses)
