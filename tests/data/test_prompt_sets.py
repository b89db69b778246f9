"""Prompt sets: files, names, downloads, and what a record of a prompt is."""

import hashlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl.data import prompt_sets
from cosmos_rl.data.given import choose_given, find_media_problems, load_given
from cosmos_rl.data.images import to_uint8
from cosmos_rl.data.prompt_sets import KNOWN, load_prompts, prompt_file
from cosmos_rl.data.prompts import PromptRecord, read_prompts, to_prompt_record
from cosmos_rl.data.published import PUBLISHED
from cosmos_rl.data.videos import load_clip
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.prompt_lists import PromptList, list_prompts, prompt_lines, record_prompts
from cosmos_rl.policy.config import Config, DatasetConfig
from cosmos_rl.tools.dataset.diffusion_nft import training_prompts, validation_prompts
from tests.support.videos import write_video

KEY = "train.train_policy.dataset"
GENEVAL = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "prompt": "a photo of two cups"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the named sets; the default one is elsewhere and empty, and nothing can be fetched."""
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(prompt_sets, "_DEFAULT_CACHE", str(tmp_path / "default"))
    for known in KNOWN.values():
        for split, published in known.splits.items():  # nobody listens there
            monkeypatch.setitem(known.splits, split, replace(published, url=f"http://127.0.0.1:9/{split}"))
    return tmp_path / "cache" / "diffusion_nft"


def publish(monkeypatch: pytest.MonkeyPatch, name: str, split: str, content: str | bytes, **changes: str) -> None:
    """Let this be the content of the published file."""
    if isinstance(content, str):
        content = content.encode()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    published = replace(KNOWN[name].splits[split], **{"digest": digest, **changes})
    monkeypatch.setitem(KNOWN[name].splits, split, published)


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def texts(usual: str = "train", /, **table: object) -> list[str]:
    return [record.prompt for record in load_prompts(DatasetConfig.model_validate(table), KEY, split=usual)]


# ---- files ---------------------------------------------------------------------------------------------------------


def test_the_three_forms_of_a_file(tmp_path: Path) -> None:
    rows = [GENEVAL, {"prompt": "b", "metadata": {"level": 2}}, {"prompt": "c"}]
    expected = [
        PromptRecord("a photo of two cups", {"tag": "counting", "include": GENEVAL["include"]}),
        PromptRecord("b", {"level": 2}),
        PromptRecord("c", {}),
    ]
    lines = put(tmp_path / "x.jsonl", "\n".join(json.dumps(row) for row in rows[:2]) + f"\n\n{json.dumps(rows[2])}\n")
    assert read_prompts(lines) == expected
    assert read_prompts(put(tmp_path / "x.json", json.dumps(rows))) == expected
    assert read_prompts(put(tmp_path / "x.tsv", 'Prompt\tTag\tNote\r\na "big" cup\tred\t\r\n\nb\t\tx\r\n')) == [
        PromptRecord('a "big" cup', {"tag": "red"}),
        PromptRecord("b", {"note": "x"}),
    ]
    assert read_prompts(put(tmp_path / "y.tsv", "prompt\tseed\theight\tnote\na\t7\t512\t7\nb\t-1\n")) == [
        PromptRecord("a", {"seed": 7, "height": 512, "note": "7"}),
        PromptRecord("b", {"seed": "-1"}),
    ]
    assert read_prompts(put(tmp_path / "x.txt", '\ufeffa sign "Hi"\r\n\n  b \n \n')) == [
        PromptRecord('a sign "Hi"'),
        PromptRecord("b"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"prompt": "a"}\n\n{"prompt"\n', r"x.jsonl, line 3: is not valid JSON"),
        ("x.jsonl", '{"prompt": "a"}\n{"text": "b"}\n[1]\n', 'no text under "prompt" in line 2, line 3; expected a l'),
        ("x.jsonl", '{"prompt": " "}', 'no text under "prompt" in line 1;'),
        ("x.jsonl", '{"text": "b"}', r"\(line 1 has no text under 'prompt'; it has 'text'\)"),
        ("x.jsonl", r'{"prompt": "\ud83d x"}', r"line 1; .* \(line 1 has half of a character \(.ud83d\) at position 0"),
        ("x.json", r'[{"prompt": "a", "tag": "\udc00"}]', "row 0; .* has half of a character"),
        ("x.json", "[" * 100_000 + "]" * 100_000, r"x.json: is not valid JSON \(nested too deeply\)"),
        ("x.json", '{"prompt": "a"}', "holds no list of prompts"),
        ("x.json", json.dumps([{}] * 13), "in row 0, .* row 9 and 3 more; expected"),
        ("x.txt", "a\0 \0c\0", "x.txt: has null characters, as UTF-16 without a byte order mark; save it as UTF-8"),
        ("x.jsonl", '{\0"\0', "x.jsonl: has null characters, as UTF-16 without a byte order mark; save it as UTF-8"),
        ("x.jsonl", r'{"prompt": "a\u0000b"}', r"line 1; .* \(line 1 has null characters \(.u0000\); remove them"),
        ("x.jsonl", '{"prompt": ""}', r"line 1; .* \(line 1 has an empty prompt\)"),
        ("x.txt", "\n \n", "it is empty; expected one prompt a line"),
        (
            "x.tsv",
            "Text\tTag\na\tb\n",
            r'no text under "prompt" in line 2; expected columns .* it has \'text\', \'tag\'',
        ),
        ("x.tsv", "prompt\n", "holds no list of prompts: it is empty"),
        ("x.csv", "a", "is not a prompt file; known endings: .txt, .jsonl, .json, .tsv"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_prompts(put(tmp_path / name, text))


def test_a_file_of_bytes_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(
        UserError, match="x.txt: is not UTF-8 text but UTF-16; save it as UTF-8; expected one prompt a line"
    ):
        read_prompts(tmp_path / "x.txt")


def test_elements_of_own_data_sets() -> None:
    record = PromptRecord("a", {"x": 1})
    assert to_prompt_record(record, 0) is record
    assert to_prompt_record("a", 0) == PromptRecord("a")
    assert to_prompt_record({"prompt": "a", "metadata": {"x": 1}}, 0) == record
    assert to_prompt_record({"prompt": "a", "x": 1}, 0) == record
    assert to_prompt_record({"prompt": "a", "metadata": 3}, 0).metadata == {"metadata": 3}
    for half in ("\ud83d x", PromptRecord("\ud83d x"), {"prompt": "a", "tag": "\ud83d x"}):
        with pytest.raises(UserError, match=r"element 5: .* has half of a character \(.ud83d\)"):
            to_prompt_record(half, 5)
    for raw, found in [({"text": "a"}, r"found \['text'\]"), (3, "found int"), ({"prompt": 3}, "found")]:
        with pytest.raises(UserError, match=rf"element 5: need a text or a mapping .*{found}"):
            to_prompt_record(raw, 5)


def test_a_folder_of_ones_own_has_a_file_for_each_split(tmp_path: Path) -> None:
    put(tmp_path / "train.txt", "a")
    put(tmp_path / "test_metadata.jsonl", '{"prompt": "b"}')
    assert texts(local_dir=str(tmp_path)) == ["a"]
    assert texts(local_dir=str(tmp_path), split="test") == ["b"]
    assert texts(local_dir=str(tmp_path), split=["test", "train"]) == ["b"]
    assert texts(local_dir=str(tmp_path / "train.txt"), split="whatever") == ["a"]
    with pytest.raises(
        UserError, match=r'dataset.local_dir = ".*": no prompts there for the split "x"; expected x.txt'
    ):
        texts(local_dir=str(tmp_path), split="x")
    with pytest.raises(UserError, match=r"dataset.local_dir = .*none does not exist"):
        texts(local_dir=str(tmp_path / "none"))


# ---- named sets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("pickscore", "{}.txt"),
        ("ocr", "{}.txt"),
        ("geneval", "{}_metadata.jsonl"),
        ("dance_grpo_t2v", "{}.txt"),
    ],
)
def test_a_named_set_is_read_from_the_documented_place(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    for split in ("train", "test", "mine"):
        row = json.dumps({**GENEVAL, "prompt": split}) if name == "geneval" else split
        put(cache / name / file.format(split), f"{row}\n")
        if split != "mine":
            publish(monkeypatch, name, split, f"{row}\n")
    assert texts(name=name) == ["train"]
    assert texts(name=name, split=["test", "train"]) == ["test"]
    assert texts(name=name, split="mine") == ["mine"]
    assert texts("test", name=name) == ["test"]


def test_the_default_cache_is_looked_at_too(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"name": "ocr", "split": "mine"}  # a split of one's own, which has no published digest
    put(tmp_path / "default" / "diffusion_nft" / "ocr" / "mine.txt", "from there")
    assert texts(**there) == ["from there"]
    put(cache / "ocr" / "mine.txt", "from here")
    assert texts(**there) == ["from here"]
    monkeypatch.delenv("COSMOS_CACHE_DIR")
    assert texts(**there) == ["from there"]


def test_a_kept_file_that_is_not_the_published_one_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = put(cache / "ocr" / "train.txt", "a\nc\n")
    publish(monkeypatch, "ocr", "train", "a\nb\n")
    with pytest.raises(UserError) as caught:
        texts(name="ocr")
    wanted, found = (hashlib.sha256(content).hexdigest() for content in (b"a\nb\n", b"a\nc\n"))
    assert f"{place}: has the digest sha256:{found}, and the published file http" in str(caught.value)
    assert f"has sha256:{wanted}; move it away" in str(caught.value)
    assert f'set local_dir = "{place}" in place of name' in str(caught.value)
    assert texts(local_dir=str(place)) == ["a", "c"]
    assert list(list_prompts(Config.from_dict(job(name="ocr")))) == []


def test_a_digest_may_be_the_name_that_git_has_for_the_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = put(cache / "ocr" / "train.txt", "a cup\nä\n")
    blob = subprocess.run(["git", "hash-object", str(place)], capture_output=True, text=True, check=True).stdout.strip()
    publish(monkeypatch, "ocr", "train", b"", digest=f"git:{blob}")
    assert texts(name="ocr") == ["a cup", "ä"]
    place.write_text("a cup\n")
    with pytest.raises(UserError, match=f"has the digest git:[0-9a-f]{{40}}, and the published file .* has git:{blob}"):
        texts(name="ocr")


def test_every_published_set_is_at_a_commit_and_has_a_digest() -> None:
    for name, known in PUBLISHED.items():
        assert known.source, name
        for published in known.splits.values():
            assert re.match(r"https://raw\.githubusercontent\.com/[^/]+/[^/]+/[0-9a-f]{40}/.+", published.url)
            assert re.fullmatch(r"sha256:[0-9a-f]{64}|git:[0-9a-f]{40}", published.digest)


def test_unknown_names_and_splits_are_named_with_what_there_is(cache: Path) -> None:
    with pytest.raises(UserError, match=r'dataset.name: found "pick_score"; allowed: .*; did you mean pickscore\?'):
        texts(name="pick_score")
    with pytest.raises(
        UserError, match=r"dataset.name: missing; allowed: one of pickscore, ocr, geneval, dance_grpo_t2v"
    ):
        texts()
    with pytest.raises(UserError, match='dataset.split: found "tarin"; allowed: one of train, test'):
        texts(name="ocr", split="tarin")
    with pytest.raises(UserError, match='dataset.split: found "train"; allowed: one of test, or'):
        prompt_file(DatasetConfig(name="drawbench"), KEY, split="train")


def test_without_a_network_the_message_says_where_to_put_the_file(cache: Path) -> None:
    with pytest.raises(UserError) as caught:
        texts(name="geneval", split="test")
    message = str(caught.value)
    assert f"{cache}/geneval/test_metadata.jsonl is not there, and http://127.0.0.1:9/test cannot be fetched" in message
    assert "copy the file to that place" in message
    assert not list(cache.rglob("*.jsonl"))


class Publisher:
    """Serves one file; counts how often."""

    def __init__(self) -> None:
        self.content, self.status, self.asked, self.length = b"a\nb\n", 200, 0, 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked += 1
                self.send_response(owner.status)
                self.send_header("Content-Length", str(owner.length or len(owner.content)))
                self.end_headers()
                self.wfile.write(owner.content)

            def log_message(self, format: str, *args: object) -> None:
                """Silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=lambda: self.server.serve_forever(0.05), daemon=True).start()


