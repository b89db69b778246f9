"""Where captions may stand, and what is wrong with those that cannot be used."""

import errno
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
from PIL import Image

from cosmos_rl.data.given import list_edited
from cosmos_rl.data.items import Part
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.data.pair_files import count_pairs, describe_pairs, load_pairs, scan_pairs
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from tests.support.videos import write_video


def save_images(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (8, 8), "red").save(folder / name)


def prompts_of(folder: Path) -> dict[str, str]:
    pairs, problems = scan_pairs(folder)
    assert problems == []
    return {pair.file: pair.prompt for pair in pairs}


@pytest.mark.parametrize("ending", [".txt", ".caption"])
@pytest.mark.parametrize(
    "content",
    [b"a red square", b"\xef\xbb\xbfa red square", b"a red\r\nsquare\r\n", b"\n  a red \n\n square", b"a red square\n"],
)
def test_plain_text_captions(tmp_path: Path, ending: str, content: bytes) -> None:
    save_images(tmp_path, "1.png")
    (tmp_path / f"1{ending}").write_bytes(content)
    assert prompts_of(tmp_path) == {"1.png": "a red square"}


@pytest.mark.parametrize("file_key", ["file_name", "image"])
@pytest.mark.parametrize("text_key", ["prompt", "text", "caption"])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_one_table_for_all(tmp_path: Path, kind: str, file_key: str, text_key: str) -> None:
    save_images(tmp_path, "1.png", "2.jpg")
    save_images(tmp_path / "sub", "1.png")
    rows = [("1.png", 'a "red", square'), ("2.jpg", "two\nlines"), ("sub/1.png", "another")]
    if kind == "csv":
        lines = [f"{file_key},{text_key},extra"]
        lines += [f'{file},"{text.replace(chr(34), chr(34) * 2)}",0' for file, text in rows]
    else:
        lines = [json.dumps({file_key: file, text_key: text, "extra": [1]}) for file, text in rows]
    (tmp_path / f"metadata.{kind}").write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    assert prompts_of(tmp_path) == dict(rows)
    pairs, _ = scan_pairs(tmp_path)
    assert describe_pairs(pairs) == f"3 images; captions: 3 metadata.{kind}"


def test_a_caption_names_the_image_that_is_edited(tmp_path: Path) -> None:
    save_images(tmp_path, "1.png", "2.png", "3.png")
    save_images(tmp_path / "before", "1.png", "2.png")
    (tmp_path / "1.json").write_text(json.dumps({"prompt": "make it red", "image": "before/1.png"}))
    rows = [{"file_name": "2.png", "image": "before/2.png", "prompt": "make it blue"}]
    rows.append({"file_name": "3.png", "image": "3.png", "text": "a square"})  # two names of one file
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = LocalPairs(tmp_path, 8, 8)
    assert (data.problems, data.edited) == ([], [str(tmp_path / "before/1.png"), str(tmp_path / "before/2.png"), ""])
    assert [data[i].edits for i in range(3)] == [tmp_path / "before/1.png", tmp_path / "before/2.png", None]
    assert Part(data, 1, 3).edited == data.edited[1:]
    named = [(one.prompt, one.metadata["image"]) for one in list_edited(data)]
    assert named == list(zip(data.prompts, data.edited, strict=True))


def test_a_folder_may_mix_all_forms(tmp_path: Path) -> None:
    save_images(tmp_path, *(f"{number}.png" for number in range(12)))
    for number in range(8):
        (tmp_path / f"{number}.json").write_text(json.dumps({"prompt": f"image {number}"}))
    for number in (8, 9):
        (tmp_path / f"{number}.txt").write_text(f"image {number}")
    (tmp_path / "10.caption").write_text("image 10")
    (tmp_path / "metadata.csv").write_text("file_name,text\n11.png,image 11\n")
    assert prompts_of(tmp_path) == {f"{number}.png": f"image {number}" for number in range(12)}
    assert count_pairs(tmp_path, video=False) == 12
    expected = "12 images; captions: 1 .caption, 8 .json, 2 .txt, 1 metadata.csv"
    assert describe_pairs(LocalPairs(tmp_path, 8, 8).pairs) == expected


