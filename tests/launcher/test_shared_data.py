"""What `cosmos-rl check` and a launch say of validation samples that are trained on too."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl.data import prompt_sets
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.prepare import prepare_run
from cosmos_rl.launcher.shared_data import shared_notes
from cosmos_rl.policy.config import Config
from tests.support.checks import check
from tests.support.tars import pack

UNSEEN = "are in the training data too; scores on them are not those of unseen prompts"
IMAGES = "are in the training data too; losses and images on them are not those of unseen images"

IMAGE = "is in the training data too; losses and images on it are not those of unseen images"


@pytest.fixture(autouse=True)
def _nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(prompt_sets, "_DEFAULT_CACHE", str(tmp_path / "default"))


def online(dataset: dict[str, Any], *tested: dict[str, Any]) -> list[str]:
    tables = {
        "train": {"train_policy": {"type": "grpo", "dataset": dataset}},
        "validation": {"enable": True, "sets": [{"name": f"s{i}", "dataset": one} for i, one in enumerate(tested)]},
    }
    return shared_notes(Config.from_dict(tables))


def fine_tuning(dataset: dict[str, Any], tested: str | dict[str, Any], **more: Any) -> list[str]:
    tables = {
        "train": {"train_policy": {"type": "sft", "dataset": dataset}},
        "validation": {"enable": True, "dataset": {"local_dir": tested} if isinstance(tested, str) else tested},
        **more,
    }
    return shared_notes(Config.from_dict(tables))


def write(path: Path, *prompts: str | dict[str, str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [prompt if isinstance(prompt, dict) else {"prompt": prompt} for prompt in prompts]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


# ---- prompts -----------------------------------------------------------------------------------------------------


def test_named_sets_are_compared_by_their_digests_before_they_are_fetched() -> None:
    trained = {"name": "dance_grpo_t2v"}
    assert online(trained, {"name": "dance_grpo_t2v"}, {"name": "vbench"}) == [
        f"validation.sets.0.dataset: 50,000 of 50,000 prompts {UNSEEN}"
    ]
    assert online({"name": "pickscore"}, {"name": "pickscore"}) == []
    same = {"name": "ocr", "split": "train"}  # nobody knows how many that are
    assert online(same, same) == [f"validation.sets.0.dataset: all prompts {UNSEEN}"]


def test_prompts_are_compared_by_their_texts_and_what_they_start_from(tmp_path: Path) -> None:
    trained = {"local_dir": write(tmp_path / "a.jsonl", "a cat", "a dog", {"prompt": "a wave", "image": "1.png"})}
    mixed = write(tmp_path / "b.jsonl", "a bird", {"prompt": "a cat", "seed": "1"})
    other = write(tmp_path / "c.jsonl", {"prompt": "a wave", "image": "2.png"}, "a boat")
    elsewhere = write(tmp_path / "d" / "c.jsonl", {"prompt": "a wave", "image": "1.png"})
    plain = tmp_path / "e.txt"
    plain.write_text("a dog\na cat\n")
    tested = [{"local_dir": path} for path in (mixed, other, elsewhere, str(plain))]
    assert online(trained, *tested) == [
        "validation.sets.0.dataset: 1 of 2 prompts is in the training data too; scores on it are not those of "
        "unseen prompts",
        f"validation.sets.3.dataset: 2 of 2 prompts {UNSEEN}",
    ]
    sets = {"sets": [{"local_dir": write(tmp_path / "f.jsonl", "a boat"), "label": "f"}, trained | {"label": "a"}]}
    assert [line.partition(" prompts")[0] for line in online(sets, *tested)] == [
        "validation.sets.0.dataset: 1 of 2",
        "validation.sets.1.dataset: 1 of 2",
        "validation.sets.3.dataset: 2 of 2",
    ]


def test_files_of_one_text_in_two_folders_name_other_images(tmp_path: Path) -> None:
    """Their digests are the same, and their prompts are not."""
    row = {"prompt": "a wave", "image": "1.png"}
    trained, tested = (write(tmp_path / name / "x.jsonl", row) for name in "ab")
    assert online({"local_dir": trained}, {"local_dir": tested}) == []
    assert len(online({"local_dir": trained}, {"local_dir": trained})) == 1


def test_only_the_prompts_that_are_taken_count(tmp_path: Path) -> None:
    trained = {"local_dir": write(tmp_path / "a.jsonl", *(f"shared {i}" for i in range(20)))}
    prompts = [*(f"own {i}" for i in range(50)), *(f"shared {i}" for i in range(20))]
    tested = {"local_dir": write(tmp_path / "b.jsonl", *prompts)}
    assert online(trained, tested | {"limit": 10}, tested | {"limit": 10, "spread": True}, tested | {"limit": 52}) == [
        f"validation.sets.1.dataset: 2 of 10 prompts {UNSEEN}",  # numbers 56 and 63
        f"validation.sets.2.dataset: 2 of 52 prompts {UNSEEN}",
    ]
    unfetched = {"name": "dance_grpo_t2v"}
    assert online(unfetched, unfetched | {"limit": 64}, unfetched | {"limit": 1, "spread": True}) == [
        f"validation.sets.0.dataset: 64 of 64 prompts {UNSEEN}",
        "validation.sets.1.dataset: 1 of 1 prompt is in the training data too; scores on it are not those of unseen "
        "prompts",
    ]


def test_without_validation_nothing_is_said(tmp_path: Path) -> None:
    own = write(tmp_path / "a.jsonl", "a cat")
    tables = {"train": {"train_policy": {"type": "grpo", "dataset": {"local_dir": own}}}}
    assert shared_notes(Config.from_dict(tables | {"validation": {"dataset": {"local_dir": own}}})) == []


# ---- images ------------------------------------------------------------------------------------------------------


def test_images_are_compared_by_their_files(tmp_path: Path, image_folder: Path) -> None:
    whole = {"local_dir": str(image_folder)}
    assert fine_tuning(whole, str(image_folder)) == [f"validation.dataset: 12 of 12 images {IMAGES}"]
    copies, others = tmp_path / "copies", tmp_path / "others"
    for folder, change in ((copies, b""), (others, b" ")):
        folder.mkdir()
        for number in range(3):
            content = (image_folder / f"{number:03d}.png").read_bytes()
            (folder / f"renamed{number}.png").write_bytes(content + change)
            (folder / f"renamed{number}.txt").write_text("another caption")
    (others / "link.png").symlink_to(image_folder / "011.png")
    (others / "link.txt").write_text("a link")
    assert fine_tuning(whole, str(copies)) == [f"validation.dataset: 3 of 3 images {IMAGES}"]
    assert fine_tuning({"folders": [{"local_dir": str(others)}, whole | {"repeats": 2}]}, str(copies)) == [
        f"validation.dataset: 3 of 3 images {IMAGES}"
    ]
    assert fine_tuning(whole, str(others)) == [f"validation.dataset: 1 of 4 images {IMAGE}"]
    (others / "link.txt").unlink()
    assert fine_tuning(whole, str(others)) == []
    assert fine_tuning(whole, write(tmp_path / "prompts.jsonl", "a photo of the number 1")) == []
    assert fine_tuning(whole, str(tmp_path / "not there")) == []


def test_only_the_images_that_are_taken_count(tmp_path: Path, image_folder: Path) -> None:
    tested = tmp_path / "tested"
    tested.mkdir()
    for name in ("9", "0000", "0001", "0002", "0003"):
        content = (image_folder / "000.png").read_bytes()
        (tested / f"{name}.png").write_bytes(content if name == "9" else content + name.encode())
        (tested / f"{name}.txt").write_text("a caption")
    (tested / "0003.txt").write_text("")  # left out
    whole, some = {"local_dir": str(image_folder)}, {"local_dir": str(tested)}
    assert fine_tuning(whole, some | {"limit": 3}) == []
    assert fine_tuning(whole, some | {"limit": 4}) == [f"validation.dataset: 1 of 4 images {IMAGE}"]
    for old, new, first, spread in (("9", "00005", 1, 0), ("00005", "00015", 0, 1)):  # the second one, the third one
        for ending in (".png", ".txt"):
            (tested / f"{old}{ending}").rename(tested / f"{new}{ending}")
        line = f"validation.dataset: 1 of 2 images {IMAGE}"
        assert fine_tuning(whole, some | {"limit": 2}) == [line] * first
        assert fine_tuning(whole, some | {"limit": 2, "spread": True}) == [line] * spread


def test_videos_are_called_videos(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.mp4").write_bytes(name.encode())
        (tmp_path / f"{name}.txt").write_text("a caption")
    whole = {"local_dir": str(tmp_path)}
    video = {"policy": {"diffusers": {"is_video": True}}}
    words = "are in the training data too; losses and videos on them are not those of unseen videos"
    assert fine_tuning(whole, whole, **video) == [f"validation.dataset: 2 of 2 videos {words}"]
    words = "is in the training data too; losses and videos on it are not those of unseen videos"
    assert fine_tuning(whole, whole | {"limit": 1}, **video) == [f"validation.dataset: 1 of 1 video {words}"]


def test_members_of_tars_are_compared_too(tmp_path: Path, image_folder: Path) -> None:
    tars = str(pack(image_folder, tmp_path / "tars", 5))
    one = tmp_path / "one"
    one.mkdir()
    (one / "copy.tar").write_bytes((tmp_path / "tars" / "002.tar").read_bytes())
    assert fine_tuning({"local_dir": tars}, str(tmp_path / "tars" / "001.tar")) == [
        f"validation.dataset: 5 of 5 images {IMAGES}"
    ]
    assert fine_tuning({"local_dir": str(image_folder)}, str(one)) == [f"validation.dataset: 2 of 2 images {IMAGES}"]


def test_preferences_are_compared_by_the_chosen_ones(tmp_path: Path, image_folder: Path) -> None:
    shutil.copytree(image_folder, tmp_path / "rejected")
    dataset = {"local_dir": str(image_folder), "rejected_dir": str(tmp_path / "rejected")}
    tables = {
        "train": {"train_policy": {"type": "sft", "trainer_type": "diffusion_dpo", "dataset": dataset}},
        "validation": {"enable": True, "dataset": dataset},
    }
    assert shared_notes(Config.from_dict(tables)) == [f"validation.dataset: 12 of 12 images {IMAGES}"]


# ---- where it is said --------------------------------------------------------------------------------------------


def test_check_and_a_launch_say_it(
    tmp_path: Path,
    write_toml: Callable[..., Path],
    image_folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_toml(f'[validation]\nenable = true\ndataset.local_dir = "{image_folder}"')
    line = f"validation.dataset: 12 of 12 images {IMAGES}"
    code, report, _ = check(capsys, "--config", path)
    assert code == 0
    assert line in report
    assert line not in check(capsys, "--config", path, "--validation.enable=false")[1]
    assert line not in check(capsys, "--config", path, write_script(tmp_path))[1]  # which may bring any data
    tables = {
        "train": {
            "output_dir": str(tmp_path / "runs"),
            "train_policy": {"type": "sft", "dataset": {"local_dir": str(image_folder)}},
        },
        "validation": {"enable": True, "dataset": {"local_dir": str(image_folder)}},
    }
    config = Config.from_dict(tables)
    with caplog.at_level("INFO", logger="cosmos"), prepare_run(config, ["cosmos-rl"], own_data=False):
        assert [record.getMessage() for record in caplog.records].count(line) == 1


def test_a_launch_with_a_script_does_not_say_it(
    tmp_path: Path, write_toml: Callable[..., Path], image_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which may bring any data."""
    path = write_toml(f'[validation]\nenable = true\ndataset.local_dir = "{image_folder}"')
    with caplog.at_level("INFO", logger="cosmos"):
        main(["--config", str(path), str(write_script(tmp_path))])
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "run folder: " in said
    assert "training data too" not in said


