"""What the metrics are called in words, which direction is better, and what is noteworthy about them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cosmos_rl.tracking.report.record import Record
from cosmos_rl.tracking.report.svg import format_number

LIMIT = "_limit"
"""``guard/<name>_limit`` is the value that ``guard/<name>`` should not cross."""
NORMS = {
    "guard/velocity_norm_ratio/": "Velocity norm at held-out samples, relative to the start: median by noise level",
    "guard/velocity_norm_ratio_p90/": "The same: 90 % quantile by noise level",
    "train/velocity_norm_ratio/": "Velocity norm in training, relative to the reference: median by noise level",
    "train/velocity_norm_ratio_p90/": "The same in training: 90 % quantile by noise level",
}
"""Prefixes of metrics that are drawn in one figure each."""
SET_LOSS = r"val/([^/]+)/loss_mean"
GRADIENT_SHARE = r"train/gradient_share/(\d+)"
"""Of each trained step of the sampler; drawn in one figure."""
_SET_SCORE = r"val/([^/]+)/(?:reward/(?:mean|(.+)_mean)|loss_mean)"
"""What a run with several validation sets is judged by on each."""


@dataclass(frozen=True)
class Measure:
    """How one metric is shown."""

    title: str
    better: int = 0
    """+1: more is better, -1: less is better, 0: neither."""
    unit: str = ""


_NAMED: Sequence[tuple[str, Measure]] = (
    (r"reward/mean", Measure("Reward of the training samples", 1)),
    (r"val/reward/mean", Measure("Reward on the validation prompts", 1)),
    (r"reward/(.+)/mean", Measure("Reward of the training samples of the set “{}”", 1)),
    (r"reward/(.+)_mean", Measure("Reward “{}”, training samples", 1)),
    (r"val/reward/(.+)_mean", Measure("Reward “{}”, validation prompts", 1)),
    (r"val/loss_mean", Measure("Loss on held-out data", -1)),
    (r"val/([^/]+)/reward/mean", Measure("Reward on “{}”", 1)),
    (r"val/([^/]+)/reward/(.+)_mean", Measure("Reward “{1}” on “{0}”", 1)),
    (SET_LOSS, Measure("Loss on “{}”", -1)),
    (r"train/loss_mean", Measure("Training loss")),
    (r"train/accuracy_mean", Measure("Preferences fitted better than by the reference", 1)),
    (r"val/accuracy_mean", Measure("Held-out preferences fitted better than by the reference", 1)),
    (r"(?:train|val)/margin_mean", Measure("Margin of the preferences", -1)),
    (r"(?:train|val)/chosen_error_change_mean", Measure("Error of the chosen images, less that of the reference", -1)),
    (r"guard/loss_ratio", Measure("Held-out loss, relative to the start")),
    (r"guard/diversity_ratio", Measure("Diversity of the samples, relative to the start")),
    (r"guard/untrained_reward", Measure("Reward that is not trained on", 1)),
    (r"guard/untrained_reward/(.+)", Measure("Reward “{}”, not trained on", 1)),
    (r"guard/untrained_drop/(.+)", Measure("Drop of reward “{}”, in standard deviations of its first scores", -1)),
    (r"guard/(.+)", Measure("Guard: {}")),
    (r"train/policy_loss_mean", Measure("Policy loss")),
    (r"train/kl_loss_mean", Measure("Distance to the reference (KL)")),
    (r"train/(.+)/kl_loss_mean", Measure("Distance of the set “{}” to its reference (KL)")),
    (r"train/reference_age", Measure("Steps since the reference was the policy")),
    (r"train/dpo_beta_mean", Measure("Beta that follows the margins")),
    (r"train/old_kl_mean", Measure("Distance to the old policy (KL)")),
    (GRADIENT_SHARE, Measure("Share of sampling step {} in the gradient")),
    (r"optim/grad_norm", Measure("Gradient norm")),
    (r"optim/learning_rate", Measure("Learning rate")),
    (r"train/nfe", Measure("Network evaluations so far")),
    (r"time/iteration", Measure("Time per step", unit="s")),
    (r"val/empty_images", Measure("Validation images of one colour", -1)),
    (r"val/nonfinite_images", Measure("Validation images with pixels that are not finite", -1)),
    (r"time/validation", Measure("Time per validation", unit="s")),
    (r"time/(.+)", Measure("Time: {}", unit="s")),
)


def measure(key: str) -> Measure:
    """How ``key`` is shown; a key without words of its own is shown by its name."""
    for pattern, found in _NAMED:
        match = re.fullmatch(pattern, key)
        if match:
            names = [name.replace("_", " ") for name in match.groups()]
            return Measure(found.title.format(*names), found.better, found.unit)
    return Measure(key)


def list_set_labels(keys: Sequence[str]) -> list[str]:
    """Of several validation sets, in the order in which they are logged."""
    matches = (re.fullmatch(_SET_SCORE, key) for key in keys)
    return list(dict.fromkeys(match[1] for match in matches if match and match[1] != "reward"))


@dataclass(frozen=True)
class SetScore:
    """How a number of one validation set went, each as (step, value)."""

    label: str
    what: str
    key: str
    first: tuple[int, float]
    best: tuple[int, float]
    last: tuple[int, float]


def list_set_scores(record: Record) -> list[SetScore]:
    """Rewards and losses of several validation sets, set by set; empty: there is one set."""
    found = []
    for label in list_set_labels(record.keys):
        for key in record.keys:
            match, known = re.fullmatch(_SET_SCORE, key), record.series(key).known
            if match is None or match[1] != label or not known:
                continue
            sign = measure(key).better
            best = max(known, key=lambda point: sign * point[1])
            what = match[2] or ("total reward" if key.endswith("reward/mean") else "loss")
            found.append(SetScore(label, what, key, known[0], best, known[-1]))
    return found


def list_reward_names(record: Record) -> list[str]:
    """Names of the single rewards that the metrics have, else those of the configuration."""
    found: dict[str, None] = {}
    for key in record.keys:
        match = re.fullmatch(r"(?:val/)?reward/(.+)_mean", key)
        if match:
            found[match[1]] = None
    listed = record.setting("train.train_policy.remote_reward.reward_fns") or []
    remote = record.setting("train.train_policy.use_remote_reward")
    if not found and remote:
        return [fn["name"] for fn in listed]
    return list(found)


def list_main_keys(record: Record) -> list[str]:
    """Metrics of the table of key numbers, the most important first."""
    names = list_reward_names(record)
    keys = ["val/reward/mean", *(f"val/reward/{name}_mean" for name in names), "reward/mean"]
    keys += [*(f"reward/{name}_mean" for name in names), "val/loss_mean", "train/loss_mean"]
    keys += ["val/accuracy_mean", "train/accuracy_mean", "train/chosen_error_change_mean"]
    keys += [key for key in record.keys if is_guarded(key)]
    keys += ["train/kl_loss_mean", "train/old_kl_mean", "optim/grad_norm"]
    keys += ["optim/learning_rate", "time/iteration", "train/nfe"]
    return [key for key in keys if key in record.keys]


def is_guarded(key: str) -> bool:
    """Whether ``key`` is a measure of the guard with a figure of its own, not its limit and not an alarm."""
    alone = not key.startswith(tuple(NORMS))
    return key.startswith("guard/") and alone and not key.endswith(LIMIT) and "alarm" not in key


def read_limit(record: Record, key: str) -> float | None:
    """The value that ``key`` should not cross, as it was recorded last."""
    ends = record.series(key + LIMIT).ends
    if not ends:
        return None
    return ends[1][1]


_SENTENCES: Sequence[tuple[str, Callable[[float | None], bool], str]] = (
    (
        "train/loss_mean",
        lambda value: value is None,
        "The loss was not finite at {}: left out, the weights stayed as they were.",
    ),
    ("val/empty_images", bool, "Validation images had one colour only at {}."),
    ("val/nonfinite_images", bool, "Validation images had pixels that are not finite at {}."),
    (
        "adv/zero_std_ratio",
        lambda value: value == 1.0,
        "At {} the samples of each prompt all had the same reward: nothing was learnt from them. Does the reward "
        "distinguish good from bad?",
    ),
)
"""(metric, which values are noteworthy, what they mean)."""


def warnings(record: Record) -> list[str]:
    """What a reader should know before believing the numbers: alarms, crossed limits, steps that were left out."""
    sentences = []
    for key in (key for key in record.keys if key.startswith("guard/") and "alarm" in key):
        steps = _list_steps_where(record, key, bool)
        if steps:
            sentences.append(f"Alarm {key} at {steps}.")
    sentences += [text for key in record.keys if is_guarded(key) for text in _describe_crossing(record, key)]
    for key, holds, text in _SENTENCES:
        steps = _list_steps_where(record, key, holds)
        if steps:
            sentences.append(text.format(steps))
    return sentences


def _list_steps_where(record: Record, key: str, holds: Callable[[float | None], bool]) -> str:
    """The steps at which a metric has such a value, in words; empty: there is none."""
    series = record.series(key)
    steps = [step for step, value in zip(series.steps, series.values, strict=True) if holds(value)]
    if not steps:
        return ""
    return _list_steps(steps)


def _describe_crossing(record: Record, key: str) -> list[str]:
    """A sentence when a value of the guard left the side of its limit on which it began."""

    limit, known = read_limit(record, key), record.series(key).known
    if limit is None or not known:
        return []
    how, sign = "below", -1.0
    if known[0][1] <= limit:
        how, sign = "above", 1.0
    beyond = [step for step, value in known if sign * (value - limit) > 0]
    if not beyond:
        return []
    last = format_number(known[-1][1])
    title, limit_text = measure(key).title, format_number(limit)
    return [f"{title}: {how} its limit {limit_text} at {_list_steps(beyond)}; the last value is {last}."]


def _list_steps(steps: Sequence[int]) -> str:
    """``step 4``, ``steps 4, 6, 8``, ``20 steps from 4 to 90``."""
    if len(steps) > 6:
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def format_change(first: float, last: float) -> str:
    """The difference with its sign."""
    sign = ""
    if last >= first:
        sign = "+"
    return f"{sign}{format_number(last - first)}"
