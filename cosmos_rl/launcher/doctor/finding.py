"""What the doctor found, one line each."""

from dataclasses import dataclass

OK, WARN, FAIL, INFO = "ok", "warn", "FAIL", "-"


def choose_mark(passed: bool, otherwise: str = FAIL) -> str:
    """The mark of a check."""
    if passed:
        return OK
    return otherwise


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    mark: str
    subject: str
    text: str
    fix: str = ""
    """Command or advice, for lines that are not ok."""

    def __str__(self) -> str:
        line = f"{self.mark:5} {self.subject:22} {self.text}"
        if self.fix:
            line += f"\n{'':29}-> {self.fix}"
        return line