def test_captions_that_differ_are_named_and_equal_ones_count_once(tmp_path: Path) -> None:
    save_images(tmp_path, "1.png", "2.png", "3.png")
    (tmp_path / "1.json").write_text('{"prompt": "a cat"}')
    (tmp_path / "1.txt").write_text("a dog")
    (tmp_path / "2.json").write_text('{"prompt": "a cat"}')
    (tmp_path / "2.txt").write_text("a cat\n")
    (tmp_path / "3.txt").write_text("a cat")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "3.png", "text": "a dog"}')
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.name for pair in pairs] == ["2"]
    assert problems == [
        "1.png: 1.json and 1.txt have different captions",
        "3.png: 3.txt and metadata.jsonl, line 1 have different captions",
    ]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"2.txt": b""}, "2.txt: has an empty prompt"),
        ({"2.txt": b" \n\n"}, "2.txt: has an empty prompt"),
        ({"2.caption": b""}, "2.caption: has an empty prompt"),
        ({"2.json": b'{"prompt": ""}'}, "2.json: has an empty prompt"),
        ({"2.json": b'{"prompt": " \\n"}'}, "2.json: has an empty prompt"),
        ({"2.json": b'{"caption": ""}'}, "2.json: has an empty prompt"),
        ({"2.txt": b"caf\xe9"}, "2.txt: is not UTF-8 text (byte 0xe9 at position 3); save it as UTF-8"),
        ({"2.txt": "a cat".encode("utf-16")}, "2.txt: is not UTF-8 text but UTF-16; save it as UTF-8"),
        ({"2.txt": "a cat".encode("utf-16-le")}, "2.txt: has null characters, as UTF-16 without a byte order mark"),
        ({"2.txt": "Müller".encode("utf-16-be")}, "2.txt: has null characters, as UTF-16 without a byte order mark"),
        ({"2.txt": b"\x89PNG\0 and more"}, "2.txt: is not UTF-8 text (byte 0x89 at position 0)"),
        ({"2.json": '{"prompt": "a"}'.encode("utf-16-le")}, "2.json: has null characters, as UTF-16 without a byte"),
        ({"2.json": b'{"prompt": "a\\u0000b"}'}, "2.json: has null characters (\\u0000); remove them"),
        ({"metadata.csv": "file_name,text\n".encode("utf-16-le")}, "metadata.csv: has null characters, as UTF-16 with"),
        ({"metadata.jsonl": "{}".encode("utf-16-be")}, "metadata.jsonl: has null characters, as UTF-16 without"),
        ({}, "2.png: has no caption 2.json, .txt or .caption"),
        (
            {"metadata.csv": b"file_name,text\n2.png,\n"},
            "metadata.csv, line 2: has no text under prompt, text",
        ),
        ({"metadata.csv": b"file,text\n2.png,a\n"}, "metadata.csv, line 2: has no text under file_name, image, video"),
        ({"metadata.csv": b"file_name,text\n3.png,a\n"}, "metadata.csv, line 2: has no image 3.png"),
        ({"metadata.csv": b"file_name,text\n../2.png,a\n"}, "line 2: ../2.png is not a path within the folder"),
        ({"metadata.csv": b"file_name,text\n/etc/2.png,a\n"}, "line 2: /etc/2.png is not a path within the folder"),
        ({"metadata.csv": b"file_name,text\n2.gif,a\n"}, "line 2: 2.gif is of a kind that is not read"),
        ({"metadata.csv": b'file_name,text\n2.png,"a\n'}, "is not CSV"),
        ({"metadata.csv": b"file_name,text\n2.png,caf\xe9\n"}, "metadata.csv: is not UTF-8 text (byte 0xe9 at"),
        ({"metadata.jsonl": b'{"file_name": "2.png"\n'}, "metadata.jsonl, line 1: is not valid JSON"),
        ({"metadata.jsonl": b"[]\n"}, "metadata.jsonl, line 1: is not an object"),
        (
            {"metadata.jsonl": b'{"file_name": "2.png", "text": "a", "prompt": "b"}'},
            "has 2 different texts under",
        ),
        ({"metadata.jsonl": b'{"file_name": "2.png", "text": "\\ud83d"}'}, "line 1: has half of a character"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, files: dict[str, bytes], problem: str) -> None:
    save_images(tmp_path, "1.png", "2.png")
    (tmp_path / "1.txt").write_text("a cat")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.name for pair in pairs] == ["1"]
    assert any(problem in line for line in problems), problems


