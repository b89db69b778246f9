"""Fine-tuning that is validated on several sets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cosmos_rl.tracking.metrics import read_metrics
from tests.support.trainer_runs import train


def test_fine_tuning_on_several_sets_has_a_loss_of_each_folder_and_images_of_each(
    tmp_path: Path, write_toml: Callable[..., Path], image_folder: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a dog")
    folder = f'dataset = {{local_dir = "{image_folder}"'
    sets = f'[{{name = "all", {folder}}}}}, {{name = "few", {folder}, limit = 2, spread = true}}}}, '
    sets += f'{{name = "strong", dataset = {{local_dir = "{prompts}"}}, guidance_scale = 7.0, num_steps = 2}}]'
    short = ("--train.max_num_steps=1", "--train.ckpt.export_safetensors=false", "--validation.enable=true")
    heard: list[dict[str, Any]] = []
    hooks = {"post_validation_hook": lambda owner, data: heard.append(data)}
    options = (*short, f"--validation.sets={sets}", "--policy.diffusers.sample.num_steps=2")
    run = train(write_toml(), *options, hook_fns=hooks)
    (line,) = read_metrics(run / "metrics.jsonl")
    assert {"val/all/loss_mean", "val/few/loss_mean"} < line.keys()
    assert line["val/all/loss_mean"] != line["val/few/loss_mean"]
    assert [data["val_avg_loss"] for data in heard] == [line["val/all/loss_mean"]]
    rows = json.loads((run / "media/validation/step_1/index.json").read_text())
    labels = [row["set"] for row in rows]
    assert (labels.count("few"), labels.count("strong")) == (2, 1)
    assert list(dict.fromkeys(labels)) == ["all", "few", "strong"]
    state = json.loads(next(run.glob("checkpoints/step_1/policy/trainer_state.json")).read_text())
    assert str(line["val/all/loss_mean"]) in json.dumps(state)
