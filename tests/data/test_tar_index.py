"""Where the members of tars are: kept between runs, within bounds, and read like files."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from benchmarks import growth
from cosmos_rl.data import tar_files
from cosmos_rl.data.pair_files import scan_pairs
from cosmos_rl.storage.cache_folder import tars_folder
from tests.support.tars import sample, write_tar


def large_tar(path: Path) -> Path:
    """With so many members that they are kept."""
    return write_tar(path, sample("a") | {f"{number:04}.cls": b"1" for number in range(600)})


def test_the_headers_of_a_large_tar_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))
    place = write_tar(tmp_path / "set" / "000.tar", {f"{number:04}.txt": b"x" for number in range(600)})
    known = tar_files.index_tar(place)
    (kept,) = (tmp_path / "cache" / "tars").iterdir()
    monkeypatch.setattr(tar_files, "_KNOWN", {})
    monkeypatch.setattr(tarfile, "open", None)  # no header can be read
    assert tar_files.index_tar(place) == known
    monkeypatch.undo()
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))
    kept.write_text('{"path": ')
    monkeypatch.setattr(tar_files, "_KNOWN", {})
    assert tar_files.index_tar(place) == known
    assert json.loads(kept.read_text())["members"]["0000.txt"] == [512, 1]
    write_tar(place, {"other.txt": b"y"})
    assert list(tar_files.index_tar(place).members) == ["other.txt"]


def test_the_headers_of_a_tar_are_kept_from_five_hundred_members_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))
    for count in (499, 500):
        place = write_tar(tmp_path / f"{count}.tar", {f"{number}.cls": b"1" for number in range(count)})
        assert len(tar_files.index_tar(place).members) == count
    (kept,) = tars_folder().iterdir()
    assert json.loads(kept.read_text())["path"] == str(tmp_path / "500.tar")


def test_a_member_is_read_like_a_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40
    whole = io.BytesIO(content)
    place = write_tar(tmp_path / "x.tar", {"a.bin": content, "b.bin": b"behind it"})
    with tar_files.opened(place / "a.bin") as file:
        assert not isinstance(file, str)
        assert file.read() == whole.read()
        for offset, whence in (
            (7, os.SEEK_SET),
            (300, os.SEEK_CUR),
            (9_000, os.SEEK_CUR),
            (-9, os.SEEK_END),
            (50_000, os.SEEK_SET),
        ):
            assert file.seek(offset, whence) == whole.seek(offset, whence)
            assert file.read(20) == whole.read(20)
        with pytest.raises(OSError, match="Invalid argument"):
            file.seek(-1)
    with pytest.raises(FileNotFoundError, match="x.tar/c.bin"), tar_files.opened(place / "c.bin"):
        pass
    (tmp_path / "folder.tar").mkdir()
    with tar_files.opened(tmp_path / "folder.tar" / "a.bin") as file:
        assert file == str(tmp_path / "folder.tar" / "a.bin")


def test_a_cache_folder_that_cannot_be_written_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("a file where the folder would be")
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "file"))
    for number in range(3):
        large_tar(tmp_path / "set" / f"{number}.tar")
    pairs, problems = scan_pairs(tmp_path / "set")
    assert ([pair.name for pair in pairs], problems) == (["0.tar/a", "1.tar/a", "2.tar/a"], [])
    (said,) = [message for message in caplog.messages if "cannot be written" in message]
    assert said == (
        f"{tmp_path}/file/tars: cannot be written (Not a directory), so that the headers of tars are read at each "
        "start; set COSMOS_CACHE_DIR to a folder that can"
    )


def test_indices_that_were_not_used_for_longest_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))
    places = [large_tar(tmp_path / f"set_{number}" / "0.tar") for number in range(4)]
    kept = list[Path]()
    for number, place in enumerate(places[:3]):
        scan_pairs(place.parent)
        (new,) = set(tars_folder().iterdir()) - set(kept)
        os.utime(new, (number, number))
        kept.append(new)
    monkeypatch.setattr(tar_files, "_KNOWN", {})
    tar_files.index_tar(places[0])  # now it was used last
    monkeypatch.setattr(tar_files, "_MOST_KEPT", int(2.5 * kept[0].stat().st_size))
    scan_pairs(places[3].parent)
    assert kept[0].exists()
    assert [file.exists() for file in kept[1:]] == [False, False]
    assert len(list(tars_folder().iterdir())) == 2


def test_the_measurements_leave_the_cache_folder_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", "mine")
    monkeypatch.setattr(growth, "COUNT", 200)
    monkeypatch.setattr(growth, "ENTRIES", 3)
    assert len(growth.measure()) == 9
    assert os.environ["COSMOS_CACHE_DIR"] == "mine"
