"""Samples in tars: the same ones as in a folder, whichever way they are packed. Tars that
cannot be used: `test_broken_tars.py`."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cosmos_rl.data import tar_files
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.data.pair_files import describe_pairs, load_pairs, scan_pairs
from cosmos_rl.data.prompts import BEGINNING, is_prompt_file, read_prompts
from cosmos_rl.data.streams import MapStream, load_batches
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from tests.support.checks import check
from tests.support.states import assert_same_state, saved_state
from tests.support.tars import image_bytes, pack, pack_parallel, sample, write_tar
from tests.support.trainer_runs import train
from tests.support.videos import write_video

FORMS = ["tars", "one tar", "parallel tars", "wdinfo", "wdinfo of parallel tars"]


def packed(form: str, images: Path, place: Path) -> Path:
    """The folder of twelve images in one of the forms."""
    if form == "tars":
        return pack(images, place, 5)
    if form == "one tar":
        return pack(images, place, 12) / "000.tar"
    kinds = {".png": "images", ".json": "metas"}
    root = pack(images, place, 5) if form == "wdinfo" else pack_parallel(images, place, 5, kinds)
    if form == "parallel tars":
        return root
    info = {"root": str(root), "data_list": ["000.tar", "001.tar", "002.tar"], "total_key_count": 12, "chunk_size": 5}
    place.with_suffix(".json").write_text(json.dumps(info))
    return place.with_suffix(".json")


@pytest.mark.parametrize("form", FORMS)
def test_tars_hold_the_items_of_the_folder(tmp_path: Path, image_folder: Path, form: str) -> None:
    loose, shards = LocalPairs(image_folder, 16, 24), LocalPairs(packed(form, image_folder, tmp_path / "set"), 16, 24)
    assert shards.prompts == loose.prompts
    assert shards.problems == []
    for number in range(12):
        mine, theirs = shards[number], loose[number]
        assert torch.equal(mine.visual, theirs.visual)
        assert mine.name.endswith(f".tar/{theirs.name}")
        assert shards.measure(number).sides == loose.measure(number).sides == (40, 48)
    sources = [shards[number].source for number in range(12)]
    identified = [item.source for number in range(12) if (item := shards.identify(number, None)) is not None]
    assert sources == identified
    assert len(set(sources)) == 12
    tars = 1 if form == "one tar" else 3
    assert describe_pairs(shards.pairs) == f"12 images in {tars} tars; captions: 12 .json"


@pytest.mark.parametrize("form", ["tars", "parallel tars"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_share_the_samples_of_tars(
    tmp_path: Path, image_folder: Path, form: str, workers: int
) -> None:
    """Three tars of 5, 5 and 2 samples, on more ranks than tars."""
    pairs, stream = LocalPairs(packed(form, image_folder, tmp_path / "set"), 8, 8), MapStream(12, 4, seed=3)

    def read(first: int, rank: int = 0, ranks: int = 1) -> list[list[str]]:
        batches = load_batches(pairs, stream, first, 6, rank=rank, world_size=ranks, num_workers=workers)
        return [[item.name for item in batch.items] for batch in batches]

    whole = read(0)
    assert Counter(itertools.chain(*whole)) == dict.fromkeys([pair.name for pair in pairs.pairs], 2)
    for ranks in (2, 4):
        shares = [read(0, rank, ranks) for rank in range(ranks)]
        assert [sorted(itertools.chain(*step)) for step in zip(*shares, strict=True)] == [sorted(s) for s in whole]
    assert read(4) == whole[4:]


def test_training_on_tars_is_training_on_the_folder(
    write_toml: Callable[..., Path], tmp_path: Path, image_folder: Path
) -> None:
    options = ("--train.max_num_steps=3", "--train.ckpt.save_freq=2")
    loose = train(write_toml(), *options)
    place = f'--train.train_policy.dataset.local_dir="{pack(image_folder, tmp_path / "set", 5)}"'
    shards = train(write_toml(), *options, place, "--train.max_num_steps=2")
    train(write_toml(), *options, place, resume=(shards, 2))
    assert_same_state(saved_state(shards, 3), saved_state(loose, 3))


def test_videos_of_parallel_tars_give_the_frames_of_the_files(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    for number in range(3):
        write_video(loose / f"{number}.mp4", 5 + number, fps=24, size=(48, 80))
        (loose / f"{number}.txt").write_text(f"clip {number}")
    shards = pack_parallel(loose, tmp_path / "set", 2, {".mp4": "video", ".txt": "metas"})
    (shards / "t5_xxl").mkdir()
    (shards / "t5_xxl" / "000.tar").write_bytes(b"features that nobody reads")
    whole, parts = LocalPairs(loose, 16, 16, frames=5), LocalPairs(shards, 16, 16, frames=5)
    for number, position in itertools.product(range(3), (None, 0, 7)):
        mine, theirs = parts.take(number, position), whole.take(number, position)
        assert torch.equal(mine.visual, theirs.visual)
        assert (mine.fps, mine.prompt) == (24, theirs.prompt)
    assert parts.measure(0).sides == (48, 80)
    records = read_prompts(shards)
    assert [(one.prompt, one.metadata[BEGINNING]) for one in records] == [
        (f"clip {number}", f"video/00{number // 2}.tar/{number}.mp4") for number in range(3)
    ]


# ---- names -------------------------------------------------------------------------------------------------------


def test_keys_end_at_the_first_dot_and_hold_their_folders(tmp_path: Path) -> None:
    members = {
        "./a.png": image_bytes(0),  # as tar -cf x.tar . writes it
        "./a.txt": b"first",
        "a.c.png": image_bytes(0),  # an ending .c.png, which is no image
        "deep.er/b.c.png": image_bytes(0),
        "deep.er/b.JPG": image_bytes(10),
        "deep.er/b.txt": b"second",
        "ein grüßer 🦆.png": image_bytes(20),
        "ein grüßer 🦆.caption": "drüben".encode(),
        f"{'long' * 60}/d.png": image_bytes(30),
        f"{'long' * 60}/d.json": b'{"prompt": "fourth"}',
        "__info__/e.png": image_bytes(0),
        "._a.png": b"what another system puts there",
        ".hidden/f.txt": b"hidden",
        "README": b"no ending",
        "a.pickle": b"never opened",
    }
    write_tar(tmp_path / "x.tar", members)
    pairs = LocalPairs(tmp_path, 8, 8)
    assert pairs.problems == []
    assert [(pair.name, pair.prompt) for pair in pairs.pairs] == [
        ("x.tar/a", "first"),
        ("x.tar/deep.er/b", "second"),
        ("x.tar/ein grüßer 🦆", "drüben"),
        (f"x.tar/{'long' * 60}/d", "fourth"),
    ]
    assert [round(float((item.visual.mean() + 1) * 127.5)) for item in pairs] == [0, 10, 20, 30]


def test_samples_with_a_dot_in_their_name_are_named(tmp_path: Path) -> None:
    """WebDataset cuts their keys at the first dot too, so that 3.5mm.png is a part ".5mm.png" of the sample 3."""
    text = "the key of a sample ends at the first dot of its name, so that the ending is {}, of a kind that is not read"
    dotted = {"3.5mm.PNG": image_bytes(0), "3.5mm.txt": b"a lens", "b.v2.png": image_bytes(0)}
    parts = {f"{key}.{part}": image_bytes(0) for key in "ac" for part in ("seg.png", "meta.json")}
    write_tar(tmp_path / "000.tar", sample("a") | sample("c") | parts | dotted)
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.name for pair in pairs] == ["000.tar/a", "000.tar/c"]
    assert problems == [
        f"000.tar/{name}: {text.format(ending)}; rename it"
        for name, ending in {"3.5mm.PNG": ".5mm.png", "3.5mm.txt": ".5mm.txt", "b.v2.png": ".v2.png"}.items()
    ]
    write_tar(tmp_path / "000.tar", sample("a") | sample("a.2"))  # next to a sample of the shorter name
    assert [problem.split(":")[0] for problem in scan_pairs(tmp_path)[1]] == ["000.tar/a.2.json", "000.tar/a.2.png"]
    write_tar(tmp_path / "000.tar", dotted)
    with pytest.raises(UserError, match=r"no usable pair; (?s:.*)000.tar/3.5mm.txt: the key of a sample ends at"):
        scan_pairs(tmp_path)


def test_a_part_that_no_other_sample_has_is_named_once(tmp_path: Path) -> None:
    """It may be a sample with a dot in its name, whose caption was forgotten."""
    lone = {"3.5mm.png": image_bytes(0), "4.old.txt": b"a note"}
    write_tar(tmp_path / "000.tar", sample("3") | sample("4") | lone | {"3.seg.png": image_bytes(0)})
    write_tar(tmp_path / "001.tar", sample("3") | sample("5") | {"5.seg.png": image_bytes(0)})  # as in the other tar
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.name for pair in pairs] == ["000.tar/3", "000.tar/4", "001.tar/3", "001.tar/5"]
    text = (
        "the key of a sample ends at the first dot of its name, so that it is a part {} of 000.tar/{}, which no other"
    )
    assert problems == [
        f"000.tar/{name}: {text.format(ending, key)} sample has, and is not read; rename it if it is of another sample"
        for name, ending, key in (("3.5mm.png", ".5mm.png", "3"), ("4.old.txt", ".old.txt", "4"))
    ]


@pytest.mark.parametrize(
    "parts",
    [["0.seg.png", "0.depth.png"], [f"{k}.crop_{number:06d}.png" for k in range(4) for number in (2 * k, 2 * k + 1)]],
)
def test_parts_with_endings_of_their_own_are_no_problem(tmp_path: Path, parts: list[str]) -> None:
    keys = {part[0] for part in parts}
    samples = {name: content for key in sorted(keys) for name, content in sample(key).items()}
    write_tar(tmp_path / "000.tar", samples | {part: image_bytes(0) for part in parts})
    pairs, problems, left_out = load_pairs(tmp_path)
    assert ([pair.name for pair in pairs], problems, left_out) == ([f"000.tar/{key}" for key in sorted(keys)], [], "")


def test_samples_of_parallel_tars_with_a_dot_in_their_name_are_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "images" / "0.tar", {f"{key}.png": image_bytes(0) for key in ("a", "a.2")})
    write_tar(tmp_path / "metas" / "0.tar", {f"{key}.txt": b"x" for key in ("a", "a.2")})
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.name for pair in pairs] == ["0.tar/a"]
    assert [problem.split(":")[0] for problem in problems] == ["images/0.tar/a.2.png", "metas/0.tar/a.2.txt"]


def test_captions_are_read_by_their_ending_in_any_case(tmp_path: Path) -> None:
    members = {"a.png": image_bytes(0), "a.JSON": b'{"prompt": "a cat"}', "b.png": image_bytes(0), "b.Txt": b"a dog"}
    write_tar(tmp_path / "tars" / "000.tar", members)
    (tmp_path / "loose").mkdir()
    for name, content in members.items():
        (tmp_path / "loose" / name).write_bytes(content)
    for folder in ("tars", "loose"):
        pairs, problems = scan_pairs(tmp_path / folder)
        assert ([pair.prompt for pair in pairs], problems) == (["a cat", "a dog"], [])
        assert describe_pairs(pairs).endswith("captions: 1 .json, 1 .txt")


def test_tars_of_img2dataset_are_read_as_they_are(tmp_path: Path) -> None:
    """Each sample has its caption twice, and some have none; next to each tar are two files about it."""
    rows = {"000000000": "a cat \n on a mat ", "000000001": "a dog", "000000002": None}
    members: dict[str, bytes] = {}
    for key, caption in rows.items():
        about = {"url": "https://example.com/1", "caption": caption, "key": key, "status": "success", "width": 8}
        members |= {f"{key}.jpg": image_bytes(0), f"{key}.json": json.dumps(about).encode()}
        members |= {f"{key}.txt": (caption or "").encode()}
    write_tar(tmp_path / "00000.tar", members)
    (tmp_path / "00000_stats.json").write_text('{"count": 3}')
    (tmp_path / "00000.parquet").write_bytes(b"PAR1")
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.prompt for pair in pairs] == ["a cat \n on a mat ", "a dog"]
    assert problems == [
        "00000.tar/000000002.json: has no text under 'prompt'; it has 'url', 'caption', 'key', 'status', 'width'",
        "00000.tar/000000002.txt: has an empty prompt",
    ]


def test_an_empty_caption_is_named_whatever_its_ending(tmp_path: Path) -> None:
    members = sample("a") | sample("b")
    members |= {"c.png": image_bytes(0), "c.json": b'{"prompt": ""}', "d.png": image_bytes(0), "d.txt": b" "}
    write_tar(tmp_path / "000.tar", members)
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.name for pair in pairs] == ["000.tar/a", "000.tar/b"]
    assert problems == ["000.tar/c.json: has an empty prompt", "000.tar/d.txt: has an empty prompt"]


def test_a_member_that_lacks_its_partner_is_left_out_by_name(tmp_path: Path) -> None:
    members = sample("a") | sample("b") | sample("c") | {"d.png": image_bytes(0), "e.txt": b"alone"}
    write_tar(tmp_path / "000.tar", members)
    write_tar(tmp_path / "001.tar", [*sample("a").items(), *sample("b").items(), ("b.png", image_bytes(9))])
    write_tar(tmp_path / "002.tar", {})
    pairs, problems = scan_pairs(tmp_path)
    assert [pair.name for pair in pairs] == ["000.tar/a", "000.tar/b", "000.tar/c", "001.tar/a"]
    assert problems == [
        "001.tar/b.png: is there more than once",
        "002.tar: has no sample; found nothing",
        "000.tar/d.png: has no caption 000.tar/d.json, .txt or .caption",
        "000.tar/e.txt: has no image",
        "001.tar/b.json: has no image",
    ]


def test_images_that_are_edited_are_members_too(tmp_path: Path) -> None:
    caption = json.dumps({"prompt": "make it dark", "image": "a.before.png"}).encode()
    write_tar(tmp_path / "x.tar", {"a.png": image_bytes(0), "a.before.png": image_bytes(90), "a.json": caption})
    (item,) = LocalPairs(tmp_path, 8, 8)
    assert item.edits is not None
    assert item.edits == tmp_path / "x.tar/a.before.png"
    assert scan_pairs(tmp_path)[1] == []  # the only one that is edited, and used
    assert tar_files.has_file(item.edits)
    assert not tar_files.has_file(tmp_path / "x.tar/b.png")


# ---- parallel tars -----------------------------------------------------------------------------------------------


def test_members_of_parallel_tars_are_matched_by_key(tmp_path: Path) -> None:
    """The n-th members differ: a caption and an image are missing, and the others stand in another order."""
    write_tar(tmp_path / "images" / "0.tar", {f"{key}.png": image_bytes(ord(key)) for key in "abcd"})
    write_tar(tmp_path / "metas" / "0.tar", {f"{key}.txt": key.encode() for key in "dcae"})
    write_tar(tmp_path / "depth" / "0.tar", {"a.npy": b"never opened"})
    pairs = LocalPairs(tmp_path, 8, 8)
    assert [(item.prompt, round(float((item.visual.mean() + 1) * 127.5))) for item in pairs] == [
        (key, ord(key)) for key in "acd"
    ]
    assert pairs.problems == [
        "images/0.tar/b.png: has no caption 0.tar/b.json, .txt or .caption",
        "metas/0.tar/e.txt: has no image",
    ]


def test_parallel_tars_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "images" / "0.tar", {"a.png": image_bytes(0)})
    write_tar(tmp_path / "metas" / "0.tar", {"caption_1.txt": b"x"})
    named = r"parallel tars 0.tar do not .* images/0.tar/a.png and metas/0.tar/caption_1.txt, and no key is in both"
    with pytest.raises(UserError, match=named):
        scan_pairs(tmp_path)
    write_tar(tmp_path / "images" / "1.tar", {"b.png": image_bytes(0)})
    with pytest.raises(UserError, match="metas: has no 1.tar, which another folder of"):
        scan_pairs(tmp_path)
    (tmp_path / "images" / "1.tar").unlink()
    write_tar(tmp_path / "depth" / "0.tar", {"a.png": image_bytes(0)})
    with pytest.raises(UserError, match="the tars of depth and images all have .jpg"):
        scan_pairs(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"root": "s3://bucket/set"}, 'root = "s3://bucket/set": S3 is not supported yet; copy the tars'),
        ({"root": "gone"}, 'root = "gone": .* is not there'),
        ({"root": 3}, "root: allowed: a folder"),
        ({"data_list": []}, "data_list: allowed: a list of names of tars"),
        ({"data_list": ["../000.tar"]}, "allowed: paths in root that end in .tar"),
        ({"data_list": ["000.pkl"]}, "allowed: paths in root that end in .tar"),
        ({"data_list": ["000.tar", "001.tar"]}, "data_list: .*001.tar is not there"),
        ({"data_list": ["009.tar"]}, "data_list: .*009.tar is not there"),
    ],
)
def test_a_wdinfo_file_that_leads_nowhere_is_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    write_tar(tmp_path / "tars" / "000.tar", sample("a"))
    info = {"root": "tars", "data_list": ["000.tar"], "total_key_count": 2, "chunk_size": 1}
    place = tmp_path / "wdinfo.json"
    for count, wrong in ((2, True), (1, False), (0, True)):
        place.write_text(json.dumps(info | {"total_key_count": count}))
        pairs, problems = scan_pairs(place)
        assert [pair.name for pair in pairs] == ["000.tar/a"]
        assert problems == [f"total_key_count: is {count}, and the tars have 1 samples"] * wrong
    assert not is_prompt_file(place)
    place.write_text(json.dumps(info | changed))
    with pytest.raises(UserError, match=message):
        scan_pairs(place)


# ---- the command -------------------------------------------------------------------------------------------------


def test_check_speaks_of_tars_as_of_folders(
    write_toml: Callable[..., Path], tmp_path: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, shards = write_toml(), pack(image_folder, tmp_path / "set", 5)
    place = "--train.train_policy.dataset.local_dir="
    code, out, _ = check(capsys, "--env", "--config", config, f"{place}{shards}")
    assert (code, "12 captions" in out) == (0, True)
    buckets = "--policy.diffusers.buckets.sizes=[[32, 32], [32, 64]]"
    code, out, _ = check(capsys, "--env", "--config", config, f"{place}{shards}", buckets)
    assert (code, "12 images in buckets (height x width)" in out) == (0, True)
    lists = (
        f'--train.train_policy.dataset.folders=[{{local_dir="{shards}"}}, {{local_dir="{image_folder}", repeats=2}}]'
    )
    code, out, _ = check(capsys, "--env", "--config", config, f"{place}''", lists)
    assert (code, "36 captions in 2 folders" in out) == (0, True)
    (shards / "001.tar").write_bytes((shards / "001.tar").read_bytes()[:2000])
    code, _, err = check(capsys, "--env", "--config", config, f"{place}{shards}")
    assert (code, "1 of 3 tars cannot be read" in err) == (2, True)
    other = tmp_path / "notes.md"
    other.write_text("x")
    assert main(["check", "--env", "--config", str(config), f"{place}{other}"]) == 2
    assert "is a file; give the folder of the images, a .tar, or a wdinfo file" in capsys.readouterr().err
    dpo = ("--train.train_policy.type=dpo", f"--train.train_policy.dataset.rejected_dir={image_folder}")
    (shards / "001.tar").unlink()
    code, _, err = check(capsys, "--env", "--config", config, f"{place}{shards}", *dpo)
    assert (code, "has its samples in tars; preferences are read from folders: unpack them" in err) == (2, True)
