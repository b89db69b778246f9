"""Requests to one bucket of an S3-compatible store: what the spool needs of it, with errors as ``OSError``."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import importlib
import logging
import math
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cosmos_rl_reward.errors import StoreUnavailable, UserError

logger = logging.getLogger(__name__)
PAGE = 1000  # keys per listing and per removal, the most that S3 takes
_LOG_S = 10.0  # between two log lines about an unavailable store
_CONNECT_S, _READ_S, _ATTEMPTS = 5, 20, 3


class _Conflict(StoreUnavailable):
    """Two conditional writes of one object conflicted; neither is known to have won."""


class Entry(NamedTuple):
    """An object in a listing: key without the prefix, bytes, and unix time of its last change by the store's clock."""

    key: str
    size: int
    modified: float


def connect() -> Any:
    """A client of the store; endpoint, region and credentials are those of the AWS environment.

    Raises:
        UserError: boto3 is missing, or the environment's settings are wrong.
    """
    try:
        boto3, config = importlib.import_module("boto3"), importlib.import_module("botocore.config")
    except ImportError as error:
        raise UserError(f'blob_store: s3:// needs boto3 ({error}); pip install "cosmos_rl_reward[s3]"') from error
    for name in ("boto3", "botocore", "s3transfer"):
        logging.getLogger(name).setLevel(logging.WARNING)  # at DEBUG they show signatures and session tokens
    settings = config.Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=64,
        request_checksum_calculation="when_required",  # stores other than Amazon's may not know the newer checksums
        response_checksum_validation="when_required",
    )
    try:
        return boto3.client("s3", config=settings)
    except (ValueError, importlib.import_module("botocore.exceptions").BotoCoreError) as error:
        raise UserError(f"blob_store: the AWS environment variables or files are wrong: {error}") from error


class Bucket:
    """Objects below a prefix. Every method may raise ``StoreUnavailable``.

    Attributes:
        now: unix time of the last listing by the store's clock, which ages of objects refer to.
    """

    def __init__(self, name: str, prefix: str) -> None:
        self.name, self.prefix = name, prefix and f"{prefix}/"
        self.client = connect()
        self.now = 0.0
        self._errors = importlib.import_module("botocore.exceptions")
        self._boto3_error = importlib.import_module("boto3.exceptions").Boto3Error
        self._logged_at = -math.inf

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise errors of boto3 as ``FileNotFoundError``, ``FileExistsError`` or ``StoreUnavailable``."""
        try:
            yield
        except (self._errors.BotoCoreError, self._errors.ClientError) as error:
            raise self._explain(error) from error
        except self._boto3_error as error:
            raise StoreUnavailable(f"s3://{self.name}: {error}") from error

    def _explain(self, error: Any) -> OSError:
        response = getattr(error, "response", None) or {}
        code = response.get("Error", {}).get("Code", "")
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status == 404 and code != "NoSuchBucket":
            return FileNotFoundError(errno.ENOENT, "no such object")
        if status == 412:
            return FileExistsError(errno.EEXIST, "the object exists")
        if status == 409:
            return _Conflict(str(error))
        if time.monotonic() - self._logged_at > _LOG_S:
            self._logged_at = time.monotonic()
            logger.error("blob_store s3://%s/%s: %s", self.name, self.prefix, error)
        return StoreUnavailable(f"s3://{self.name}: {error}")

    def put(self, key: str, data: bytes, **condition: str) -> None:
        """Write an object."""
        with self._translate_errors():
            self.client.put_object(Bucket=self.name, Key=self.prefix + key, Body=data, **condition)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object that must not exist; False when it does."""
        for pause in (0.1, 0.2, 0.5, 1.0, None):
            try:
                self.put(key, data, IfNoneMatch="*")
                return True
            except FileExistsError:
                return False
            except _Conflict:
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError("not reached")

    def upload(self, key: str, path: Path) -> None:
        """Write a file of any size; the object appears when it is whole."""
        with self._translate_errors(), open(path, "rb") as file:
            self.client.upload_fileobj(file, self.name, self.prefix + key)

    def get(self, key: str) -> bytes | None:
        """The contents of an object, or None."""
        try:
            with self._translate_errors(), self._read(key) as body:
                return body.read()
        except FileNotFoundError:
            return None

    def download(self, key: str, path: Path) -> None:
        """Write the contents of an object to a file.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._translate_errors(), self._read(key) as body, open(path, "wb") as file:
            shutil.copyfileobj(body, file, 1 << 20)

    def _read(self, key: str) -> Any:
        return contextlib.closing(self.client.get_object(Bucket=self.name, Key=self.prefix + key)["Body"])

    def exists(self, key: str) -> bool:
        """Whether there is an object."""
        try:
            with self._translate_errors():
                self.client.head_object(Bucket=self.name, Key=self.prefix + key)
        except FileNotFoundError:
            return False
        return True

    def list_pages(self, below: str) -> Iterator[list[Entry]]:
        """Objects whose keys begin with ``below``, a page at a time."""
        where = {"Bucket": self.name, "Prefix": self.prefix + below, "PaginationConfig": {"PageSize": PAGE}}
        with self._translate_errors():
            for page in self.client.get_paginator("list_objects_v2").paginate(**where):
                self.now = _read_date(page)
                yield [
                    Entry(entry["Key"].removeprefix(self.prefix), entry["Size"], entry["LastModified"].timestamp())
                    for entry in page.get("Contents", ())
                ]

    def remove(self, keys: list[str]) -> None:
        """Remove objects; those that do not exist are no error."""
        for i in range(0, len(keys), PAGE):
            objects = [{"Key": self.prefix + key} for key in keys[i : i + PAGE]]
            with self._translate_errors():
                answer = self.client.delete_objects(Bucket=self.name, Delete={"Objects": objects, "Quiet": True})
            if failed := answer.get("Errors"):
                raise StoreUnavailable(f"s3://{self.name}: {len(failed)} objects cannot be removed: {failed[0]}")

    def check(self) -> None:
        """Test the store: write an object, and try to write it again.

        Raises:
            UserError: the store does not answer, rejects a request, or ignores the condition.
        """
        key = f"probe/{uuid.uuid4().hex}"
        try:
            self.create(key, b"")
            again = self.create(key, b"")
            if not self.exists(key) or self.get(key) is None or not any(self.list_pages(key)):
                raise StoreUnavailable(f"s3://{self.name}: the object just written is missing")
            self.remove([key])
        except OSError as error:
            raise UserError(
                f"blob_store: {error}; check the bucket, AWS_ENDPOINT_URL_S3 (for other stores than Amazon's) and the "
                "credentials, which need to put, get, list and delete"
            ) from error
        if again:
            raise UserError(
                f"blob_store: the store of s3://{self.name} ignores If-None-Match on put, so two results of one job "
                "could replace each other; use a store that honours it (Amazon S3, a recent MinIO) or a shared folder"
            )


def _read_date(answer: dict[str, Any]) -> float:
    """When the store responded, by its own clock."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    if date is None:
        return time.time()
    return email.utils.parsedate_to_datetime(date).timestamp()
