"""Images, pairs and streams."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cosmos_rl.data.images import load_image, to_uint8
from cosmos_rl.data.items import BadSample, Item, Part, to_item
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.data.prompts import PromptFile
from cosmos_rl.data.streams import MapStream, Skipped, load_batches
from cosmos_rl.errors import UserError


def save_pair(folder: Path, name: str, suffix: str = ".png", caption: object = None) -> None:
    Image.new("RGB", (8, 8), "red").save(folder / f"{name}{suffix}")
    (folder / f"{name}.json").write_text(json.dumps({"prompt": name} if caption is None else caption))


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".png", ".webp", ".PNG"])
def test_every_documented_image_format_is_read(tmp_path: Path, suffix: str) -> None:
    save_pair(tmp_path, "a.b json c", suffix)
    (item,) = LocalPairs(tmp_path, 16, 24)
    assert (item.name, item.prompt) == ("a.b json c", "a.b json c")
    assert item.visual.shape == (3, 16, 24)
    assert item.visual.mean(dim=(1, 2)).tolist() == pytest.approx([1, -1, -1], abs=0.03)  # red, after jpeg's rounding


def test_pairs_stay_paired_when_some_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "c", "e", "g"):
        save_pair(tmp_path, name)
    (tmp_path / "b.json").write_text('{"prompt": "no image"}')
    Image.new("RGB", (8, 8)).save(tmp_path / "d.png")
    save_pair(tmp_path, "f", caption=["not an object"])
    pairs = LocalPairs(tmp_path, 8, 8)
    assert [(item.name, item.prompt) for item in pairs] == [(n, n) for n in "aceg"]
    assert sorted(p.split(":")[0] for p in pairs.problems) == ["b.json", "d.png", "f.json"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "found nothing"),
        (["a.jpg", "b.txt"], "found 1 .jpg, 1 .txt"),
        (["texts/a.txt", "videos/a.mp4"], r"found 2 folders \(texts, videos\)"),
        (["a.json"], "found 1 .json"),
    ],
)
def test_a_folder_of_another_layout_is_described(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=message) as error:
        LocalPairs(tmp_path, 8, 8)
    assert "expected images <name>.jpg|" in str(error.value)


def test_a_missing_folder_is_named_with_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}/nowhere: no such folder"):
        LocalPairs("nowhere", 8, 8)


def test_more_problems_than_pairs_stop_the_run(tmp_path: Path) -> None:
    save_pair(tmp_path, "a")
    for i in range(3):
        (tmp_path / f"x{i}.json").write_text("not json")
    with pytest.raises(UserError, match="3 files are left out"):
        LocalPairs(tmp_path, 8, 8)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    save_pair(tmp_path, "a")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    with pytest.raises(UserError, match=r"a\.png: cannot be read as an image"):
        LocalPairs(tmp_path, 8, 8)[0]


def test_all_image_modes_give_rgb_in_the_right_size(tmp_path: Path) -> None:
    half = Image.new("RGBA", (300, 50), (0, 0, 0, 128))
    images = {
        "rgb.png": Image.new("RGB", (64, 64), (255, 255, 255)),
        "rgba.png": half,
        "l.png": Image.new("L", (70, 90), 128),
        "palette.png": half.convert("P"),
        "cmyk.jpg": Image.new("CMYK", (64, 64)),
        "one.png": Image.new("RGB", (1, 1)),
        "deep.png": Image.fromarray(np.full((64, 128), 32768, dtype=np.uint16)),
    }
    for name, image in images.items():
        image.save(tmp_path / name)
    loaded = {name: load_image(tmp_path / name, 64, 128) for name in images}
    assert {tuple(p.shape) for p in loaded.values()} == {(3, 64, 128)}
    assert all(float(p.min()) >= -1 and float(p.max()) <= 1 for p in loaded.values())
    assert float(loaded["rgba.png"].mean()) == pytest.approx(0.0, abs=0.01)  # half black over white
    assert float(loaded["cmyk.jpg"].min()) > 0.98  # no ink is white
    assert float(loaded["deep.png"].mean()) == pytest.approx(0.0, abs=0.01)  # half of 16 bits, not clipped to 255


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 10), "black")
    image.paste("white", (0, 0, 10, 10))  # left half white
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise: the left side is on top
    image.save(tmp_path / "x.png", exif=exif)
    tensor = load_image(tmp_path / "x.png", 20, 10)
    assert float(tensor[:, :10].min()) == 1.0
    assert float(tensor[:, 10:].max()) == -1.0


def test_the_crop_is_the_centre_and_keeps_the_aspect(tmp_path: Path) -> None:
    image = Image.new("RGB", (300, 100), "black")
    image.paste("white", (100, 0, 200, 100))
    image.save(tmp_path / "x.png")
    assert float(load_image(tmp_path / "x.png", 100, 100).min()) == 1.0


def test_uint8_conversion_rounds_and_clips() -> None:
    image = torch.tensor([-0.1, 0.0, 0.5, 127.4 / 255, 1.2]).expand(1, 3, 1, 5)
    assert to_uint8(image)[0, 0, :, 0].tolist() == [0, 0, 128, 127, 255]


def test_elements_of_users_data_sets_are_checked() -> None:
    assert to_item({"visual": torch.zeros(3, 4, 4), "prompt": "x"}, 5).name == "5"
    for raw, message in [
        ({"image": 1}, r"element 5: need a mapping with 'visual' and 'prompt', found \['image'\]"),
        ({"visual": torch.zeros(4, 4), "prompt": "x"}, "must be a float tensor"),
        ({"visual": torch.zeros(3, 4, 4), "prompt": None}, "'prompt' must be a string"),
        (3, "found int"),
    ]:
        with pytest.raises(UserError, match=message):
            to_item(raw, 5)


def test_prompt_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('[{"prompt": "a"}, {"prompt": "b", "seed": 1}]')
    assert list(PromptFile(path)) == ["a", "b"]
    for text, message in [("{", "not valid JSON"), ("[]", "no list"), ('[{"text": "a"}]', "in row 0;")]:
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            PromptFile(path)
    with pytest.raises(UserError, match="cannot be read"):
        PromptFile(tmp_path / "none.json")


@given(length=st.integers(1, 30), batch=st.integers(1, 9), shuffle=st.booleans(), drop_last=st.booleans())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_every_epoch_holds_each_item_once(length: int, batch: int, shuffle: bool, drop_last: bool) -> None:
    if drop_last and batch > length:
        with pytest.raises(UserError, match="an epoch would have no step"):
            MapStream(length, batch, 0, shuffle, drop_last)
        return
    stream = MapStream(length, batch, 0, shuffle, drop_last)
    steps = stream.steps_per_epoch
    epochs = [[p.index for s in range(e * steps, (e + 1) * steps) for p in stream.positions(s)] for e in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == (steps * batch if drop_last else length)
    if shuffle and length > 8:
        assert epochs[0] != epochs[1]
    ids = [p.sample_id for s in range(3 * steps) for p in stream.positions(s)]
    assert ids == list(range(len(ids)))


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_stream_resumed_anywhere_continues_where_it_stopped(drop_last: bool) -> None:
    dataset = [Item(torch.zeros(3, 1, 1), str(i)) for i in range(10)]
    stream = MapStream(10, 3, 0, True, drop_last)
    total = 3 * stream.steps_per_epoch

    def prompts(first: int, **where: Any) -> list[list[str]]:
        return [[item.prompt for item in batch.items] for batch in load_batches(dataset, stream, first, total, **where)]

    straight = prompts(0)
    assert [prompts(first) for first in range(total)] == [straight[first:] for first in range(total)]
    halves = [prompts(0, rank=rank, world_size=2) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*halves, strict=True)] == [sorted(batch) for batch in straight]
    assert prompts(2, num_workers=2) == straight[2:]


def test_only_what_is_needed_is_decoded_after_a_resume() -> None:
    class Counting(list):  # type: ignore[type-arg]
        calls = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            self.calls += 1
            return super().__getitem__(index)

    dataset = Counting(Item(torch.zeros(3, 1, 1), str(i)) for i in range(100))
    assert len(list(load_batches(dataset, MapStream(100, 2, 0), 40, 44))) == 4
    assert dataset.calls == 8


def broken_folder(tmp_path: Path, names: str, broken: str) -> LocalPairs:
    for name in names:
        save_pair(tmp_path, name)
    for name in broken:
        (tmp_path / f"{name}.png").write_bytes(b"no image")
    return LocalPairs(tmp_path, 8, 8)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_image_is_named_and_the_next_takes_its_place(tmp_path: Path, num_workers: int) -> None:
    pairs = broken_folder(tmp_path, "abcdef", "be")
    skipped = Skipped(6, 0.4)
    stream = MapStream(6, 2, 0, shuffle=False)
    batches = list(load_batches(pairs, stream, 0, 3, num_workers=num_workers, skipped=skipped))
    assert [[item.name for item in batch.items] for batch in batches] == [["a", "c"], ["c", "d"], ["f", "f"]]
    assert sorted(skipped.reasons) == [1, 4]
    assert all("cannot be read as an image" in reason for reason in skipped.reasons.values())
    resumed = list(load_batches(pairs, stream, 2, 3, num_workers=num_workers, skipped=Skipped(6, 0.4)))
    assert [item.name for item in resumed[0].items] == ["f", "f"]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("frac", "allowed"), [(0.0, 0), (0.05, 1), (0.34, 2)])
def test_more_broken_images_than_allowed_end_the_run(
    tmp_path: Path, frac: float, allowed: int, num_workers: int
) -> None:
    pairs = broken_folder(tmp_path, "abcdef", "bcd")
    with pytest.raises(UserError, match=f"{allowed + 1} of 6 samples cannot be read, more than"):
        list(load_batches(pairs, MapStream(6, 1, 0), 0, 6, num_workers=num_workers, skipped=Skipped(6, frac)))


def test_a_data_set_of_broken_images_ends_the_run(tmp_path: Path) -> None:
    pairs = broken_folder(tmp_path, "abc", "abc")
    with pytest.raises(UserError, match="3 samples in a row cannot be read"):
        list(load_batches(pairs, MapStream(3, 1, 0), 0, 3, skipped=Skipped(3, 1.0)))


def test_an_error_of_a_users_data_set_says_in_which_element() -> None:
    class Failing(list):  # type: ignore[type-arg]
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            raise KeyError("oops")

    with pytest.raises(KeyError, match="oops") as error:
        list(load_batches(Failing([1, 2]), MapStream(2, 1, 0, shuffle=False), 0, 1))
    assert error.value.__notes__ == ["in element 0 of the data set"]


def test_a_part_of_a_data_set_keeps_its_captions(tmp_path: Path) -> None:
    pairs = broken_folder(tmp_path, "abcd", "")
    part = Part(pairs, 1, 3)
    assert [item.name for item in part] == part.prompts == ["b", "c"]
    assert Part([1, 2, 3], 1, 2).prompts is None


def test_positions_of_a_long_run_are_made_while_they_are_needed() -> None:
    stream = MapStream(1_000_000, 10, 0, shuffle=False)
    batches = load_batches([Item(torch.zeros(3, 1, 1), "x")] * 1_000_000, stream, 0, 10**9)
    assert next(batches).positions[0].sample_id == 0


# ---- captions ------------------------------------------------------------------------------------------------------


def captions(folder: Path, content: bytes, count: int = 8) -> Path:
    """``count`` images with the same bytes as caption."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.new("RGB", (8, 8)).save(folder / f"{i}.png")
        (folder / f"{i}.json").write_bytes(content)
    return folder


