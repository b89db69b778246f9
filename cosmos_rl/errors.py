"""Errors that a user can fix. They are shown as one message without a traceback."""


class UserError(Exception):
    """Something outside our code is wrong: a config value, a file, a folder, a command line.

    The message says what is wrong, where (file, line or dotted key) and what to do about it.
    """

    exit_code = 2
    """Of the command that it ends."""


class TrainingStoppedError(UserError):
    """The job runs as it was asked to, but its training went wrong; starting it again would not help."""

    exit_code = 1


class OutOfMemory(Exception):
    """The memory of a device ran out; `phase` says during what. The user can do something about it."""

    def __init__(self, phase: str) -> None:
        super().__init__(f"out of memory while {phase}")
        self.phase = phase
