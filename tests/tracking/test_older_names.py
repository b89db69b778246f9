"""Names of metrics that older dashboards show."""

from cosmos_rl.tracking.older_names import add_older_names


def test_metrics_keep_their_names_and_get_the_older_ones() -> None:
    ours = {"reward/mean": 1.0, "reward/ocr_mean": 2.0, "train/log_ratio_mean": 3.0, "time/rollout": 4.0}
    older = {"GRPO/reward_mean": 1.0, "GRPO/ocr": 2.0, "GRPO/log_prob_ratio": 3.0}
    assert add_older_names(ours) == {**ours, **older}