@pytest.mark.zoo
@pytest.mark.parametrize("own", [False, True])
def test_runs_say_it_of_the_data_of_the_configuration_alone(
    tmp_path: Path, write_toml: Callable[..., Path], image_folder: Path, own: bool
) -> None:
    """A whole launch with the bundled script, and a script that is started by hand."""
    path = write_toml(f'[validation]\nenable = true\ndataset.local_dir = "{image_folder}"\nfreq = 1000')
    command = ["-m", "cosmos_rl.launcher.cli", "--config", str(path), "--train.max_num_steps=1"]
    if own:
        lines = "def data(config):\n    raise UserError('own data')\n\n\nmain(dataset=data)\n"
        imports = "from cosmos_rl.errors import UserError\nfrom cosmos_rl.launcher.worker_entry import main\n\n\n"
        command = [str(write_script(tmp_path, imports + lines)), "--config", str(path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    printed = done.stdout + done.stderr
    assert "run folder: " in printed
    assert ("own data" in printed) == own
    assert ("12 of 12 images are in the training data too" in printed) == (not own)


def write_script(folder: Path, text: str = "pass\n") -> Path:
    path = folder / "own.py"
    path.write_text(text)
    return path


def test_the_list_of_published_sets_says_which_splits_are_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "dance_grpo_t2v: train and test are the same file: scores on one are about prompts of the other"
