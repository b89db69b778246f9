"""Draws architecture.svg next to this file: `python docs/images/architecture.py`. A test compares file and drawing."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 980, 470
TARGET = Path(__file__).with_suffix(".svg")
BLUE, GREEN, ORANGE, GREY = (
    ("#e8f0fb", "#3567a8"),
    ("#e9f5ea", "#3c7d44"),
    ("#fdf0e1", "#b06a1b"),
    ("#f3f3f3", "#777777"),
)


@dataclass(frozen=True)
class Box:
    """A part of the program."""

    title: str
    lines: tuple[str, ...]
    x: int
    y: int
    width: int
    colour: tuple[str, str]
    room: str = ""
    """Its folder below cosmos_rl; empty: outside of the package."""

    @property
    def height(self) -> int:
        """Of the title and its lines."""
        return 34 + 16 * len(self.lines)


BOXES = {
    "config": Box("config", ("TOML + --a.b=v", "all errors at once"), 20, 24, 150, GREY, "policy/config"),
    "launcher": Box(
        "launcher", ("check, doctor, run folder", "starts and ends the ranks"), 210, 24, 190, GREY, "launcher"
    ),
    "data": Box("data", ("images and captions,", "prompts; by position"), 40, 160, 150, BLUE, "data"),
    "model": Box(
        "model",
        ("text → conditions", "image → latents", "velocity(x, level, cond)"),
        220,
        152,
        165,
        BLUE,
        "policy/model",
    ),
    "algorithms": Box("algorithms", ("flow matching, NFT", "advantages: pure"), 620, 160, 150, BLUE, "algorithms"),
    "optim": Box("optim", ("clip, schedule, EMA", "→ new weights"), 800, 160, 145, BLUE, "optim"),
    "rollout": Box("rollout", ("one sampling loop,", "one kernel per sampler"), 220, 270, 165, GREEN, "rollout"),
    "reward": Box("reward", ("functions, client;", "missing is NaN"), 440, 270, 140, GREEN, "reward"),
    "service": Box("reward service", ("a program of its own,", "models as rewards"), 440, 386, 140, ORANGE),
    "checkpoint": Box("checkpoint", ("exact resume;", "export for diffusers"), 800, 270, 145, GREY, "checkpoint"),
    "tracking": Box("tracking", ("metrics.jsonl, galleries,", "report.html"), 620, 270, 155, GREY, "tracking"),
}
ARROWS = (
    ("config", "launcher", ""),
    ("data", "model", ""),
    ("model", "algorithms", "fine-tuning"),
    ("algorithms", "optim", "loss"),
    ("model", "rollout", "old policy"),
    ("rollout", "reward", "media"),
    ("reward", "algorithms", "scores"),
    ("reward", "service", ""),
    ("optim", "checkpoint", ""),
)


def _text(x: float, y: float, text: str, *, size: int = 12, weight: int = 400, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _box(box: Box) -> str:
    fill, edge = box.colour
    centre = box.x + box.width / 2
    place = f'x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}"'
    parts = [
        f'<rect {place} rx="7" fill="{fill}" stroke="{edge}"/>',
        _text(centre, box.y + 21, box.title, size=14, weight=600),
    ]
    parts += [_text(centre, box.y + 39 + 16 * number, line) for number, line in enumerate(box.lines)]
    return "\n".join(parts)


def _ends(start: Box, end: Box) -> tuple[float, float, float, float]:
    """Where an arrow leaves one box and meets the other."""
    first, last = start.y + start.height / 2, end.y + end.height / 2
    right = start.x + start.width
    if right < end.x and last < start.y:
        return right - 20, start.y, end.x - 6, last + 15
    if right < end.x:
        return right, first, end.x - 6, last
    x = max(start.x, end.x) + min(start.width, end.width) / 2
    return (x, start.y + start.height, x, end.y - 6) if first < last else (x, start.y, x, end.y + end.height + 6)


def _arrow(start: Box, end: Box, label: str) -> str:
    x1, y1, x2, y2 = _ends(start, end)
    line = f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="#444" fill="none" marker-end="url(#head)"/>'
    if not label:
        return line
    flat = abs(y2 - y1) < 20
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    return line + _text(
        x if flat else x + 6, y - 6 if flat else y + 4, label, size=11, anchor="middle" if flat else "start"
    )


def drawing() -> str:
    """The whole image as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" fill="#222">',
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">'
        '<path d="M0 1 L7 4 L0 7 z" fill="#444"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        '<rect x="20" y="116" width="940" height="244" rx="10" fill="none" stroke="#999" stroke-dasharray="5 4"/>',
        _text(32, 136, "every rank: trainer, one loop and one task per kind of job", weight=600, anchor="start"),
        '<path d="M305 90 L305 110" stroke="#444" fill="none" marker-end="url(#head)"/>',
        _text(34, 318, "blue: every job", anchor="start"),
        _text(34, 336, "green: reinforcement learning", anchor="start"),
    ]
    parts += [_arrow(BOXES[start], BOXES[end], label) for start, end, label in ARROWS]
    parts += [_box(box) for box in BOXES.values()]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(drawing(), encoding="utf-8")