@pytest.mark.parametrize("kind", ["images", "videos"])
def test_the_layout_of_cosmos_predict(tmp_path: Path, kind: str) -> None:
    video = kind == "videos"
    for number in range(3):
        (tmp_path / "metas").mkdir(exist_ok=True)
        (tmp_path / "metas" / f"{number}.txt").write_text(f"clip {number}\n")
        if video:
            write_video(tmp_path / kind / f"{number}.mp4", 5)
        else:
            save_images(tmp_path / kind, f"{number}.png")
    (tmp_path / "metas" / "9.txt").write_text("clip 9")
    pairs, problems, _ = load_pairs(tmp_path, video=video)
    assert [(pair.name, pair.prompt) for pair in pairs] == [(f"{kind}/{n}", f"clip {n}") for n in range(3)]
    assert problems == [f"metas/9.txt: has no {kind[:-1]}"]
    assert count_pairs(tmp_path, video=video) == 3
    data = LocalPairs(tmp_path, 16, 16, frames=5 if video else None)
    assert data[1].prompt == "clip 1"
    assert data[1].visual.shape == ((3, 5, 16, 16) if video else (3, 16, 16))


@pytest.mark.parametrize("name", ["text_embedding", "t5_xxl"])
def test_text_features_of_cosmos_predict_are_accepted_and_never_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    write_video(tmp_path / "videos" / "a.mp4", 5)
    for folder in ("metas", name):
        (tmp_path / folder).mkdir()
    (tmp_path / "metas" / "a.txt").write_text("a clip")
    run = tmp_path / "ran"
    # a pickle that would write a file when it is loaded
    (tmp_path / name / "a.pickle").write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % bytes(run))
    with caplog.at_level("INFO", logger="cosmos"):
        data = LocalPairs(tmp_path, 16, 16, frames=5)
    assert data[0].prompt == "a clip"
    assert data.problems == []
    said = f"{tmp_path / name} is not needed: captions are encoded by the model's own text encoder"
    assert caplog.messages.count(said) == 1
    assert not run.exists()


def refuse_to_write(**_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_caption_is_written_for_every_video_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write_video(tmp_path / "videos" / f"{number}.mp4", 5)
    (tmp_path / "metas").mkdir()
    (tmp_path / "metas" / "1.txt").write_text("my own words")
    command = ["create-prompts", "--dataset_path", str(tmp_path), "--prompt", "A video of sks teal robot."]
    assert main(command) == 0
    assert "2 captions written, 1 kept" in capsys.readouterr().out
    pairs, problems = scan_pairs(tmp_path, video=True)
    assert problems == []
    assert [pair.prompt for pair in pairs] == [
        "A video of sks teal robot.",
        "my own words",
        "A video of sks teal robot.",
    ]
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse_to_write)  # the disk has become read-only
    assert main(command) == 0
    assert "0 captions written, 3 kept" in capsys.readouterr().out
    (tmp_path / "metas" / "2.txt").unlink()
    assert main(command) == 2
    assert "nothing can be written there (Read-only file system); captions lie in" in capsys.readouterr().err


def test_the_command_has_its_documented_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "videos" / "a.mp4", 5)
    name = "scripts.create_prompts_for_nemo_assets"
    monkeypatch.setattr(sys, "argv", [name, "--dataset_path", str(tmp_path), "--prompt", "A video of sks teal robot."])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    assert end.value.code == 0
    assert (tmp_path / "metas" / "a.txt").read_text() == "A video of sks teal robot.\n"


@pytest.mark.parametrize(
    ("more", "message"), [([], "videos: no video there"), (["--is_image"], "images: no image there")]
)
def test_a_folder_without_videos_gets_no_captions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["create-prompts", "--dataset_path", str(tmp_path), "--prompt", "a", *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "metas").exists()


def test_a_table_alone_with_nothing_usable_says_why(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text("file_name,text\n1.png,a cat\n")
    with pytest.raises(UserError, match=r"no usable pair.*\n  metadata.csv, line 2: has no image 1.png"):
        scan_pairs(tmp_path)
