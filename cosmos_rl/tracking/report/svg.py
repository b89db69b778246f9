"""Curves as inline SVG: pure functions from numbers to text. Colours are CSS variables of the page."""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_POINTS = 300
"""Longer curves are averaged over neighbouring steps."""
_SMOOTH_FROM = 40
"""Shorter curves are never smoothed."""
WIDTH, HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 64, 10, 26


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    steps: Sequence[int]
    values: Sequence[float | None]
    """None is a gap."""
    std: Sequence[float | None] | None = None
    """Half the height of the band around the line."""
    dots: bool = False
    """Measured now and then: every value is marked."""


@dataclass(frozen=True)
class Limit:
    """A line that is drawn across the chart."""

    label: str
    value: float
    style: str = "limit"
    """"limit", or "start" for a line that is not a limit."""


def format_number(value: float, digits: int = 4) -> str:
    """Up to so many significant digits, without an exponent where a reader can do without: ``0.0123``, ``57.6k``."""
    size = float(f"{abs(value):.{digits}g}")
    for factor, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if max(factor, 1e4) <= size < 1e13:
            return f"{value / factor:.{digits}g}{sign}"
    if size >= 1e13 or 0 < size < 1e-3:
        figure, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{figure.rstrip('0').rstrip('.')}e{int(power)}"
    if not value:
        return "0"
    return f"{value:.{digits}g}"


