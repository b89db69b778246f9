"""The guard against reward hacking: does the reward rise because the policy exploits it? What it measures is in
`guard_probe`, the rules are in `guard_rules`; here is what it remembers of the run, and what it does."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cosmos_rl.policy.config import RewardHackingGuardConfig
from cosmos_rl.policy.trainer.rl.guard_probe import GuardProbe, HeldOut
from cosmos_rl.policy.trainer.rl.guard_rules import UntrainedRewards, compare_measurements
from cosmos_rl.policy.trainer.task import Alarm
from cosmos_rl.rollout.sampler import Conditions


class RewardHackingGuard:
    """Checks the policy every few steps; a check that fails warns, stops or rewinds the run."""

    def __init__(self, config: RewardHackingGuardConfig, probe: GuardProbe, held_out: HeldOut | None) -> None:
        """``held_out``: samples whose loss is measured; None: samples of the model as it is at the start."""
        self._config = config
        self.probe = probe
        self._held_out = held_out
        self._untrained = UntrainedRewards(config)
        self.rewinds = 0
        """How often the run was rewound."""
        self._good_step = 0  # the last one at which nothing was wrong

    @property
    def lr_factor(self) -> float:
        """Factor on the learning rate after so many rewinds."""
        return self._config.rewind_lr_factor**self.rewinds

    @property
    def kl_factor(self) -> float:
        """Factor on ``kl_beta`` after so many rewinds."""
        return self._config.rewind_kl_factor**self.rewinds

    def begin(self, step: int, conditions: Conditions) -> None:
        """Measure the start: before the first step, or where a checkpoint knows nothing of it."""
        if self._config.enable:
            self.probe.begin(step, self._held_out, conditions)

    def check(self, done: int, conditions: Conditions) -> tuple[dict[str, float], Alarm | None]:
        """(metrics, alarm) after ``done`` steps, where a check is due; all ranks must call it."""
        if not self._config.enable or done % self._config.freq:
            return {}, None
        metrics, wrong = compare_measurements(self._config, self.probe.start, self.probe.measure(conditions))
        more, also = self._untrained.check()
        wrong = wrong + also
        metrics |= {**more, "guard/alarms": float(len(wrong)), "guard/rewinds": float(self.rewinds)}
        if not wrong:
            self._good_step = done
            return metrics, None
        return metrics, self._alarm(f"step {done}: " + "; ".join(wrong))

    def _alarm(self, text: str) -> Alarm:
        action, key = self._config.action, "train.train_policy.reward_hacking_guard"
        others = f'{key}.action = "warn" continues'
        if action == "stop":
            others = f'{key}.action = "rewind" tries that by itself, "warn" continues'
        if action == "rewind" and self.rewinds >= self._config.max_rewinds:
            action = "stop"
            text += f". The run went back {self.rewinds} times already (reward_hacking_guard.max_rewinds)"
        return Alarm(text, action, self._good_step, self.rewinds + 1, others)

    def on_rewind(self, step: int, rewinds: int) -> None:
        """The run continues after ``step``, at which nothing was wrong, with so many rewinds in all."""
        self.rewinds, self._good_step = rewinds, step

    def note_validation(self, step: int, scores: Mapping[str, Tensor], of: str) -> None:
        """The validation scores ``[N]`` of rewards that are not trained on, see ``UntrainedRewards.note``."""
        self._good_step = min(self._good_step, self._untrained.note(step, scores, of))

    def tensors(self) -> dict[str, Tensor]:
        """What must survive a restart."""
        if not self._config.enable or self._held_out is not None:
            return {}
        return {"latents": self.probe.held_out.latents}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues from (JSON-ready)."""
        return {
            "rewinds": self.rewinds,
            "good_step": self._good_step,
            "start": self.probe.state_dict(),
            "untrained": self._untrained.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        self.rewinds, self._good_step = int(state["rewinds"]), int(state["good_step"])
        self.probe.load_state_dict(state["start"])
        self._untrained.load_state_dict(state["untrained"])
