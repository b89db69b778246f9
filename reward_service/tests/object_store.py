"""An S3-compatible store on loopback for tests: moto's server, which can be away for a while.

It handles one request at a time, since its check of If-None-Match and the write
that follows are not one step in it, as they are in a real store.
"""

import contextlib
import threading
import time
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from cosmos_rl_reward.config import build
from cosmos_rl_reward.s3 import S3Spool
from cosmos_rl_reward.store import open_spool

BUCKET, PREFIX, SECRET = "rewards", "some/where", "not-to-be-seen-anywhere"
URL = f"s3://{BUCKET}/{PREFIX}"


class _Quiet(WSGIRequestHandler):
    def log(self, *_):
        pass


class Store:
    """A store that can be away for a while and then has what it had."""

    def __init__(self):
        self._app, self._port = DomainDispatcherApplication(create_backend_app), 0
        self.start()
        self._url = f"http://127.0.0.1:{self._port}"

    def start(self):
        self._server = make_server("127.0.0.1", self._port, self._app, threaded=False, request_handler=_Quiet)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self):
        return {
            "AWS_ENDPOINT_URL_S3": self._url,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def empty(self):
        """Make the bucket again, empty."""
        bucket = _bucket()
        with contextlib.suppress(bucket.meta.client.exceptions.BucketAlreadyOwnedByYou):
            bucket.create()
        bucket.objects.delete()

    def names(self):
        """What is in the bucket, without the prefix."""
        return [entry.key.removeprefix(PREFIX + "/") for entry in _bucket().objects.all()]


def _bucket() -> Any:  # boto3 makes the classes of resources when it runs
    resource: Any = boto3.resource("s3")
    return resource.Bucket(BUCKET)


def in_store(folder, **config) -> S3Spool:
    """The spool of one process."""
    spool = open_spool(build({"state_dir": str(folder), "blob_store": URL, **config}, "test"))
    assert isinstance(spool, S3Spool)
    return spool


def until(condition, seconds, log):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.05)
