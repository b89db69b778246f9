"""Names of metrics that older dashboards show."""

from pathlib import Path

import pytest

from cosmos_rl.tracking.older_names import add_older_names
from cosmos_rl.tracking.tracked_run import TrackedRun
from tests.support.patience import wait_until

OURS = {
    "reward/mean": 1.0,
    "reward/ocr_mean": 2.0,
    "train/policy_loss_mean": 3.0,
    "train/kl_loss_mean": 4.0,
    "train/data_loss_mean": 5.0,
    "train/log_ratio_mean": 6.0,
    "time/rollout": 7.0,
}
OLDER = {
    "GRPO/reward_mean": 1.0,
    "GRPO/ocr": 2.0,
    "GRPO/policy_loss": 3.0,
    "GRPO/kl_loss": 4.0,
    "GRPO/data_loss": 5.0,
    "GRPO/log_prob_ratio": 6.0,
}


def test_metrics_keep_their_names_and_get_the_older_ones() -> None:
    assert add_older_names(OURS) == {**OURS, **OLDER}
    assert add_older_names({"train/loss_mean": 1.0}) == {"train/loss_mean": 1.0}


@pytest.mark.process
def test_wandb_gets_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from cosmos_rl.tracking.wandb_logger import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger(TrackedRun(tmp_path, "project", None, "name", "run", {}))
    logger.log(1, OURS)
    logger.finish()
    [recorded] = tmp_path.glob("wandb/offline-run-*/*.wandb")

    def missing() -> list[str]:
        text = recorded.read_bytes()
        return [name for name in {**OURS, **OLDER} if name.encode() not in text]

    wait_until(lambda: not missing(), "names in wandb's file, which a process of its own writes")
