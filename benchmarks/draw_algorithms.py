"""Draws what `python -m benchmarks.algorithms --out curves.json` wrote (`python -m benchmarks.draw_algorithms
curves.json docs/images/algorithms.svg`): means over the seeds against network evaluations."""

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = {
    "reward": "mean reward (optimum 0.778)",
    "to_tilt": "MMD² to the optimum",
    "loss_ratio": "held-out loss / start (log)",
    "norm_ratio": "size of velocities / start (log)",
}
COLOURS = ("#1b6ca8", "#0f9d8f", "#7a3fa0", "#c0392b", "#e08e0b", "#3d3d3d", "#8a8a8a", "#d16ba5")
WIDTH, HEIGHT, LEFT, TOP = 330, 190, 40, 24


def draw(curves: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], names: Sequence[str]) -> str:
    """An SVG of four panels and a legend."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {2 * HEIGHT + 60}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (key, title) in enumerate(PANELS.items()):
        parts += draw_panel(curves, names, key, title, (number % 2 * WIDTH, number // 2 * HEIGHT))
    for k, name in enumerate(names):
        x, y = 20 + k % 4 * 160, 2 * HEIGHT + 22 + k // 4 * 20
        parts.append(f'<rect x="{x}" y="{y - 8}" width="14" height="4" fill="{COLOURS[k]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y - 2}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_panel(
    curves: Mapping[str, Any], names: Sequence[str], key: str, title: str, corner: tuple[int, int]
) -> list[str]:
    """Lines, their range at the axis, and the title."""
    lines = {name: _mean_line(curves[name], key) for name in names}
    low = min(y for line in lines.values() for _, y in line)
    high = max(y for line in lines.values() for _, y in line)
    right = max(x for line in lines.values() for x, _ in line)
    left, top, width, height = corner[0] + LEFT, corner[1] + TOP, WIDTH - LEFT - 16, HEIGHT - TOP - 24
    logarithmic = title.endswith("(log)")
    labels = [math.exp(value) if logarithmic else value for value in (high, low)]
    parts = [
        f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}</text>',
        f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#aaa"/>',
        f'<text x="{left - 4}" y="{top + 9}" text-anchor="end">{labels[0]:.2f}</text>',
        f'<text x="{left - 4}" y="{top + height}" text-anchor="end">{labels[1]:.2f}</text>',
        f'<text x="{left + width}" y="{top + height + 14}" text-anchor="end">{right:.0f} evaluations</text>',
    ]
    for k, line in enumerate(lines.values()):
        at = [f"{left + width * x / right:.1f},{top + height * (1 - (y - low) / (high - low)):.1f}" for x, y in line]
        parts.append(f'<polyline points="{" ".join(at)}" fill="none" stroke="{COLOURS[k]}" stroke-width="1.6"/>')
    return parts


def _mean_line(runs: Sequence[Sequence[Mapping[str, Any]]], key: str) -> list[tuple[float, float]]:
    line = []
    for looks in zip(*runs, strict=False):
        values = [look[key] for look in looks]
        if key in ("loss_ratio", "norm_ratio"):
            values = [math.log(value) for value in values]
        line.append((statistics.mean(look["nfe"] for look in looks), statistics.mean(values)))
    return line


def main(source: Path, target: Path, *names: str) -> None:
    """Draw the named algorithms, or the first eight."""
    curves = json.loads(source.read_text(encoding="utf-8"))
    chosen = names or list(curves)[: len(COLOURS)]
    target.write_text(draw(curves, chosen), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
