"""Errors that a user can mend. They are shown as one message without a traceback and end the program with code 2."""


class UserError(Exception):
    """A configuration value, a command line or the machine is wrong: says what, where, and what to do about it."""


class StoreUnavailable(OSError):
    """The object store does not answer, refuses, or there is no room here for what it has. Later it may go well."""
