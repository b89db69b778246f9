"""DiffusionNFT on a small generator that miscounts: it learns to count, and the guard stops its reward hacking."""

from pathlib import Path

import pytest

from cosmos_rl.checkpoint.layout import list_whole_steps
from cosmos_rl.data.images import to_uint8
from cosmos_rl.errors import UserError
from cosmos_rl.storage import run_folder
from tests.support.toy_shapes import (
    PROMPTS,
    ShapesModel,
    colour_right,
    count_right,
    held_out_shapes,
    shapes,
    shapes_tables,
    shapes_trainer,
)
from tests.support.toy_tasks import metrics_of, run_loop, toy_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # less than a minute each where nothing else runs


def test_real_images_are_right() -> None:
    held_out = held_out_shapes(48)
    media, prompts = (
        to_uint8(ShapesModel(None).decode(held_out.latents)).numpy(),
        [str(prompt) for prompt in held_out.prompts],
    )
    others = prompts[1:] + prompts[:1]  # the next colour
    assert shapes(media, prompts).tolist() == count_right(media, prompts).tolist() == [1.0] * 48
    assert colour_right(media, prompts).tolist() == [1.0] * 48
    assert colour_right(media, others).tolist() == [0.0] * 48
    assert shapes(0 * media, [PROMPTS[-1]] * 48).tolist() == [0.0] * 48


@pytest.mark.zoo
def test_it_learns_to_count(tmp_path: Path) -> None:
    """Right counts from about 0.65 to at least 0.8, while the held-out loss stays under twice that of the start."""
    config = toy_config({**shapes_tables(0, 40, kl_beta=0.4), "validation.freq": 40})
    run_loop(config, shapes_trainer(config), tmp_path)
    rows = metrics_of(tmp_path)
    right = {row["step"]: row["val/reward/count_mean"] for row in rows if "val/reward/count_mean" in row}
    assert right[0] < 0.72
    assert right[40] >= 0.8
    assert rows[-1]["val/reward/colour_mean"] >= 0.98
    ratios = [row["guard/loss_ratio"] for row in rows if "guard/loss_ratio" in row]
    assert len(ratios) == 8
    assert ratios[-1] <= 2.0
    assert all(row["guard/alarms"] == 0 for row in rows if "guard/alarms" in row)


@pytest.mark.zoo
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_guard_stops_a_run_that_would_collapse(tmp_path: Path, seed: int) -> None:
    """Without KL and at a constant rate right counts collapse by step 60 (`benchmarks/nft_tasks.py` lets them); the
    alarm comes before they fall."""
    rarely = {"train.train_policy.reward_hacking_guard.freq": 1, "validation.freq": 60, "validation.n_generation": 40}
    config = toy_config({**shapes_tables(seed, 60, kl_beta=0.0), "train.optm_decay_type": "none", **rarely})
    trainer = shapes_trainer(config)
    with pytest.raises(UserError, match="the held-out flow-matching loss is .* times that of the start"):
        run_loop(config, trainer, tmp_path)
    rows = metrics_of(tmp_path)
    last = rows[-1]
    assert last["step"] <= 10
    assert last["guard/loss_ratio"] > 3.0
    right = trainer.validate(last["step"], lambda *_: None).metrics["val/reward/count_mean"]
    # 960 samples each: the difference of two shares of 0.67 has a standard deviation of 0.02
    assert right >= rows[0]["val/reward/count_mean"] - 0.02
    run = run_folder.find_newest_run(tmp_path)
    assert run is not None
    assert list_whole_steps(run.checkpoints)[-1] == last["step"]
