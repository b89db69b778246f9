"""A terminal: a command runs in a pseudo-terminal, and what it wrote is shown as on a screen of so many lines."""

import codecs
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

_NOT_WHOLE = re.compile(r"\x1b(\[[\d;]*)?$")
_DRAWN_OVER = re.compile(r"(?=\x1b\[J)")
"""Where what was drawn is cleared."""
_CONTROLS = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Emulator:
    """The few controls that the live display uses: colours, cursor up, clear below, return, new line.

    What is wider than ``width`` columns continues in the next line.
    """

    def __init__(self, width: int = 1000) -> None:
        self.lines, self.row, self.column, self._width = [""], 0, 0, width

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
                self._next_line()
            else:
                self._write(plain)
        assert at == len(text), f"unknown control at {text[at : at + 12]!r}"

    def _write(self, plain: str) -> None:
        while plain:
            if self.column == self._width:
                self._next_line()
            part, plain = plain[: self._width - self.column], plain[self._width - self.column :]
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + part + line[self.column + len(part) :]
            self.column += len(part)

    def _next_line(self) -> None:
        self.row, self.column = self.row + 1, 0
        self.lines += [""] * (self.row + 1 - len(self.lines))

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
    """Exit code, everything that was written, and the screen at the end.

    ``size`` is in lines and columns. ``watch`` is called after each drawing, and what was written until the next one.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    process = Popen(command, env=environment, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    written, emulator = [], Emulator(size[1])
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""

    def is_over() -> bool:
        nonlocal rest
        try:
            piece = os.read(ours, 2**16)
        except BlockingIOError:
            return False
        except OSError:  # all who had it open have ended
            return True
        written.append(decoder.decode(piece))
        text = rest + written[-1]
        cut = _NOT_WHOLE.search(text)
        text, rest = (text[: cut.start()], cut[0]) if cut else (text, "")
        for drawing in _DRAWN_OVER.split(text):
            emulator.feed(drawing)
            watch(process, emulator)
        return not piece

    try:
        wait_until(is_over, f"the end of {command}")
        return exit_code(process), "".join(written), emulator
    finally:
        process.kill()
        process.wait()
        os.close(ours)
