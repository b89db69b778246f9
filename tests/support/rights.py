"""What a user may not do who is not root, seen by root as well."""

import contextlib
import os
from collections.abc import Iterator

NOBODY = 65534


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Root is another user meanwhile; anybody else stays who they are."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
