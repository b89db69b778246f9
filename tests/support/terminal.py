"""A terminal: a command runs in a pseudo-terminal, and what it wrote is shown as on a screen of so many lines."""

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import Popen

from tests.support.patience import exit_code, wait_until

_CONTROLS = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Emulator:
    """The few controls that the live display uses: colours, cursor up, clear below, return, new line."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    def feed(self, text: str) -> None:
        """Take in what a program wrote."""
        at = 0
        for found in _CONTROLS.finditer(text):
            assert found.start() == at, f"unknown control at {text[at : at + 12]!r}"
            at = found.end()
            number, letter, end, plain = found.groups()
            if letter:
                self._control(letter, number)
            elif end == "\r":
                self.column = 0
            elif end == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + plain + line[self.column + len(plain) :]
                self.column += len(plain)
        assert at == len(text), f"unknown control at {text[at : at + 12]!r}"

    def _control(self, letter: str, number: str) -> None:
        if letter == "A":
            self.row = max(self.row - int(number or 1), 0)
        elif letter == "J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
        else:
            assert letter == "m", letter


def run_in_terminal(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    size: tuple[int, int] = (40, 100),
    watch: Callable[[Popen[bytes], Emulator], None] = lambda process, emulator: None,
) -> tuple[int, str, Emulator]:
    """Exit code, everything that was written, and the screen at the end; ``watch`` is called after each piece."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    process = Popen(command, env=environment, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    written, emulator = [], Emulator()

    def is_over() -> bool:
        try:
            piece = os.read(ours, 2**16)
        except BlockingIOError:
            return False
        except OSError:  # all who had it open have ended
            return True
        text = piece.decode()
        written.append(text)
        emulator.feed(text)
        watch(process, emulator)
        return not piece

    try:
        wait_until(is_over, f"the end of {command}")
        return exit_code(process), "".join(written), emulator
    finally:
        process.kill()
        process.wait()
        os.close(ours)
