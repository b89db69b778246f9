"""Several folders with repeats, weights and flips."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_rl.data.folders import Folders, load_training_pairs
from cosmos_rl.data.items import Part
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.data.streams import MapStream, Skipped, load_batches
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import FolderConfig, load_config
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.pairs import edit_folder
from tests.support.states import assert_same_state, saved_state
from tests.support.trainer_runs import train


def two_folders(place: Path) -> tuple[Path, Path]:
    """Three and two random images, with their numbers as captions."""
    found = []
    for name, count in (("own", 3), ("class", 2)):
        (place / name).mkdir()
        for number in range(count):
            pixels = np.random.default_rng(len(found) * 9 + number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / name / f"{number}.png")
            (place / name / f"{number}.txt").write_text(f"{name} {number}")
        found.append(place / name)
    return found[0], found[1]


def join(place: Path, *, flip: bool = False) -> Folders:
    own, others = two_folders(place)
    settings = [FolderConfig(local_dir=f"{own}", repeats=4, flip=flip), FolderConfig(local_dir=f"{others}", weight=0.5)]
    return Folders([LocalPairs(one.local_dir, 32, 32) for one in settings], settings, seed=1)


def test_an_epoch_takes_each_sample_as_often_as_its_folder_says(tmp_path: Path) -> None:
    data = join(tmp_path)
    assert len(data) == 3 * 4 + 2
    items = [item for batch in load_batches(data, MapStream(14, 7, 0), 0, 2) for item in batch.items]
    assert Counter(item.prompt for item in items) == {
        **{f"own {k}": 4 for k in range(3)},
        **{f"class {k}": 1 for k in range(2)},
    }
    assert {item.prompt.split()[0]: item.weight for item in items} == {"own": 1.0, "class": 0.5}
    assert data.prompts == [item.prompt for item in data]
    assert {item.weight for item in data} == {1.0}  # as in validation
    assert [len(part) for part in (data.prompts, data.names, data.edited)] == [14] * 3


def test_flips_are_keyed_by_the_position_and_have_entries_of_their_own(tmp_path: Path) -> None:
    data = join(tmp_path, flip=True)
    plain = data[0]
    taken = [data.take(0, position) for position in range(200)]
    mirrored = [not torch.equal(item.visual, plain.visual) for item in taken]
    assert all(
        torch.equal(item.visual, plain.visual.flip(-1)) for item, is_one in zip(taken, mirrored, strict=True) if is_one
    )
    assert 70 < sum(mirrored) < 130
    assert [not torch.equal(data.take(0, p).visual, plain.visual) for p in range(200)] == mirrored
    for position, (item, is_one) in enumerate(zip(taken, mirrored, strict=True)):
        known = data.identify(0, position)
        assert known is not None
        assert known.source == item.source
        assert (item.source == plain.source) != is_one
        assert item.prompt == plain.prompt
    assert all(torch.equal(data.take(13, p).visual, data[13].visual) for p in range(20))  # the other folder is not


def test_what_an_image_was_made_of_is_not_flipped(tmp_path: Path) -> None:
    folder = edit_folder(tmp_path / "edits")
    settings = FolderConfig(local_dir=f"{folder}", flip=True)
    with pytest.raises(UserError, match="flip = true mirrors an image and not the one that it was made of"):
        Folders([LocalPairs(folder, 32, 32)], [settings], 0)


def test_a_broken_file_counts_once_however_often_it_is_repeated(tmp_path: Path) -> None:
    own, others = two_folders(tmp_path)
    settings = [FolderConfig(local_dir=f"{others}"), FolderConfig(local_dir=f"{own}", repeats=10)]

    def read_twice() -> Skipped:
        data = Folders([LocalPairs(one.local_dir, 32, 32) for one in settings], settings, seed=1)
        skipped = Skipped.of(Part(data, 0, len(data)), 0.05)
        list(load_batches(data, MapStream(32, 8, 0), 0, 8, skipped=skipped))
        return skipped

    (own / "1.png").write_bytes(b"no image")
    skipped = read_twice()
    assert (list(skipped.reasons), skipped.length) == ([3], 5)
    (own / "2.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="2 of 5 samples cannot be read, more than"):
        read_twice()


def sd_scripts_epoch(
    own: list[str], repeats: int, regularisation: list[str], prior_loss_weight: float
) -> dict[str, tuple[int, float]]:
    """How often an epoch of kohya's sd-scripts takes each image, and the factor on its loss.

    The rule of `DreamBoothDataset.__init__` and `BaseDataset.__getitem__` there: images of `is_reg` are taken one after
    the other, again and again, until they are as many as the training images with their repeats.
    """
    found = dict.fromkeys(own, (repeats, 1.0))
    counts = Counter[str]()
    place = 0
    while sum(counts.values()) < repeats * len(own):
        counts[regularisation[place % len(regularisation)]] += 1
        place += 1
    return found | {name: (count, prior_loss_weight) for name, count in counts.items()}


@pytest.mark.parametrize("others", [2, 4, 5, 9, 15])
def test_the_documented_repeats_and_weight_weigh_regularisation_as_sd_scripts_does(tmp_path: Path, others: int) -> None:
    """The rule of docs/data.md with T = 3 images x 4 repeats."""
    prior, total = 0.7, 12
    folders = []
    for name, count in (("own", 3), ("class", others)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (32, 32)).save(tmp_path / name / f"{number}.png")
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number}")
        folders.append(str(tmp_path / name))
    repeats = max(round(total / others), 1)
    settings = [
        FolderConfig(local_dir=folders[0], repeats=4),
        FolderConfig(local_dir=folders[1], repeats=repeats, weight=prior * total / (repeats * others)),
    ]
    data = Folders([LocalPairs(one.local_dir, 32, 32) for one in settings], settings, seed=1)
    (batch,) = load_batches(data, MapStream(len(data), len(data), 0), 0, 1)
    weights: dict[str, float] = {}
    for item in batch.items:
        weights[item.prompt] = weights.get(item.prompt, 0.0) + item.weight
    counts = Counter(item.prompt for item in batch.items)
    theirs = sd_scripts_epoch([f"own {k}" for k in range(3)], 4, [f"class {k}" for k in range(others)], prior)
    for kind in ("own", "class"):  # what an epoch weighs a folder at
        ours = sum(weight for name, weight in weights.items() if name.startswith(kind))
        assert ours == pytest.approx(sum(n * weight for name, (n, weight) in theirs.items() if name.startswith(kind)))
    if total % others == 0:  # then each image by itself, too
        assert {name: (counts[name], pytest.approx(weights[name] / counts[name])) for name in counts} == theirs
    else:
        assert {counts[f"class {k}"] for k in range(others)} == {repeats}


def table(own: Path, others: Path, weight: float = 1.0, flip: bool = False) -> str:
    flips = str(flip).lower()
    return (
        f'--train.train_policy.dataset={{folders = [{{local_dir = "{own}", repeats = 2, flip = {flips}}}, '
        f'{{local_dir = "{others}", weight = {weight}}}]}}'
    )


def test_a_weight_scales_the_loss_of_its_samples_and_not_what_the_mean_is_over(
    write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    options = ("--train.max_num_steps=1", "--train.global_batch_size=8", "--train.ckpt.enable_checkpoint=false")
    own, others = two_folders(tmp_path)
    losses = [
        read_metrics(train(write_toml(), *options, table(own, others, weight)) / "metrics.jsonl")[-1]["train/loss_mean"]
        for weight in (1.0, 0.5, 2.0)
    ]
    # all eight samples are in the step: a + b, a + b / 2 and a + 2 b
    assert losses[0] - losses[1] == pytest.approx((losses[2] - losses[0]) / 2, rel=1e-4)
    assert losses[0] > losses[1] > 0


def test_a_run_on_folders_with_flips_and_caches_resumes_exactly(
    write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    options = (
        table(*two_folders(tmp_path), weight=0.5, flip=True),
        "--train.max_num_steps=4",
        "--train.ckpt.save_freq=2",
        "--train.train_policy.enable_dataset_cache=true",
    )
    calm = train(write_toml(), *options)
    run = train(write_toml(), *options, "--train.max_num_steps=2")
    train(write_toml(), *options, resume=(run, 2))
    assert_same_state(saved_state(run, 4), saved_state(calm, 4))


def test_check_counts_the_folders_and_refuses_what_does_not_go_together(
    write_toml: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folders = write_toml(), table(*two_folders(tmp_path))
    assert main(["check", "--env", "--config", str(config), folders]) == 0
    assert "8 captions in 2 folders" in capsys.readouterr().out
    gone = folders.replace("/class", "/gone")
    assert main(["check", "--env", "--config", str(config), gone]) == 2
    assert "train.train_policy.dataset.folders.1.local_dir" in capsys.readouterr().err
    wrong = {
        'local_dir = "x", folders': "train.train_policy.dataset.folders: given together with local_dir",
        "test_size = 1, folders": "train.train_policy.dataset.test_size: found 1; allowed without repeats",
    }
    for text, message in wrong.items():
        with pytest.raises(UserError, match=message):
            load_config(config, [folders.replace("folders", text, 1)])
    with pytest.raises(UserError, match="train.train_policy.dataset.flip: found true; allowed only"):
        load_config(config, ["--train.train_policy.type=dpo", "--train.train_policy.dataset.flip=true"])
    assert len(load_training_pairs(load_config(config, [folders]))) == 8
