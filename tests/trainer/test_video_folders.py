"""Fine-tuning on folders of video files by the documented script, from files to exported weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cosmos_rl.launcher.cli import main
from tests.support.family_runs import ORDINARY, family_toml
from tests.support.states import assert_same_state, saved_state
from tests.support.tars import pack_parallel
from tests.support.trainer_runs import train
from tests.support.videos import write_video

WAN = next(family for family in ORDINARY if family.name == "wan")


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """The layout of Cosmos-Predict: clips of 5 to 16 frames, one of them cut off."""
    folder = tmp_path / "clips"
    for number in range(12):
        write_video(folder / "videos" / f"{number:02}.mp4", 5 + number, fps=24, size=(48, 80))
    command = ["create-prompts", "--dataset_path", str(folder), "--prompt", "A video of sks teal robot."]
    assert main(command) == 0
    broken = folder / "videos" / "07.mp4"
    broken.write_bytes(broken.read_bytes()[:200])
    return folder


@pytest.mark.slow
def test_a_folder_of_videos_trains_and_resumes_exactly(tmp_path: Path, clips: Path) -> None:
    config = family_toml(tmp_path, WAN, job="sft", images=clips)
    whole = train(config)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss_mean"] for row in rows if "train/loss_mean" in row]
    assert len(losses) == 3
    assert all(torch.tensor(losses).isfinite())
    assert {row["data/fps_mean"] for row in rows if "data/fps_mean" in row} == {24.0}
    assert rows[-1]["data/skipped"] == 1  # 12 samples in 3 steps of 4: every clip's turn has come
    weights = load_file(whole / "safetensors" / "step_3" / "lora" / "model.safetensors")
    again = train(config, resume=(whole, 1))
    resumed = load_file(again / "safetensors" / "step_3" / "lora" / "model.safetensors")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.zoo
def test_training_on_parallel_tars_of_videos_is_training_on_their_folder(tmp_path: Path) -> None:
    """Wan on clips that are longer than needed, so that windows are drawn."""
    loose = tmp_path / "clips"
    for number in range(6):
        write_video(loose / f"{number}.mp4", 5 + number, fps=24, size=(48, 80))
        (loose / f"{number}.txt").write_text(f"clip {number}")
    shards = pack_parallel(loose, tmp_path / "shards", 4, {".mp4": "video", ".txt": "metas"})
    info = tmp_path / "wdinfo.json"
    info.write_text(json.dumps({"root": "shards", "data_list": ["000.tar", "001.tar"], "total_key_count": 6}))
    states = []
    for place in (loose, shards, info):
        run = train(family_toml(tmp_path, WAN, job="sft", images=place))
        states.append(saved_state(run, 3))
    assert_same_state(states[0], states[1])
    assert_same_state(states[0], states[2])


def test_check_finds_what_a_folder_of_videos_lacks(
    tmp_path: Path, clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (clips / "metas" / "03.txt").unlink()
    config = family_toml(tmp_path, WAN, job="sft", images=clips)
    main(["check", "--env", "--config", str(config)])
    assert "videos/03.mp4: has no caption" in capsys.readouterr().out
    assert main(["check", "--env", "--config", str(config), "--policy.diffusers.is_video=false"]) == 2
    assert "no usable pair" in "".join(capsys.readouterr())
