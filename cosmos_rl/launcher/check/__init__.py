"""`cosmos-rl check` and `check-model`: what a run would train, on how much memory, time and disk."""