BOM = b"\xef\xbb\xbf"
WRONG_CAPTIONS = {
    "another key": (b'{"title": "a cat"}', "has no text under 'prompt'; it has 'title'"),
    "two texts": (b'{"text": "a", "caption": "b"}', "has no text under 'prompt'; it has 'text', 'caption'"),
    "null": (b'{"prompt": null}', "has no text under 'prompt'; that is null"),
    "a list": (b'["a cat"]', "has no text under 'prompt'; it is not an object but a list"),
    "nothing": (b"{}", "has no text under 'prompt'; it has nothing"),
    "Latin-1": ('{"prompt": "M\u00fcller"}'.encode("latin-1"), "is not UTF-8 text (byte 0xfc at position 13)"),
    "UTF-16": ('{"prompt": "a cat"}'.encode("utf-16"), "is not UTF-8 text but UTF-16; save it as UTF-8"),
    "half a character": (rb'{"prompt": "\ud83d x"}', r"has half of a character (\ud83d) at position 0"),
    "deeply nested": (b"[" * 100_000 + b"]" * 100_000, "is not valid JSON (nested too deeply)"),
    "many digits": (b'{"prompt": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    "a film": (b'{"prompt": "' + b"x" * 2**20 + b'"}', "is not a caption: it has more than"),
}


@pytest.mark.parametrize("name", WRONG_CAPTIONS)
def test_captions_that_are_all_wrong_are_named_with_the_reason(tmp_path: Path, name: str) -> None:
    content, why = WRONG_CAPTIONS[name]
    with pytest.raises(UserError) as error:
        LocalPairs(captions(tmp_path, content), 8, 8)
    message = str(error.value)
    assert f"0.json: {why}" in message
    assert "4.json" in message
    assert "and 3 more" in message
    assert len(message) < 2000
    save_pair(tmp_path, "good")
    with pytest.raises(UserError, match="More files are left out than used"):
        LocalPairs(tmp_path, 8, 8)
    for i in range(8):
        save_pair(tmp_path, f"good{i}")
    pairs = LocalPairs(tmp_path, 8, 8)
    assert len(pairs) == 9
    assert why in pairs.problems[0]


@pytest.mark.parametrize("count", [1, 8])
def test_a_byte_order_mark_is_no_part_of_a_caption(tmp_path: Path, count: int) -> None:
    captions(tmp_path, BOM + '{"prompt": "M\u00fcller"}'.encode(), count)
    for i in range(count, 8):
        save_pair(tmp_path, f"{i}", caption={"prompt": "M\u00fcller"})
    pairs = LocalPairs(tmp_path, 8, 8)
    assert (pairs.prompts, pairs.problems) == (["M\u00fcller"] * 8, [])


def test_files_of_kinds_that_are_not_read_are_named(tmp_path: Path) -> None:
    for name in "abc":
        save_pair(tmp_path, name)
    Image.new("RGB", (8, 8)).save(tmp_path / "t.tiff")
    (tmp_path / "t.json").write_text('{"prompt": "t"}')
    Image.new("RGB", (8, 8)).save(tmp_path / "u.png")
    (tmp_path / "u.rtf").write_text("a caption")
    assert LocalPairs(tmp_path, 8, 8).problems == [
        "t.json: has no image; t.tiff is of a kind that is not read",
        "u.png: has no caption u.json, .txt or .caption; u.rtf is of a kind that is not read",
    ]


def test_file_names_that_are_no_text_are_read_and_shown(tmp_path: Path) -> None:
    save_pair(tmp_path, "a")
    name = os.fsdecode(b"\xff")
    try:
        save_pair(tmp_path, name, caption={"prompt": "b"})
    except OSError:
        pytest.skip("this file system takes only names that are text")
    pairs = LocalPairs(tmp_path, 8, 8)
    assert [(item.name, item.prompt) for item in pairs] == [("a", "a"), ("\\udcff", "b")]
    (tmp_path / f"{name}.png").write_bytes(b"no image")
    with pytest.raises(BadSample, match=r"\\udcff.png: cannot be read as an image"):
        LocalPairs(tmp_path, 8, 8)[1]


def test_a_decoder_may_raise_what_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.jpg")
    for error in (MemoryError(), RecursionError("deep"), KeyError("x"), struct.error("unpack")):

        def fail(image: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("cosmos_rl.data.images.ImageOps.exif_transpose", fail)
        with pytest.raises(BadSample, match=rf"x.jpg: cannot be read as an image \({type(error).__name__}"):
            load_image(tmp_path / "x.jpg", 8, 8)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_half_a_character_in_a_data_set_of_ones_own_is_one_bad_sample(num_workers: int) -> None:
    data = [{"visual": torch.zeros(3, 2, 2), "prompt": text} for text in ("a", "\ud83d b", "c")]
    skipped = Skipped(3, 0.4)
    stream = MapStream(3, 3, 0, shuffle=False)
    (batch,) = load_batches(data, stream, 0, 1, num_workers=num_workers, skipped=skipped)
    assert [item.prompt for item in batch.items] == ["a", "c", "c"]
    assert "element 1: 'prompt' has half of a character (\\ud83d)" in skipped.reasons[1]
