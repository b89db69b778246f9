"""`[train.train_policy.dpo_auto_beta]`: a beta of preference optimisation that follows the margins."""

from typing import Annotated, Any

from pydantic import Field, StrictFloat

from cosmos_rl.policy.config.base import OpenFraction, PositiveFloat, Table


class AutoBetaConfig(Table):
    """`[train.train_policy.dpo_auto_beta]`: a beta that follows the margins, so that pairs keep a gradient."""

    target_factor: Annotated[StrictFloat, Field(gt=0, lt=0.5)] | None = None
    """Gradient factor (1/2 at the start) that a learnt pair of mean margin is to keep, as SimpleTuner's 0.2: beta is
    -2 logit(target_factor) over the mean size of the margins. Unset: dpo_beta is constant."""
    decay: OpenFraction = 0.99
    """Of the moving average of the size of the margins, each training step."""
    least: PositiveFloat = 65.0
    """Lower bound of beta, whose errors are means: SimpleTuner's 0.001 of errors summed over 65,536 elements."""
    most: PositiveFloat = 65536.0
    """Upper bound of beta: SimpleTuner's 1, in the same way."""

    @property
    def settings(self) -> dict[str, Any]:
        """As `algorithms.dpo.FollowingBeta` names them."""
        return {"target": self.target_factor, "decay": self.decay, "least": self.least, "most": self.most}

    def problem(self) -> str | None:
        """What contradicts itself or does not act, with its key; None: nothing."""
        key, usual = "train.train_policy.dpo_auto_beta", AutoBetaConfig()
        if self.least > self.most:
            return f"{key}.least: found {self.least}; allowed: at most {key}.most = {self.most}"
        for name in ("decay", "least", "most"):
            if self.target_factor is None and getattr(self, name) != getattr(usual, name):
                return f"{key}.{name}: found {getattr(self, name)}, which acts only with {key}.target_factor"
        return None
