"""`cosmos-rl doctor`: is everything installed; with --config: does the model train. The launch imports none of it."""
