"""Which curves the page shows, and in which order."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_rl.tracking.report.measures import (
    GRADIENT_SHARE,
    LIMIT,
    NORMS,
    SET_LOSS,
    is_guarded,
    list_reward_names,
    list_set_labels,
    measure,
    read_limit,
)
from cosmos_rl.tracking.report.record import Record
from cosmos_rl.tracking.report.svg import Curve, Drawing, Limit, draw_chart

MAX_OTHERS = 60
_MEASURED_RARELY = ("val/", "guard/", "time/validation")


@dataclass(frozen=True)
class Label:
    """What curves of one colour, or of one kind of dashes, show."""

    text: str
    style: str


@dataclass(frozen=True)
class Figure:
    """A chart with its caption."""

    title: str
    labels: Sequence[Label]
    gaps: int
    """Values that are missing."""
    drawing: Drawing | None


@dataclass(frozen=True)
class Section:
    """Charts under one heading."""

    title: str
    figures: Sequence[Figure]
    about: str = ""


class Charts:
    """Chooses the charts of one or several runs and remembers which metrics were shown.

    A metric of a single run has a colour of its own; of several runs each has a colour, and each metric its dashes.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._keys = list(dict.fromkeys(key for record in records for key in record.keys))
        self._shown: set[str] = set()

    def sections(self) -> list[Section]:
        """The curves with a place of their own: rewards, the guard's measures, losses, times."""
        rewards = self._draw(
            "Reward",
            ["reward/mean", "val/reward/mean"],
            stds={"reward/mean": "reward/std"},
            also=["reward/max", "reward/min", "val/reward/std", "val/reward/max", "val/reward/min"],
        )
        names = dict.fromkeys(name for record in self._records for name in list_reward_names(record))
        for name in names:
            rewards += self._draw(f"Reward “{name}”", [f"reward/{name}_mean", f"val/reward/{name}_mean"])
        for label in list_set_labels(self._keys):
            rewards += self._draw_set(label)
        losses = [
            *self._draw("Loss", ["train/loss_mean", "val/loss_mean"]),
            *self._draw("Loss on the validation sets", [key for key in self._keys if re.fullmatch(SET_LOSS, key)]),
            *self._draw("Policy loss", ["train/policy_loss_mean"]),
            *self._draw(
                "Preferences fitted better than by the reference", ["train/accuracy_mean", "val/accuracy_mean"]
            ),
            *self._draw("Margin of the preferences", ["train/margin_mean", "val/margin_mean"]),
            *self._draw(
                "Error of the chosen images, less that of the reference",
                ["train/chosen_error_change_mean", "val/chosen_error_change_mean"],
            ),
            *self._draw("Distance to the reference (KL)", [key for key in self._keys if key.endswith("/kl_loss_mean")]),
            *self._draw("Distance to the old policy (KL)", ["train/old_kl_mean"]),
            *self._draw("Gradient norm", ["optim/grad_norm"]),
            *self._draw("Share of each sampling step in the gradient", self._list_gradient_shares()),
            *self._draw("Learning rate", ["optim/learning_rate"]),
        ]
        keys = self._keys
        guarded = [figure for key in keys if is_guarded(key) for figure in self._draw_guarded(key)]
        for start, title in NORMS.items():
            guarded += self._draw(title, [key for key in keys if key.startswith(start)])
        times = [figure for k in keys if measure(k).unit == "s" for figure in self._draw(measure(k).title, [k])]
        return [
            Section(
                "Rewards",
                rewards,
                "Band: standard deviation of a step's samples. Noisy curves: faint as measured, smoothed on top.",
            ),
            Section(
                "Guard against reward hacking",
                guarded,
                "Dashed: the limit that should not be crossed, or the value at the start.",
            ),
            Section("Loss and optimiser", losses),
            Section("Time", times, "Seconds."),
        ]

    def collect_others(self) -> Section:
        """What ``sections`` left out, but for other views of what it shows."""
        others = [key for key in self._keys if key not in self._shown and not key.endswith(LIMIT)]
        return Section("", [figure for key in others for figure in self._draw(key, [key])][:MAX_OTHERS])

    def _list_gradient_shares(self) -> list[str]:
        """By the step of the sampler: a run may train others in each training step."""
        matches = (re.fullmatch(GRADIENT_SHARE, key) for key in self._keys)
        return [match[0] for match in sorted(filter(None, matches), key=lambda match: int(match[1]))]

    def _draw_set(self, label: str) -> list[Figure]:
        """The rewards on one of several validation sets."""
        start = f"val/{label}/reward/"
        spread = [start + name for name in ("std", "max", "min")]
        keys = [key for key in self._keys if key.startswith(start) and key not in spread]
        return self._draw(f"Rewards on “{label}”", keys, also=spread)

    def _draw_guarded(self, key: str) -> list[Figure]:
        found = dict.fromkeys(read_limit(record, key) for record in self._records)
        limits = [Limit("limit", limit) for limit in found if limit is not None]
        if not limits and key.endswith("_ratio"):
            limits.append(Limit("as at the start", 1.0, "start"))
        return self._draw(measure(key).title, [key], limits)

    def _draw(
        self,
        title: str,
        keys: Sequence[str],
        limits: Sequence[Limit] = (),
        stds: dict[str, str] | None = None,
        also: Sequence[str] = (),
    ) -> list[Figure]:
        """One chart of ``keys``; none when the run has none of them. ``also`` are shown by it as well."""
        keys = [key for key in keys if key in self._keys]
        if not keys:
            return []
        self._shown |= {*keys, *also, *(stds or {}).values()}
        several = len(self._records) > 1
        curves, gaps = [], 0
        for number, key in enumerate(keys):
            for run, record in enumerate(self._records):
                colour, dash = (run, number) if several else (number, 0)
                curves.append(_read_curve(record, key, (stds or {}).get(key), colour, dash))
                gaps += record.series(key).missing
        labels = [Label(key, f"d{i % 4}" if several else f"c{i % 8}") for i, key in enumerate(keys)]
        drawing = draw_chart(curves, limits, from_zero=all(_starts_at_zero(key) for key in keys))
        return [Figure(title, labels, gaps, drawing)]


def _read_curve(record: Record, key: str, std_key: str | None, colour: int, dash: int) -> Curve:
    series = record.series(key)
    std = None
    if std_key in record.keys:
        by_step = dict(record.series(std_key).known)
        std = [by_step.get(step) for step in series.steps]
    return Curve(series.steps, series.values, std, key.startswith(_MEASURED_RARELY), colour, dash)


def _starts_at_zero(key: str) -> bool:
    """Sizes that are read against nothing: without the zero, noise looks like a trend."""
    return measure(key).unit == "s" or key.endswith(("grad_norm", "learning_rate", "kl_loss_mean", "old_kl_mean"))