@pytest.fixture
def publisher(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    made = Publisher()
    publish(monkeypatch, "ocr", "train", made.content, url=f"http://127.0.0.1:{made.server.server_port}/x")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_set_is_fetched_once_and_kept(cache: Path, publisher: Publisher) -> None:
    assert texts(name="ocr") == texts(name="ocr") == ["a", "b"]
    assert publisher.asked == 1
    assert (cache / "ocr" / "train.txt").read_bytes() == b"a\nb\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": 404}, "cannot be fetched .*404"),
        ({"length": 10}, "cannot be fetched"),  # the connection ends too early
        ({"content": b"<html>please log in</html>"}, "what was received has the digest .*; it was not kept: try again"),
    ],
)
def test_what_is_not_the_whole_published_file_is_not_kept(
    cache: Path, publisher: Publisher, change: dict[str, object], message: str
) -> None:
    vars(publisher).update(change)
    with pytest.raises(UserError, match=message):
        texts(name="ocr")
    assert [path.name for path in (cache / "ocr").iterdir() if not path.name.endswith(".lock")] == []


def test_the_command_lists_the_sets_and_fetches_one(
    cache: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(monkeypatch, "ocr", "test", b"a\nb\n", url=KNOWN["ocr"].splits["train"].url)
    assert main(["prompts", "--fetch", "ocr"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "fetching" not in line] == [
        *(f"{cache}/ocr/{split}.txt: 2 prompts" for split in ("train", "test")),
        "ocr: train and test are the same file: scores on one are about prompts of the other",
    ]
    put(cache / "drawbench" / "test.txt", "not that")
    assert main(["prompts"]) == 0
    rows = {tuple(line.split()[:2]): line for line in capsys.readouterr().out.splitlines()}
    shown = f"sha256:{hashlib.sha256(publisher.content).hexdigest()[:12]}"
    assert re.search(rf"{shown} +yes +NVlabs/DiffusionNFT, Apache-2.0$", rows["ocr", "test"])
    assert " differs " in rows["drawbench", "test"]
    assert re.search(
        r"1,632 +sha256:fab29e41bb51 +no +google-research/parti, Apache-2.0$", rows["parti_prompts", "test"]
    )
    assert main(["prompts", "--fetch", "ocrs"]) == 2
    assert '--fetch: found "ocrs"; allowed: one of pickscore, ' in capsys.readouterr().err


def job(**dataset: object) -> dict[str, dict[str, Any]]:
    return {"train": {"train_policy": {"type": "grpo", "dataset": dataset}}}


def test_which_prompts_a_run_takes_is_known_before_they_are_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = put(tmp_path / "own.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    tables = job(name="pickscore") | {"validation": {"enable": True, "dataset": {"local_dir": str(own)}}}
    found = list_prompts(Config.from_dict(tables))
    published = KNOWN["pickscore"].splits["train"]
    assert found == {
        "train.train_policy.dataset": PromptList("pickscore, train", published.digest, 25_432),
        "validation.dataset": PromptList(str(own), f"sha256:{hashlib.sha256(own.read_bytes()).hexdigest()}", 2),
    }
    assert prompt_lines(Config.from_dict(tables)) == [
        "train.train_policy.dataset: pickscore, train, 25,432 prompts, sha256:2f425adcbb9a",
        f"validation.dataset: {own}, 2 prompts, {found['validation.dataset'].digest[:19]}",
    ]
    assert record_prompts(Config.from_dict(job(name="ocr", split="test"))) == {
        "train.train_policy.dataset": {
            "source": "ocr, test",
            "digest": KNOWN["ocr"].splits["test"].digest,
            "prompts": 1018,
            "limit": None,
        }
    }
    sets = [{"dataset": {"name": "drawbench", "limit": 20}}, {"dataset": {"local_dir": str(own)}}]
    tables |= {"validation": {"enable": True, "sets": sets}}
    assert prompt_lines(Config.from_dict(tables))[1:] == [
        "validation.sets.0.dataset: drawbench, test, 1,000 prompts, of which at most 20 are taken, sha256:9006b98feabb",
        f"validation.sets.1.dataset: {own}, 2 prompts, {found['validation.dataset'].digest[:19]}",
    ]


def test_of_several_readers_one_fetches(cache: Path, publisher: Publisher) -> None:
    """The lock is that of an open file, so threads stand for processes."""
    barrier = threading.Barrier(3)

    def read(_: int) -> list[str]:
        barrier.wait(60)
        return texts(name="ocr")

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(read, range(3))) == [["a", "b"]] * 3
    assert publisher.asked == 1


def test_a_stuck_process_does_not_hold_up_the_others_for_ever(
    cache: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_sets, "_WAIT_S", 0.3)
    with (
        prompt_sets._lock_download(cache / "ocr" / "train.txt"),
        pytest.raises(UserError, match=r"another process has been fetching it for 0.3 s"),
    ):
        texts(name="ocr")


# ---- the script ----------------------------------------------------------------------------------------------------


def test_the_bundled_script_reads_both_tables(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, text in (("train", "a"), ("test", "b")):
        put(cache / "ocr" / f"{split}.txt", text)
        publish(monkeypatch, "ocr", split, text)
    tables = {
        "train": {"train_policy": {"type": "grpo", "dataset": {"name": "ocr"}}},
        "validation": {"dataset": {"name": "ocr"}},
    }
    config = Config.from_dict(tables)
    assert training_prompts(config) == [PromptRecord("a")]
    assert validation_prompts(config) is None
    tables["validation"]["enable"] = True
    assert validation_prompts(Config.from_dict(tables)) == [PromptRecord("b")]


# ---- videos and images that samples start from -----------------------------------------------------------------------


def test_captions_of_a_folder_of_videos_are_prompts_with_their_first_frames(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_video(tmp_path / "videos" / f"{name}.mp4", 7)
        put(tmp_path / "metas" / f"{name}.txt", f"clip {name}")
    records = load_prompts(DatasetConfig(local_dir=str(tmp_path)), KEY, split="train")
    assert [record.prompt for record in records] == ["clip a", "clip b"]
    first, last = (
        choose_given(PromptRecord("", {key: "videos/a.mp4"}, folder=tmp_path), (1, 1))
        for key in ("first_frames_of", "video")
    )
    assert choose_given(records[0], (1, 1)) == first
    assert first is not None
    assert last is not None
    begins, ends = load_given(first, 1, 32, 32), load_given(last, 1, 32, 32)
    clip = load_clip(tmp_path / "videos" / "a.mp4", 7, 32, 32).visual.movedim(1, 0)
    assert torch.equal(begins[0], to_uint8((clip[:1] + 1) / 2)[0])
    assert torch.equal(ends[0], to_uint8((clip[-1:] + 1) / 2)[0])
    assert not torch.equal(begins, ends)


def test_a_folder_with_neither_prompts_nor_videos_is_refused(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    with pytest.raises(UserError, match="expected train.txt or .* or the folders metas and videos"):
        load_prompts(DatasetConfig(local_dir=str(tmp_path)), KEY, split="train")


def test_the_set_of_random_images_is_made_once_and_always_the_same(cache: Path, tmp_path: Path) -> None:
    assert prompt_sets.prompt_file(DatasetConfig(name="mock"), KEY, split="train") is None
    made = load_prompts(DatasetConfig(name="mock"), KEY, split="train")
    files = sorted(cache.glob("mock/*.png"))
    assert len(made) == len(files) == 16
    assert find_media_problems(made, (1, 1)) == ""
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    assert load_prompts(DatasetConfig(name="mock"), KEY, split="train") == made
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before
    assert len({content for content, _ in before}) == 16
