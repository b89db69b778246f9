"""Example clients and the latency benchmark. They need httpx and numpy."""
