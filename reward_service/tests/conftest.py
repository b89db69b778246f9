"""One thread per process: two threads on a busy machine are many times slower for small models."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("same every time", derandomize=True)
settings.load_profile("same every time")


@pytest.fixture(scope="module")
def server():
    from tests.object_store import Store  # only these tests need boto3 and moto

    store = Store()
    yield store
    store.stop()


@pytest.fixture
def store(server, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.empty()
    return server
