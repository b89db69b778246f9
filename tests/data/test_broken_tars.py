"""Tars that are not whole, that change while a run reads them, or that have other files next to them."""

import gzip
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.data import tar_files
from cosmos_rl.data.images import load_image
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.data.pair_files import scan_pairs
from cosmos_rl.data.streams import MapStream, load_batches
from cosmos_rl.errors import UserError
from tests.support.tars import sample, write_tar


def cut(content: bytes) -> bytes:
    return content[: 3 * 512 - 100]  # within the first member's data


def cut_between(content: bytes) -> bytes:
    return content[: content.index(b"a.json")]  # where the next header would begin


def cut_in_the_mark(content: bytes) -> bytes:
    return content[: content.index(b"a.json") + 2 * 512 + 100]  # behind the last header and its data


def damage_header(content: bytes) -> bytes:
    place = content.index(b"a.json")
    return content[:place] + b"\xff" * 300 + content[place + 300 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:0], r"000.tar: cannot be read as a tar \(empty file\)"),
        (cut, r"000.tar: cannot be read as a tar \(unexpected end of data\)"),
        (cut_between, r"000.tar: ends at byte \d+ without the end mark of a tar: it was cut off, or is still"),
        (cut_in_the_mark, r"000.tar: ends at byte \d+ without the end mark of a tar: it was cut off, or is still"),
        (damage_header, r"000.tar: has no member at byte \d+, and more data behind it: it is damaged, or several"),
        (lambda content: content + content, r"000.tar: has no member at byte \d+, and more data behind it"),
        (gzip.compress, r"000.tar: is compressed, .* unpack it: mv .*000.tar (.*000.tar.gz) && gunzip \1"),
        (lambda content: b"no tar at all" * 99, r"000.tar: cannot be read as a tar \("),
    ],
)
def test_a_tar_that_is_not_whole_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    content = write_tar(tmp_path / "000.tar", {"a.png": bytes(1000)} | {"a.json": b"{}"}).read_bytes()
    (tmp_path / "000.tar").write_bytes(change(content))
    write_tar(tmp_path / "001.tar", sample("a"))
    with pytest.raises(UserError, match=f"1 of 2 tars cannot be read:\n  .*{message}"):
        scan_pairs(tmp_path)


def test_five_tars_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for count, more in ((5, ""), (6, "\n  and 1 more")):
        for number in range(count):
            (tmp_path / f"{number}.tar").write_bytes(b"")
        with pytest.raises(UserError) as error:
            scan_pairs(tmp_path)
        lines = "".join(
            f"\n  {tmp_path}/{number}.tar: cannot be read as a tar (empty file); make or copy it again"
            for number in range(5)
        )
        assert str(error.value) == f"{count} of {count} tars cannot be read:{lines}{more}"


def test_a_tar_with_links_is_refused(tmp_path: Path) -> None:
    """A sample that is a link to another one would be missing without a word."""
    for name in ("a.png", "a.txt"):
        (tmp_path / name).write_bytes(b"x")
        (tmp_path / name.replace("a", "b")).hardlink_to(tmp_path / name)
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for name in ("a.png", "a.txt", "b.png", "b.txt"):
            tar.add(tmp_path / name, name)
    with pytest.raises(UserError, match=r"set.tar: cannot be read as a tar \(b.png is a link; tar --dereference"):
        scan_pairs(tmp_path / "set.tar")


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".tar.xz", ".tar.zst"])
def test_compressed_tars_are_refused_with_what_unpacks_them(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"000{ending}").write_bytes(b"whatever")
    command = tar_files.COMPRESSED[ending]
    with pytest.raises(
        UserError, match=f"is compressed.*; unpack it: {command} {re.escape(str(tmp_path))}/\\*{ending}"
    ):
        scan_pairs(tmp_path)
    write_tar(tmp_path / "000.tar", sample("a"))  # gunzip -k keeps both
    assert len(scan_pairs(tmp_path)[0]) == 1


def test_a_tar_next_to_images_is_named_and_not_read(tmp_path: Path) -> None:
    for name, content in {**sample("a"), **sample("b")}.items():
        (tmp_path / name).write_bytes(content)
    write_tar(tmp_path / "backup.tar", sample("c"))
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.name for pair in pairs] == ["a", "b"]
    assert problems == ["backup.tar: is not read, since images lie next to it"]


def test_captions_and_tables_next_to_tars_are_named_and_not_read(tmp_path: Path) -> None:
    """But neither what img2dataset writes about a tar nor a wdinfo file."""
    write_tar(tmp_path / "000.tar", sample("a") | sample("b") | sample("c"))
    (tmp_path / "000_stats.json").write_text('{"count": 3}')
    (tmp_path / "wdinfo.json").write_text('{"data_list": ["000.tar"]}')
    assert scan_pairs(tmp_path)[1] == []
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "prompt": "what the images were once"}\n')
    (tmp_path / "metadata.csv").write_text("file_name,prompt\nb.png,more of them\n")
    (tmp_path / "a.txt").write_text("a new caption")
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.prompt for pair in pairs] == ["a", "b", "c"]
    names = ("a.txt", "metadata.jsonl", "metadata.csv")
    assert problems == [f"{name}: is not read, since the samples are in tars" for name in names]


@pytest.mark.parametrize("relative", [False, True])
def test_a_tar_that_changes_ends_the_run_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    """Prompts have the absolute path of their folder, also where the configuration has a relative one."""
    monkeypatch.chdir(tmp_path)
    folder = Path("set") if relative else tmp_path / "set"
    place = write_tar(folder / "000.tar", sample("a", 1) | sample("b", 2))
    assert len(scan_pairs(folder)[0]) == 2
    write_tar(place, sample("a", 3) | sample("c", 4))
    os.utime(place, ns=(0, 0))
    with pytest.raises(tar_files.TarChanged, match="000.tar: has changed since its members were listed"):
        load_image(folder.absolute() / "000.tar" / "a.png", 8, 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tar_that_changes_ends_the_run(tmp_path: Path, workers: int) -> None:
    place = write_tar(tmp_path / "000.tar", sample("a", 1) | sample("b", 2))
    pairs, stream = LocalPairs(tmp_path, 8, 8), MapStream(2, 1, seed=0)
    assert len(list(load_batches(pairs, stream, 0, 2, num_workers=workers))) == 2
    again = LocalPairs(tmp_path, 8, 8)  # nothing of it is decoded yet
    write_tar(place, sample("a", 3) | sample("c", 4))
    os.utime(place, ns=(0, 0))
    with pytest.raises(tar_files.TarChanged, match="000.tar: has changed since its members were listed; start again"):
        list(load_batches(again, stream, 0, 1, num_workers=workers))
    place.unlink()
    with pytest.raises(tar_files.TarChanged, match="000.tar: cannot be read any more"):
        again.take(1, 0)
    write_tar(place, sample("a", 3) | sample("c", 4))
    assert [pair.name for pair in LocalPairs(tmp_path, 8, 8).pairs] == ["000.tar/a", "000.tar/c"]


def test_a_broken_image_in_a_tar_is_one_bad_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "000.tar", sample("a") | {"b.png": b"no image", "b.txt": b"b"})
    with pytest.raises(UserError, match=r"000.tar/b.png: cannot be read as an image \(UnidentifiedImageError"):
        LocalPairs(tmp_path, 8, 8)[1]
