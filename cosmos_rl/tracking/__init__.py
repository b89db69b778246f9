"""What a person sees of a run: progress line, ``metrics.jsonl``, images, wandb."""
