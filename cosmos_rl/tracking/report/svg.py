"""Curves as points of an image: pure functions on numbers. ``parts.html.jinja`` draws them as SVG."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_POINTS = 300
"""Longer curves are averaged over neighbouring steps."""
_SMOOTH_FROM = 40
"""Shorter curves are never smoothed."""
WIDTH, HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 64, 10, 26
_END_HEIGHT = 13
_MOST_ENDS = (HEIGHT - _TOP - _BOTTOM) // _END_HEIGHT


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    steps: Sequence[int]
    values: Sequence[float | None]
    """None is a gap."""
    std: Sequence[float | None] | None = None
    """Half the height of the band around the line."""
    dots: bool = False
    """Measured now and then: every value is marked."""
    colour: int = 0
    """Number of its colour."""
    dash: int = 0
    """Number of its dashes; 0: none."""


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


@dataclass(frozen=True)
class Line:
    """A piece of a curve without gaps."""

    style: str
    colour: int
    points: Sequence[str]
    """``x,y``; a single one is drawn as a dot."""
    dots: bool = False
    dash: int = 0


@dataclass(frozen=True)
class Drawing:
    """A chart in the units of its image; heights are those of the middle of a text or line."""

    y_ticks: Sequence[tuple[str, float]]
    x_ticks: Sequence[tuple[str, int]]
    limits: Sequence[tuple[float, Limit]]
    bands: Sequence[tuple[int, str]]
    """(colour, points of the polygon)."""
    lines: Sequence[Line]
    ends: Sequence[tuple[str, int, float]]
    """(height, colour, last value of a curve), moved apart where they would overlap; left out where they are many."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT


def draw_chart(curves: Sequence[Curve], limits: Sequence[Limit] = (), *, from_zero: bool = False) -> Drawing | None:
    """Curves over steps with axes, ticks and the last value of each; None when no curve has a value."""
    curves = [curve for curve in curves if any(v is not None for v in curve.values)]
    if not curves:
        return None
    ends = [next(v for v in reversed(curve.values) if v is not None) for curve in curves]
    curves = [shorten_curve(curve) for curve in curves]
    x_low, x_high = min(c.steps[0] for c in curves), max(c.steps[-1] for c in curves)
    y_ticks = ticks(*_reach(curves, limits, from_zero))
    area = _Area(x_low, max(x_high, x_low + 1), y_ticks[0], y_ticks[-1])
    return Drawing(
        y_ticks=[(f"{area.y(value):.1f}", value) for value in y_ticks],
        x_ticks=[(f"{area.x(step):.1f}", step) for step in _step_ticks(x_low, x_high)],
        limits=[(area.y(limit.value), limit) for limit in limits],
        bands=[(curve.colour, points) for curve in curves for points in _draw_band(area, curve)],
        lines=[line for curve in curves for line in _draw_lines(area, curve)],
        ends=_place_ends(area, [(curve.colour, end) for curve, end in zip(curves, ends, strict=True)]),
    )


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
    std = curve.std
    if std is not None:
        std = [_mean_known(std[i : i + width]) for i in starts]
    return replace(
        curve,
        # the last step of a piece, so that the curve ends where the run does
        steps=[curve.steps[min(i + width, len(curve.steps)) - 1] for i in starts],
        values=[_mean_known(curve.values[i : i + width]) for i in starts],
        std=std,
        dots=False,
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
    return [None if value is None else _mean_known(others) for value, others in zip(values, near, strict=True)]


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


def _draw_band(area: _Area, curve: Curve) -> list[str]:
    """One standard deviation around the curve: the points of a polygon for each piece without gaps."""
    if curve.std is None:
        return []
    both = [(v, s) for v, s in zip(curve.values, curve.std, strict=True)]
    bands = []
    for piece in _pieces([v if s is not None else None for v, s in both]):
        upper = [area.at(curve.steps[i], (both[i][0] or 0.0) + (both[i][1] or 0.0)) for i in piece]
        lower = [area.at(curve.steps[i], (both[i][0] or 0.0) - (both[i][1] or 0.0)) for i in reversed(piece)]
        bands.append(" ".join(upper + lower))
    return bands


def _draw_lines(area: _Area, curve: Curve) -> list[Line]:
    """The curve; of a noisy one a faint line and a smoothed one on top."""

    def draw(style: str, values: Sequence[float | None]) -> list[Line]:
        pieces = ([area.at(curve.steps[i], values[i] or 0.0) for i in piece] for piece in _pieces(values))
        return [Line(style, curve.colour, points, curve.dots, curve.dash) for points in pieces]

    if curve.dots or not is_noisy(curve.values):
        return draw("curve", curve.values)
    return draw("faint", curve.values) + draw("curve", smooth_values(curve.values, len(curve.values) // 12))


def _place_ends(area: _Area, ends: Sequence[tuple[int, float]]) -> list[tuple[str, int, float]]:
    placed, free_from = [], 0.0
    if len(ends) > _MOST_ENDS:
        return []
    for y, colour, value in sorted((area.y(value), colour, value) for colour, value in ends):
        y = max(y, free_from)
        free_from = y + _END_HEIGHT
        placed.append((f"{y:.1f}", colour, value))
    return placed


def _pieces(values: Sequence[float | None]) -> list[list[int]]:
    """Runs of neighbouring positions that have a value."""
    pieces: list[list[int]] = [[]]
    for i, value in enumerate(values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(i)
    return [piece for piece in pieces if piece]


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return sum(known) / len(known)
