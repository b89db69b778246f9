"""Folders and files of preferences: what belongs together, what is left out, and what a run gets of it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl.data.cache import TensorCache
from cosmos_rl.data.cached_latents import CachedLatents
from cosmos_rl.data.items import Part, to_item
from cosmos_rl.data.preference_files import count_preferences, is_preference_table, load_preferences
from cosmos_rl.data.preferences import PreferencePairs, load_held_out_preferences
from cosmos_rl.data.prompts import PromptFile
from cosmos_rl.data.streams import MapStream, Skipped, load_batches
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import DatasetConfig
from cosmos_rl.policy.config.train_policy import ValidationDatasetConfig
from tests.support.toy_tasks import toy_sft_config


def write_image(path: Path, grey: int, size: tuple[int, int] = (20, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (grey, grey, grey)).save(path)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Four preferences; the rejected ones have another size, and one another ending."""
    chosen, rejected = tmp_path / "chosen", tmp_path / "rejected"
    for number in range(4):
        write_image(chosen / f"{number}.png", 200 + number)
        write_image(rejected / f"{number}{'.webp' if number == 2 else '.png'}", 10 * number, (32, 32))
    (chosen / "0.json").write_text('{"prompt": "zero"}')
    (chosen / "1.txt").write_text("one")
    rows = [{"file_name": f"{number}.png", "text": word} for number, word in ((2, "two"), (3, "three"))]
    (chosen / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return chosen, rejected


def read(local_dir: Path, rejected_dir: Path | str = "") -> PreferencePairs:
    dataset = DatasetConfig(local_dir=str(local_dir), rejected_dir=str(rejected_dir))
    return PreferencePairs.of_config(dataset, toy_sft_config())


def grey_of(visual: torch.Tensor) -> int:
    return round((float(visual.mean()) + 1) * 127.5)


def test_files_of_one_name_are_a_preference_whatever_form_their_caption_has(folders: tuple[Path, Path]) -> None:
    pairs = read(*folders)
    assert pairs.prompts == ["zero", "one", "two", "three"]
    items = [pairs[index] for index in range(4)]
    assert all(item.rejected is not None for item in items)
    rejected = [item.rejected for item in items if item.rejected is not None]
    assert [grey_of(item.visual) for item in items] == [200, 201, 202, 203]
    assert [grey_of(item.visual) for item in rejected] == [0, 10, 20, 30]
    assert {tuple(item.visual.shape) for item in (*items, *rejected)} == {(3, 16, 16)}
    assert count_preferences(*map(str, folders), video=False) == 4
    changed = pairs.digest
    (folders[0] / "1.txt").write_text("another")
    assert read(*folders).digest != changed


def test_a_chosen_one_without_a_rejected_one_is_left_out_and_named(folders: tuple[Path, Path]) -> None:
    chosen, rejected = folders
    (rejected / "1.png").unlink()
    write_image(rejected / "3.jpg", 0)
    found = load_preferences(chosen, str(rejected))
    assert [pair.name for pair in found.chosen] == ["0", "2"]
    assert "1.png: 0 rejected files have its name" in found.left_out
    assert "3.png: 2 rejected files have its name" in found.left_out
    (rejected / "2.webp").unlink()
    with pytest.raises(UserError, match="More files are left out than used"):
        load_preferences(chosen, str(rejected))


@pytest.mark.parametrize(
    ("rejected", "why"),
    [("", "has no rejected_dir"), ("missing", "no such folder"), ("chosen", "is the folder of the chosen ones")],
)
def test_a_rejected_folder_that_cannot_be_one_is_refused(folders: tuple[Path, Path], rejected: str, why: str) -> None:
    place = str(folders[0].parent / rejected) if rejected else ""
    with pytest.raises(UserError, match=why):
        load_preferences(folders[0], place)
    if rejected != "chosen":
        with pytest.raises(UserError, match=why):
            count_preferences(folders[0], place, video=False)


def table(folder: Path, *rows: object) -> Path:
    path = folder / "preferences.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def row(number: int, **more: object) -> dict[str, object]:
    return {"prompt": f"prompt {number}", "chosen": f"chosen/{number}.png", "rejected": "rejected/0.png", **more}


def test_a_table_names_both_files_and_drops_ties(folders: tuple[Path, Path]) -> None:
    path = table(
        folders[0].parent,
        row(0),
        row(1, score_chosen=2, score_rejected=2.0),
        row(2, score_chosen=0.5, score_rejected=-1),
        row(3, chosen=str(folders[0] / "3.png")),
    )
    found = load_preferences(path, "")
    assert [pair.prompt for pair in found.chosen] == ["prompt 0", "prompt 2", "prompt 3"]
    assert found.describe().endswith("3 preferences; 1 with equal scores are left out")
    items = read(path)
    assert [grey_of(items[index].visual) for index in range(3)] == [200, 202, 203]
    assert count_preferences(path, "", video=False) == 3
    with pytest.raises(UserError, match="leave rejected_dir out"):
        load_preferences(path, "rejected")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"prompt": "x", "chosen": "chosen/0.png"}, 'has no text under "rejected"'),
        (row(1, rejected="rejected/9.png"), "names rejected/9.png as rejected, which is not there"),
        (row(1, chosen="a.mp4"), "names a.mp4 as chosen, which is of a kind that is not read"),
        (row(0, rejected="chosen/0.png"), "has one file as chosen and as rejected"),
        (row(1, score_chosen=1, score_rejected=2), "the rejected one is better"),
        (row(1, score_chosen=1), "two numbers, or neither"),
        (row(1, score_chosen="1", score_rejected=0), "two numbers, or neither"),
        ({"chosen": "chosen/0.png", "rejected": "rejected/0.png"}, "has no text under 'prompt'"),
        (row(1, prompt=" "), "has an empty prompt"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_line(folders: tuple[Path, Path], bad: object, why: str) -> None:
    path = table(folders[0].parent, row(0), bad, row(2))
    found = load_preferences(path, "")
    assert len(found.chosen) == 2
    (line,) = (line for line in found.left_out.splitlines() if line.startswith("  line 2 "))
    assert why in line
    with pytest.raises(UserError, match="no usable preference"):
        load_preferences(table(folders[0].parent, bad), "")


def test_validation_has_preferences_or_prompts(folders: tuple[Path, Path]) -> None:
    def held_out(local_dir: Path, rejected_dir: Path | str = "") -> PreferencePairs | PromptFile | None:
        dataset = ValidationDatasetConfig(local_dir=str(local_dir), rejected_dir=str(rejected_dir))
        base = toy_sft_config()
        validation = base.validation.model_copy(update={"enable": True, "dataset": dataset})
        return load_held_out_preferences(base.model_copy(update={"validation": validation}))

    path = table(folders[0].parent, row(0), row(1))
    prompts = folders[0].parent / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert (is_preference_table(path), is_preference_table(prompts)) == (True, False)
    assert isinstance(held_out(path), PreferencePairs)
    assert isinstance(held_out(*folders), PreferencePairs)
    assert isinstance(held_out(prompts), PromptFile)
    with pytest.raises(UserError, match="rejected_dir"):
        held_out(folders[0])
    assert load_held_out_preferences(toy_sft_config()) is None


def test_cached_latents_take_the_place_of_both_members_or_of_none(folders: tuple[Path, Path], tmp_path: Path) -> None:
    pairs, cache = Part(read(*folders), 1, 3), TensorCache(tmp_path / "cache", "latents", "", 2**20)
    item = pairs[0]
    assert item.source
    cache.put(item.source, {"latent": torch.ones(2)})
    half = CachedLatents(pairs, cache)[0]
    assert half.latent is None
    assert half.visual.numel()
    assert half.rejected.visual.numel()
    cache.put(item.rejected.source, {"latent": torch.zeros(2)})
    whole = CachedLatents(pairs, cache)[0]
    assert (whole.latent.tolist(), whole.rejected.latent.tolist()) == ([1.0, 1.0], [0.0, 0.0])
    assert whole.visual.numel() == whole.rejected.visual.numel() == 0


@pytest.mark.parametrize("broken", ["chosen", "rejected"])
def test_a_broken_file_counts_once_in_however_many_rows_it_is(tmp_path: Path, broken: str) -> None:
    for number in range(6):
        write_image(tmp_path / f"{number}.png", 100 + number)
    (tmp_path / "0.png").write_bytes(b"no image")
    other = {"chosen": "rejected", "rejected": "chosen"}[broken]
    rows = [{"prompt": f"text {k}", broken: "0.png" if k < 3 else "1.png", other: f"{2 + k % 4}.png"} for k in range(8)]
    table = tmp_path / "table.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    pairs = read(table)
    skipped = Skipped.of(pairs, 0.2)  # one of eight
    taken = [batch.positions[0] for batch in load_batches(pairs, MapStream(8, 1, 0), 0, 8, skipped=skipped)]
    assert len(taken) == 8
    (reason,) = skipped.reasons.values()
    assert reason.startswith(f"{tmp_path}/0.png: cannot be read as an image")
    write_image(tmp_path / "0.png", 100)
    (tmp_path / "2.png").write_bytes(b"no image")
    (tmp_path / "3.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="2 of 8 samples cannot be read"):
        list(load_batches(read(table), MapStream(8, 1, 0), 0, 8, skipped=Skipped.of(pairs, 0.2)))


def test_a_data_set_of_ones_own_gives_both_visuals() -> None:
    raw = {"visual": torch.zeros(3, 4, 4), "rejected": torch.ones(3, 4, 4), "prompt": "x"}
    item = to_item(raw, 0)
    assert item.rejected is not None
    assert float(item.rejected.visual.mean()) == 1.0
    assert to_item({**raw, "rejected": None}, 0).rejected is None
    with pytest.raises(UserError, match="'rejected' must be a float tensor"):
        to_item({**raw, "rejected": np.zeros(3)}, 0)


def test_folders_in_the_layout_of_cosmos_predict_match_too(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    for number in range(2):
        write_image(tmp_path / f"data/images/{number}.png", 90)
        write_image(tmp_path / f"worse/images/{number}.png", 20)
    (tmp_path / "data/metas").mkdir()
    shutil.copy(folders[0] / "1.txt", tmp_path / "data/metas/1.txt")
    (tmp_path / "data/metas/0.txt").write_text("first")
    items = read(tmp_path / "data", tmp_path / "worse")
    assert items.prompts == ["first", "one"]
    assert grey_of(items[1].rejected.visual) == 20  # pyright: ignore[reportOptionalMemberAccess]
