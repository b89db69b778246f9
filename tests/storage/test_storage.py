"""Files, folders and links are absent or whole."""

import os
import signal
import sys
from pathlib import Path

import pytest

from cosmos_rl.storage import atomic
from tests.support import patience


def test_a_file_is_replaced_whole_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "a" / "config.toml"
    atomic.write_text(path, "one")
    atomic.write_text(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["config.toml"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_failed_staging_leaves_the_old_folder(tmp_path: Path) -> None:
    final = tmp_path / "step_1"
    with atomic.staging(final) as stage:
        (stage / "x").write_text("old")
    with pytest.raises(RuntimeError, match="half way"), atomic.staging(final) as stage:
        (stage / "x").write_text("new")
        raise RuntimeError("half way")
    assert (final / "x").read_text() == "old"
    assert os.listdir(tmp_path) == ["step_1"]


def test_staging_replaces_an_older_folder(tmp_path: Path) -> None:
    final = tmp_path / "step_1"
    for text in ("old", "new"):
        with atomic.staging(final) as stage:
            (stage / text).write_text(text)
    assert os.listdir(final) == ["new"]
    assert os.listdir(tmp_path) == ["step_1"]


def test_a_killed_writer_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from cosmos_rl.storage import atomic
stage = atomic.begin(Path({str(tmp_path / "step_1")!r}))
(stage / "x").write_text("half")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = patience.run([sys.executable, "-c", code])
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "step_1").exists()
    assert not (atomic.begin(tmp_path / "step_1") / "x").exists()


def test_remove_takes_a_folder_away(tmp_path: Path) -> None:
    (tmp_path / "step_1" / "policy").mkdir(parents=True)
    atomic.remove(tmp_path / "step_1")
    atomic.remove(tmp_path / "never_there")
    assert os.listdir(tmp_path) == []


def test_links_are_relative_and_repointed_in_one_step(tmp_path: Path) -> None:
    for name in ("run1", "run2"):
        (tmp_path / name).mkdir()
        atomic.replace_link(tmp_path / "newest", tmp_path / name)
        assert os.readlink(tmp_path / "newest") == name
    (tmp_path / "real").mkdir()
    with pytest.raises(FileExistsError, match="not a link"):
        atomic.replace_link(tmp_path / "real", tmp_path / "run1")
