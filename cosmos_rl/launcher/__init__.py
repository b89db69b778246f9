"""The `cosmos-rl` command and the entry of the processes that it starts."""
