"""One thread per process: two threads on a busy machine are many times slower for small models."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
