"""One thread per process: two threads on a busy machine are many times slower for small models."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("same every time", derandomize=True)
settings.load_profile("same every time")
