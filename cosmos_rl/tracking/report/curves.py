"""Which curves the page shows, and in which order."""

from collections.abc import Sequence

from cosmos_rl.tracking.report.inlined import escape
from cosmos_rl.tracking.report.measures import LIMIT, NORMS, is_guarded, list_reward_names, measure, read_limit
from cosmos_rl.tracking.report.record import Record
from cosmos_rl.tracking.report.svg import Curve, Limit, draw_chart

MAX_OTHERS = 60
_MEASURED_RARELY = ("val/", "guard/", "time/validation")


class Charts:
    """Draws the charts of a run and remembers which metrics were shown."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._shown: set[str] = set()

    def sections(self) -> str:
        """All curves: rewards, the guard's measures, losses, times, and the rest folded away."""
        names = list_reward_names(self._record)
        rewards = [self._reward()]
        rewards += [
            self._figure(f"Reward “{name}”", [f"reward/{name}_mean", f"val/reward/{name}_mean"]) for name in names
        ]
        losses = [
            self._figure("Loss", ["train/loss_mean", "val/loss_mean"]),
            self._figure("Policy loss", ["train/policy_loss_mean"]),
            self._figure("Distance to the reference (KL)", ["train/kl_loss_mean"]),
            self._figure("Distance to the old policy (KL)", ["train/old_kl_mean"]),
            self._figure("Gradient norm", ["optim/grad_norm"]),
            self._figure("Learning rate", ["optim/learning_rate"]),
        ]
        guarded = [self._guard_figure(key) for key in self._record.keys if is_guarded(key)]
        for start, title in NORMS.items():
            guarded.append(self._figure(title, [key for key in self._record.keys if key.startswith(start)]))
        times = [self._figure(measure(k).title, [k]) for k in self._record.keys if measure(k).unit == "s"]
        # these are other views of what is shown above
        self._shown |= {key for key in self._record.keys if key.endswith(LIMIT)}
        others = [self._figure(key, [key]) for key in self._record.keys if key not in self._shown][:MAX_OTHERS]
        parts = [
            _grid(
                "Rewards",
                rewards,
                "Band: standard deviation of a step's samples. Noisy curves: faint as measured, smoothed on top.",
            ),
            _grid(
                "Guard against reward hacking",
                guarded,
                "Dashed: the limit that should not be crossed, or the value at the start.",
            ),
            _grid("Loss and optimiser", losses),
            _grid("Time", times, "Seconds."),
        ]
        folded = _grid("", others)
        if folded:
            parts.append(f"<details><summary>All other metrics ({len(others)})</summary>{folded}</details>")
        return "".join(parts)

    def _reward(self) -> str:
        return self._figure(
            "Reward",
            ["reward/mean", "val/reward/mean"],
            stds={"reward/mean": "reward/std"},
            also=["reward/max", "reward/min", "val/reward/std", "val/reward/max", "val/reward/min"],
        )

    def _guard_figure(self, key: str) -> str:

        limit = read_limit(self._record, key)
        if limit is not None:
            return self._figure(measure(key).title, [key], [Limit("limit", limit)])
        limits = []
        if key.endswith("_ratio"):
            limits.append(Limit("as at the start", 1.0, "start"))
        return self._figure(measure(key).title, [key], limits)

    def _figure(
        self,
        title: str,
        keys: Sequence[str],
        limits: Sequence[Limit] = (),
        stds: dict[str, str] | None = None,
        also: Sequence[str] = (),
    ) -> str:
        """One chart of ``keys``; empty when the run has none of them. ``also`` are shown by it as well."""
        keys = [key for key in keys if key in self._record.keys]
        if not keys:
            return ""
        self._shown |= {*keys, *also, *(stds or {}).values()}
        curves = [curve for key in keys for curve in self._curves(key, (stds or {}).get(key))]
        legend = "".join(
            f'<span class="key c{index % 4}">{escape(curve.label)}</span>'
            for index, curve in enumerate(curves)
            if curve.label != title
        )
        gaps = sum(self._record.series(key).values.count(None) for key in keys)
        note = f'<span class="gaps">{gaps} value{"s" if gaps > 1 else ""} missing</span>' if gaps else ""
        drawing = draw_chart(curves, limits, title, from_zero=all(_starts_at_zero(key) for key in keys))
        caption = f"<figcaption>{escape(title)}<small>{legend}{note}</small></figcaption>"
        return f'<figure class="chart">{caption}{drawing}</figure>'

    def _curves(self, key: str, std_key: str | None) -> list[Curve]:
        series = self._record.series(key)
        std = None
        if std_key in self._record.keys:
            by_step = dict(self._record.series(std_key).known)
            std = [by_step.get(step) for step in series.steps]
        rarely = key.startswith(_MEASURED_RARELY)
        return [Curve(key, series.steps, series.values, std, dots=rarely)]


def _starts_at_zero(key: str) -> bool:
    """Sizes that are read against nothing: without the zero, noise looks like a trend."""
    return measure(key).unit == "s" or key.endswith(("grad_norm", "learning_rate", "kl_loss_mean", "old_kl_mean"))


def _grid(title: str, figures: Sequence[str], about: str = "") -> str:
    figures = [figure for figure in figures if figure]
    if not figures:
        return ""
    head = text = ""
    if title:
        head = f"<h2>{title}</h2>"
    if about:
        text = f"<p>{about}</p>"
    return f'<section>{head}{text}<div class="charts">{"".join(figures)}</div></section>'
