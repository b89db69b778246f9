"""Names by which dashboards of the older documents know metrics; only wandb gets them, next to ours."""

import re
from collections.abc import Mapping
from typing import Any

_NAMES = {
    "reward/mean": "GRPO/reward_mean",
    "train/policy_loss_mean": "GRPO/policy_loss",
    "train/kl_loss_mean": "GRPO/kl_loss",
    "train/data_loss_mean": "GRPO/data_loss",
    "train/log_ratio_mean": "GRPO/log_prob_ratio",
}
_ONE_REWARD = re.compile(r"reward/(?P<name>.+)_mean")


def add_older_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """``metrics``, and those that have an older name under it too; ``reward/<name>_mean`` is ``GRPO/<name>``."""
    added = {older: metrics[name] for name, older in _NAMES.items() if name in metrics}
    for name, value in metrics.items():
        one = _ONE_REWARD.fullmatch(name)
        if one:
            added[f"GRPO/{one['name']}"] = value
    return {**metrics, **added}
