"""The changes that `benchmarks.peers` makes to copies of other projects' files, on a small file of our own."""

from pathlib import Path

import pytest

from benchmarks.peers.patch import Change, copy_with_changes
from cosmos_rl.errors import UserError

SOURCE = """def main(count):
    device = "gpu"
    for number in range(count):
        # WORK
        number += 1
"""
DEVICE = Change("no GPU", "scripts/loop.py", '"gpu"', '"cpu"')
WAIT = Change("wait", "scripts/loop.py", r"(?m)^( +)# WORK$", r'\1yield "work", locals()')


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "theirs" / "scripts").mkdir(parents=True)
    (tmp_path / "theirs" / "scripts" / "loop.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "theirs" / "scripts" / "picture.png").write_bytes(b"large")
    return tmp_path / "theirs"


def test_changes_are_made_in_a_copy_and_the_loop_waits(checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy_with_changes(checkout, copy, ("scripts",), (DEVICE, WAIT))
    names: dict[str, object] = {}
    exec(compile((copy / "scripts" / "loop.py").read_text(encoding="utf-8"), "loop.py", "exec"), names)
    seen = [(phase, dict(local)) for phase, local in names["main"](2)]  # type: ignore[operator]
    assert seen == [("work", {"count": 2, "device": "cpu", "number": number}) for number in (0, 1)]
    assert (checkout / "scripts" / "loop.py").read_text(encoding="utf-8") == SOURCE
    assert [path.name for path in (copy / "scripts").iterdir()] == ["loop.py"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Change("no GPU", "scripts/loop.py", '"tpu"', '"cpu"'), "the change 'no GPU' matches 0 times in place of 1"),
        (Change("a name", "scripts/loop.py", "number", "n"), "the change 'a name' matches 2 times in place of 1"),
        (Change("no GPU", "scripts/gone.py", '"gpu"', '"cpu"'), "no such file, for the change 'no GPU'"),
    ],
)
def test_a_file_that_is_not_as_expected_is_named(checkout: Path, tmp_path: Path, change: Change, said: str) -> None:
    with pytest.raises(UserError) as caught:
        copy_with_changes(checkout, tmp_path / "copy", ("scripts",), (change,))
    assert str(checkout / change.file) in str(caught.value)
    assert said in str(caught.value)


def test_what_is_no_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder scripts; give the root of a checkout"):
        copy_with_changes(tmp_path, tmp_path / "copy", ("scripts",), ())
