"""Errors that a user can mend. They are shown as one message without a traceback and end the run with exit code 2."""


class UserError(Exception):
    """Something outside our code is wrong: a config value, a file, a folder, a command line.

    The message says what is wrong, where (file, line or dotted key) and what to do about it.
    """


class OutOfMemory(Exception):
    """The memory of a device ran out; `phase` says during what. No mistake by itself, but the user can help it."""

    def __init__(self, phase: str) -> None:
        super().__init__(f"out of memory while {phase}")
        self.phase = phase