def draw_chart(
    curves: Sequence[Curve], limits: Sequence[Limit] = (), name: str = "", *, from_zero: bool = False
) -> str:
    """Curves over steps with axes, ticks and the last value of each; empty when no curve has a value."""
    curves = [curve for curve in curves if any(v is not None for v in curve.values)]
    if not curves:
        return ""
    ends = [next(v for v in reversed(curve.values) if v is not None) for curve in curves]
    curves = [shorten_curve(curve) for curve in curves]
    x_low, x_high = min(c.steps[0] for c in curves), max(c.steps[-1] for c in curves)
    y_ticks = ticks(*_reach(curves, limits, from_zero))
    area = _Area(x_low, max(x_high, x_low + 1), y_ticks[0], y_ticks[-1])
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name)}">']
    parts += [_draw_grid(area, y_ticks, _step_ticks(x_low, x_high))]
    parts += [_limit(area, limit) for limit in limits]
    parts += [_band(area, curve, i) for i, curve in enumerate(curves)]
    parts += [_line(area, curve, i) for i, curve in enumerate(curves)]
    return "".join([*parts, _last_values(area, ends), "</svg>"])


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values, about ``count`` of them, from below ``low`` to above ``high``."""
    if not high > low:
        reach = abs(low) * 0.1 or 1.0
        low, high = low - reach, high + reach
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def shorten_curve(curve: Curve) -> Curve:
    """At most ``MAX_POINTS`` points, each the mean of the values of neighbouring steps; all None stays a gap."""
    width = math.ceil(len(curve.steps) / MAX_POINTS)
    if width <= 1:
        return curve
    starts = range(0, len(curve.steps), width)
    return Curve(
        curve.label,
        # the last step of a piece, so that the curve ends where the run does
        [curve.steps[min(i + width, len(curve.steps)) - 1] for i in starts],
        [_mean_of_known(curve.values[i : i + width]) for i in starts],
        None if curve.std is None else [_mean_of_known(curve.std[i : i + width]) for i in starts],
        curve.dots and len(curve.steps) <= MAX_POINTS,
    )


def is_noisy(values: Sequence[float | None]) -> bool:
    """Whether the values go up and down so much that a smoothed line says more."""
    known = [value for value in values if value is not None]
    if len(known) < _SMOOTH_FROM:
        return False
    way = sum(abs(b - a) for a, b in itertools.pairwise(known))
    return way > 3 * (max(known) - min(known)) > 0


def smooth_values(values: Sequence[float | None], width: int) -> list[float | None]:
    """The mean of the known values among ``width`` neighbours; None stays None."""
    half = width // 2
    near = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [None if value is None else _mean_of_known(others) for value, others in zip(values, near, strict=True)]


@dataclass(frozen=True)
class _Area:
    """From steps and values to points in the image."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, step: float) -> float:
        return _LEFT + (step - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def at(self, step: float, value: float) -> str:
        return f"{self.x(step):.1f},{self.y(value):.1f}"


def _reach(curves: Sequence[Curve], limits: Sequence[Limit], from_zero: bool) -> tuple[float, float]:
    """The lowest and highest value that must be inside the chart."""
    values = [limit.value for limit in limits] + [0.0] * from_zero
    for curve in curves:
        stds = curve.std or [0.0] * len(curve.values)
        for value, std in zip(curve.values, stds, strict=True):
            if value is not None:
                values += [value - (std or 0.0), value + (std or 0.0)]
    return min(values), max(values)


def _step_ticks(low: int, high: int) -> list[int]:
    """Round steps inside the curve and its last step, which nothing round may touch."""
    inner = [int(t) for t in ticks(low, high) if t == int(t) and low <= t <= high - 0.12 * (high - low)]
    return sorted({*(inner or [low]), high})


def _draw_grid(area: _Area, y_ticks: Sequence[float], x_ticks: Sequence[int]) -> str:
    parts = ['<g class="axis">']
    for value in y_ticks:
        y = f"{area.y(value):.1f}"
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{format_number(value)}</text>')
    for step in x_ticks:
        parts.append(f'<text x="{area.x(step):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT + 20}" y="{HEIGHT - 10}">step</text></g>')
    return "".join(parts)


def _limit(area: _Area, limit: Limit) -> str:
    y = area.y(limit.value)
    line = f'<line class="{limit.style}" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    index = f'x="{WIDTH - _RIGHT - 4}" y="{y - 4:.1f}" text-anchor="end"'
    return line + f'<text class="{limit.style}" {index}>{html.escape(limit.label)}</text>'


def _band(area: _Area, curve: Curve, index: int) -> str:
    if curve.std is None:
        return ""
    parts = []
    for piece in _pieces([v if s is not None else None for v, s in zip(curve.values, curve.std, strict=True)]):
        upper = [area.at(curve.steps[i], (curve.values[i] or 0.0) + (curve.std[i] or 0.0)) for i in piece]
        lower = [area.at(curve.steps[i], (curve.values[i] or 0.0) - (curve.std[i] or 0.0)) for i in reversed(piece)]
        parts.append(f'<polygon class="band c{index % 4}" points="{" ".join(upper + lower)}"/>')
    return "".join(parts)


def _line(area: _Area, curve: Curve, index: int) -> str:
    if curve.dots or not is_noisy(curve.values):
        return _polylines(area, curve.steps, curve.values, f"curve c{index % 4}", dots=curve.dots)
    smooth = smooth_values(curve.values, len(curve.values) // 12)
    faint = _polylines(area, curve.steps, curve.values, f"faint c{index % 4}")
    return faint + _polylines(area, curve.steps, smooth, f"curve c{index % 4}")


def _polylines(
    area: _Area, steps: Sequence[int], values: Sequence[float | None], style: str, *, dots: bool = False
) -> str:
    """One polyline for each piece without gaps; a value between two gaps is a dot."""
    parts = []
    for piece in _pieces(values):
        points = [area.at(steps[i], values[i] or 0.0) for i in piece]
        parts.append(f'<polyline class="{style}" points="{" ".join(points)}"/>')
        if dots or len(points) == 1:
            pairs = (point.split(",") for point in points)
            parts += [f'<circle class="{style}" cx="{x}" cy="{y}" r="3"/>' for x, y in pairs]
    return "".join(parts)


def _last_values(area: _Area, ends: Sequence[float]) -> str:
    """The last value of each curve at its right end, moved apart where they would overlap."""
    parts, free_from = [], 0.0
    for y, index, value in sorted((area.y(value), index, value) for index, value in enumerate(ends)):
        y = max(y, free_from)
        free_from = y + 13
        text = (
            f'<text class="last c{index % 4}" x="{WIDTH - _RIGHT + 6}" y="{y:.1f}" dy="4">{format_number(value)}</text>'
        )
        parts.append(text)
    return "".join(parts)


def _pieces(values: Sequence[float | None]) -> list[list[int]]:
    """Runs of neighbouring positions that have a value."""
    pieces: list[list[int]] = [[]]
    for i, value in enumerate(values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(i)
    return [piece for piece in pieces if piece]


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return sum(known) / len(known)
