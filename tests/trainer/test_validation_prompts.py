"""Validation prompts: the same files for both jobs, with a negative prompt and a seed for single rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from cosmos_rl.data.prompts import check_sampling, read_prompts
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import load_config
from cosmos_rl.tools.dataset.diffusers_dataset import validation_data
from cosmos_rl.tools.dataset.diffusion_nft import training_prompts, validation_prompts
from tests.support.trainer_runs import train

ROWS: list[dict[str, Any]] = [
    {"prompt": "a dog"},
    {"prompt": "a dog", "negative_prompt": "a cat in the rain"},
    {"prompt": "a dog", "seed": 7},
    {"prompt": "a dog", "negative_prompt": "a cat in the rain", "seed": 7},
]


def written(folder: Path, kind: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / f"val{kind}"
    texts = {
        ".txt": "\n".join(row["prompt"] for row in rows),
        ".jsonl": "\n".join(map(json.dumps, rows)),
        ".json": json.dumps(rows),
    }
    path.write_text(texts[kind], encoding="utf-8")
    return path


def options(path: Path) -> list[str]:
    return [
        "--validation.enable=true",
        "--validation.val_before_train=true",
        "--validation.n_generation=2",
        f"--validation.dataset.local_dir={path}",
        "--policy.diffusers.sample.num_steps=3",
        "--policy.diffusers.sample.guidance_scale=3.0",
    ]


def images(run: Path) -> list[np.ndarray]:
    folder = run / "media/validation/step_0"
    return [
        np.asarray(Image.open(folder / row["file"]), dtype=int)
        for row in json.loads((folder / "index.json").read_text())
    ]


def drawn_by_diffusers(base: Path, row: dict[str, Any], k: int) -> np.ndarray:
    pipe: Any = DiffusionPipeline.from_pretrained(base)
    pipe.set_progress_bar_config(disable=True)
    image = pipe(
        row["prompt"],
        negative_prompt=row.get("negative_prompt"),
        height=32,
        width=32,
        num_inference_steps=3,
        guidance_scale=3.0,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(row["seed"] + k),
    ).images[0]
    return np.asarray(image, dtype=int)


def assert_rows_act(run: Path, base: Path) -> None:
    """Negative prompts and seeds change their images; a row with a seed gives what diffusers makes of that seed."""
    found = images(run)
    assert len(found) == 2 * len(ROWS)
    for one, other in ((0, 2), (0, 4), (2, 6), (4, 6), (4, 5)):
        assert np.abs(found[one] - found[other]).max() > 1, (one, other)
    for row in (2, 3):
        for k in (0, 1):
            expected = drawn_by_diffusers(base, ROWS[row], k)
            assert np.abs(found[2 * row + k] - expected).max() <= 1, (row, k)  # rounding of a float to a level


def test_rows_act_in_validation_of_fine_tuning(tmp_path: Path, write_toml: Callable[..., Path], tiny_sd3: Path) -> None:
    config = write_toml("", train="")
    run = train(config, "--train.max_num_steps=1", *options(written(tmp_path, ".jsonl")))
    assert_rows_act(run, tiny_sd3)


def test_rows_act_in_validation_of_reinforcement_learning(
    tmp_path: Path, write_nft_toml: Callable[..., Path], tiny_sd3: Path
) -> None:
    config = write_nft_toml("reward_hacking_guard.enable = false")
    data = {"dataset": training_prompts, "val_dataset": validation_prompts}
    run = train(config, "--train.max_num_steps=1", *options(written(tmp_path, ".json")), **data)
    assert_rows_act(run, tiny_sd3)


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".json"])
def test_the_three_kinds_of_file_are_checked_and_read_alike(
    tmp_path: Path,
    write_toml: Callable[..., Path],
    write_nft_toml: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    for path in (write_toml(), write_nft_toml()):
        command = ["--config", str(path), *options(written(tmp_path, kind))]
        assert main(["check", *command]) == 0
        assert main(["check", "--env", *command]) == 0
        capsys.readouterr()
    config = load_config(write_toml(), options(written(tmp_path, kind)))
    data = validation_data(config)
    assert data is not None
    assert list(data) == ["a dog"] * 4  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("row", "guidance", "message"),
    [
        ({"seed": "7"}, 3.0, r"validation prompt 1 \('a dog'\): seed: found '7'; allowed: a whole number"),
        ({"seed": True}, 3.0, "seed: found True"),
        ({"seed": -1}, 3.0, "seed: found -1"),
        ({"seed": 2**63}, 3.0, "seed: found"),
        ({"negative_prompt": 3}, 3.0, "negative_prompt: found 3; allowed: a text"),
        ({"negative_prompt": "x"}, 1.0, "guidance_scale = 1 switches that off"),
    ],
)
def test_what_cannot_act_is_refused_before_a_model_is_loaded(
    tmp_path: Path,
    write_toml: Callable[..., Path],
    write_nft_toml: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any],
    guidance: float,
    message: str,
) -> None:
    path = written(tmp_path, ".json", [{"prompt": "a cat", "seed": 3}, {"prompt": "a dog", **row}])
    with pytest.raises(UserError, match=message):
        check_sampling(read_prompts(path), guidance)
    for config in (write_toml(), write_nft_toml()):
        command = [
            "--config",
            str(config),
            *options(path),
            f"--policy.diffusers.sample.guidance_scale={guidance}",
        ]
        assert main(["check", "--env", *command]) == 2
        assert "validation prompt 1" in capsys.readouterr().err


def test_keys_of_rows_without_effect_are_named(
    tmp_path: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, ".json", [{"prompt": "a cat", "width": 8}, {"prompt": "b", "negativ_prompt": "x"}])
    assert main(["check", "--env", "--config", str(write_toml()), *options(path)]) == 0
    assert "keys of rows that have no effect: negativ_prompt, width" in capsys.readouterr().out
    train(write_toml(), "--train.max_num_steps=1", *options(path))
    assert "keys of rows that have no effect: negativ_prompt, width" in capsys.readouterr().out


def test_a_negative_prompt_for_all_is_refused_with_the_keys_that_exist(write_toml: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"policy\.diffusers\.sample\.negative_prompt: unknown key"):
        load_config(write_toml(), ['--policy.diffusers.sample.negative_prompt="x"'])
