"""Which curves the page shows, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_rl.tracking.report.measures import LIMIT, NORMS, is_guarded, list_reward_names, measure, read_limit
from cosmos_rl.tracking.report.record import Record
from cosmos_rl.tracking.report.svg import Curve, Drawing, Limit, draw_chart

MAX_OTHERS = 60
_MEASURED_RARELY = ("val/", "guard/", "time/validation")


@dataclass(frozen=True)
class Figure:
    """A chart with its caption."""

    title: str
    labels: Sequence[str]
    """Of the curves, in the order of their colours."""
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
    """Chooses the charts of a run and remembers which metrics were shown."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._shown: set[str] = set()

    def sections(self) -> list[Section]:
        """The curves with a place of their own: rewards, the guard's measures, losses, times."""
        rewards = self._draw(
            "Reward",
            ["reward/mean", "val/reward/mean"],
            stds={"reward/mean": "reward/std"},
            also=["reward/max", "reward/min", "val/reward/std", "val/reward/max", "val/reward/min"],
        )
        for name in list_reward_names(self._record):
            rewards += self._draw(f"Reward “{name}”", [f"reward/{name}_mean", f"val/reward/{name}_mean"])
        losses = [
            *self._draw("Loss", ["train/loss_mean", "val/loss_mean"]),
            *self._draw("Policy loss", ["train/policy_loss_mean"]),
            *self._draw(
                "Preferences fitted better than by the reference", ["train/accuracy_mean", "val/accuracy_mean"]
            ),
            *self._draw("Margin of the preferences", ["train/margin_mean", "val/margin_mean"]),
            *self._draw(
                "Error of the chosen images, less that of the reference",
                ["train/chosen_error_change_mean", "val/chosen_error_change_mean"],
            ),
            *self._draw("Distance to the reference (KL)", ["train/kl_loss_mean"]),
            *self._draw("Distance to the old policy (KL)", ["train/old_kl_mean"]),
            *self._draw("Gradient norm", ["optim/grad_norm"]),
            *self._draw("Learning rate", ["optim/learning_rate"]),
        ]
        keys = self._record.keys
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
        others = [key for key in self._record.keys if key not in self._shown and not key.endswith(LIMIT)]
        return Section("", [figure for key in others for figure in self._draw(key, [key])][:MAX_OTHERS])

    def _draw_guarded(self, key: str) -> list[Figure]:
        limit, limits = read_limit(self._record, key), []
        if limit is not None:
            limits.append(Limit("limit", limit))
        elif key.endswith("_ratio"):
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
        keys = [key for key in keys if key in self._record.keys]
        if not keys:
            return []
        self._shown |= {*keys, *also, *(stds or {}).values()}
        curves = [self._curve(key, (stds or {}).get(key)) for key in keys]
        gaps = sum(self._record.series(key).values.count(None) for key in keys)
        drawing = draw_chart(curves, limits, from_zero=all(_starts_at_zero(key) for key in keys))
        return [Figure(title, keys, gaps, drawing)]

    def _curve(self, key: str, std_key: str | None) -> Curve:
        series = self._record.series(key)
        std = None
        if std_key in self._record.keys:
            by_step = dict(self._record.series(std_key).known)
            std = [by_step.get(step) for step in series.steps]
        return Curve(series.steps, series.values, std, dots=key.startswith(_MEASURED_RARELY))


def _starts_at_zero(key: str) -> bool:
    """Sizes that are read against nothing: without the zero, noise looks like a trend."""
    return measure(key).unit == "s" or key.endswith(("grad_norm", "learning_rate", "kl_loss_mean", "old_kl_mean"))
