"""What a resumed reinforcement-learning run must have in common with its checkpoint: prompts, draws, adapter."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl.data.prompts import digest_prompts, to_prompt_record
from cosmos_rl.errors import UserError
from tests.support.nft_runs import nft_toml, nft_train
from tests.support.pairs import other_captions, other_names
from tests.support.states import drop_steps_after

FEW = ("--policy.diffusers.sample.num_steps=2", "--train.ckpt.save_freq=1")
ROWS = [
    {"prompt": "a cat", "target": "CAT"},
    {"prompt": "a dog", "target": "DOG"},
    {"prompt": "a boat", "target": "BOAT"},
    {"prompt": "the sea", "target": "SEA"},
]


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Saved = tuple[Path, Path, Path]
"""Configuration, run folder, folder of the real samples."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_sd3: Path, image_folder: Path) -> Saved:
    """A run that has saved step 1, of prompts with metadata and of real samples."""
    folder = tmp_path_factory.mktemp("saved")
    pairs = shutil.copytree(image_folder, folder / "pairs")
    term = f'data_term = {{ beta = 0.1, local_dir = "{pairs}", batch_size = 4 }}'
    config = nft_toml(folder, tiny_sd3, extra=term)
    prompts = written(folder / "prompts.jsonl", ROWS)
    config.write_text(config.read_text().replace(str(folder / "prompts.txt"), str(prompts)))
    return config, nft_train(config, *FEW, "--train.max_num_steps=1"), pairs


def resume(saved: Saved, *options: str, steps: int = 2) -> None:
    config, run, _ = saved
    drop_steps_after(run, 1)
    nft_train(config, *FEW, f"--train.max_num_steps={steps}", *options, resume=(run, 1))


@pytest.mark.parametrize(
    "rows",
    [
        [{**ROWS[0], "prompt": "a hat"}, *ROWS[1:]],
        [{**ROWS[0], "target": "HAT"}, *ROWS[1:]],
        [ROWS[1], ROWS[0], *ROWS[2:]],
        ROWS[:3],
        [*ROWS, ROWS[0]],
    ],
    ids=["text", "metadata", "order", "fewer", "more"],
)
def test_other_prompts_are_refused(saved: Saved, tmp_path: Path, rows: Sequence[Any]) -> None:
    others = written(tmp_path / "others.jsonl", rows)
    with pytest.raises(UserError, match=r"was saved with prompts = '4 \(\w+\)', this run has '\d \(\w+\)'"):
        resume(saved, f"--train.train_policy.dataset.local_dir={others}")


@pytest.mark.parametrize("change", [other_captions, other_names])
def test_other_real_samples_are_refused(saved: Saved, tmp_path: Path, change: Callable[[Path], None]) -> None:
    moved = shutil.copytree(saved[2], tmp_path / "moved")
    change(moved)
    with pytest.raises(UserError, match=r"data_term \(digest of names and captions\) = '\w+', this run has '\w+'"):
        resume(saved, f"--train.train_policy.data_term.local_dir={moved}")


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--train.seed=1", "seed = 42, this run has 1"),
        ("--train.train_batch_per_replica=8", "samples_per_step = 16, this run has 8"),
        ("--rollout.n_generation=8", "n_generation = 4, this run has 8"),
        ("--train.train_policy.dataloader_seed=7", r"dataloader_seed = \d+, this run has 7"),
        ("--train.train_policy.dataloader_shuffle=false", "dataloader_shuffle = True, this run has False"),
        ("--policy.lora.lora_alpha=64", r"policy\.lora\.lora_alpha = 8.*, this run has 64"),
        ("--policy.lora.use_rslora=true", r"policy\.lora\.use_rslora = False, this run has True"),
    ],
)
def test_other_draws_and_another_strength_are_refused(saved: Saved, option: str, text: str) -> None:
    with pytest.raises(UserError, match=f"was saved with {text}"):
        resume(saved, option)


def test_the_same_data_in_other_places_resumes_and_what_may_change_is_one_line(
    saved: Saved, tmp_path: Path, tiny_sd3: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = {
        "train.train_policy.dataset.local_dir": written(tmp_path / "moved.jsonl", ROWS),
        "train.train_policy.data_term.local_dir": shutil.copytree(saved[2], tmp_path / "moved"),
        "policy.model_name_or_path": shutil.copytree(tiny_sd3, tmp_path / "base"),
    }
    changes = ("--train.train_policy.kl_beta=0.02", "--train.train_policy.data_term.beta=0.2")
    with caplog.at_level("WARNING", logger="cosmos"):
        resume(saved, *(f"--{key}={place}" for key, place in places.items()), *changes)
    (line,) = [message for message in caplog.messages if "Changed since" in message]
    assert sorted(line.partition(": ")[2].split("; ")) == [
        "train.train_policy.data_term.beta 0.1 -> 0.2",
        "train.train_policy.kl_beta 0.01 -> 0.02",
    ]


def test_the_digest_of_prompts_differs_by_text_metadata_and_order() -> None:
    def digest(*rows: dict[str, Any]) -> str:
        return digest_prompts([to_prompt_record(row, place) for place, row in enumerate(rows)])

    one, two = ROWS[:2]
    assert digest(one, two) == digest(dict(reversed(one.items())), two)
    changed = [{**one, "target": "C"}, {"prompt": "a cat"}, {**one, "more": 1}]
    several = [digest(one, two), digest(two, one), digest(one), *(digest(row, two) for row in changed)]
    assert len(set(several)) == len(several)
