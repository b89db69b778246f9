"""Errors that a user can fix. They are shown as one message without a traceback and end the program with code 2."""


class UserError(Exception):
    """A configuration value, a command line or the machine is wrong: says what, where, and what to do about it."""


class StoreUnavailable(OSError):
    """The object store does not answer, rejects a request, or its data does not fit here. A later try may succeed."""
