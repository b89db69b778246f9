"""The galleries of the page: before and after, the same images over time, best and worst."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cosmos_rl.tracking.media import TOTAL
from cosmos_rl.tracking.report.inlined import Inliner, Placed, escape
from cosmos_rl.tracking.report.record import Entry, Gallery, Record, find_same_images, pick_first_of_each_prompt
from cosmos_rl.tracking.report.svg import format_number

_PAIRS, _PAIR_SIDE = 6, 320
_ROWS, _COLUMNS, _STRIP_SIDE = 6, 8, 160
_EXTREMES, _EXTREME_SIDE = 6, 224
_PROMPT_CHARS = 160


@dataclass(frozen=True)
class Pairs:
    """The same images in the first and in the last gallery."""

    first_step: int
    last_step: int
    pairs: Sequence[tuple[Entry, Entry]]
    """Those that are shown."""
    in_all: int
    scored: int
    """Images that have a total in both."""
    means: tuple[float, float] | None
    """Their mean total before and after."""


def pair_galleries(record: Record) -> Pairs | None:
    """The first against the last gallery of the same prompts and noise; None with fewer than two galleries."""
    galleries = find_same_images(record)
    if len(galleries) < 2:
        return None
    first, last = min(galleries), max(galleries)
    later = {one.key: one for one in galleries[last]}
    both = [(one, later[one.key]) for one in galleries[first] if one.key in later]
    shown = pick_first_of_each_prompt(galleries[first], lambda one: one.key in later, _PAIRS)
    scored = [(a.total, b.total) for a, b in both if a.total is not None and b.total is not None]
    means = None
    if scored:
        means = (statistics.fmean([a for a, _ in scored]), statistics.fmean([b for _, b in scored]))
    return Pairs(first, last, [(one, later[one.key]) for one in shown], len(both), len(scored), means)


@dataclass(frozen=True)
class Images:
    """Which images the page shows."""

    pairs: Pairs | None
    only: tuple[int, Gallery] | None
    """Step and images, when there is one gallery and nothing to compare it with."""
    strip: Sequence[tuple[Entry, Sequence[tuple[int, Entry]]]]
    """Row by row: the image of the first column, and (step, image) of every column."""
    extremes: tuple[int, Mapping[str, Gallery]] | None
    """Step and the groups "best" and "worst" of the newest rollouts."""

    def list_placed(self) -> list[Placed]:
        """All images with their sizes, as often as they are shown."""
        found: list[Placed] = []
        if self.pairs:
            found += [_pair(one) for both in self.pairs.pairs for one in both]
        if self.only:
            found += [_pair(one) for one in self.only[1]]
        found += [_small(one) for _, columns in self.strip for _, one in columns]
        groups = self.extremes[1] if self.extremes else {}
        return found + [_extreme(one) for gallery in groups.values() for one in gallery]


def choose_images(record: Record) -> Images:
    """What is shown of the galleries of a run."""
    galleries, pairs = find_same_images(record), pair_galleries(record)
    only = None
    if len(galleries) == 1:
        ((step, gallery),) = galleries.items()
        only = step, pick_first_of_each_prompt(gallery, lambda one: True, _PAIRS)
    return Images(pairs, only, _strip(galleries), _extremes(record))


def render_pairs(pairs: Pairs, inliner: Inliner, *, finished: bool) -> str:
    """Before and after, side by side; a run that is not finished has no after."""
    from_start = pairs.first_step == 0
    began, ended = "first", "last"
    if from_start:
        began, ended = "before", "after"
    if not finished:
        ended = "now"
    cards = [
        f'<figure class="pair"><figcaption>{_prompt(a)}</figcaption><div>'
        f"{_image(inliner, _pair(a), a, f'{began} · step {pairs.first_step}')}"
        f"{_image(inliner, _pair(b), b, f'{ended} · step {pairs.last_step}')}</div></figure>"
        for a, b in pairs.pairs
    ]
    heading = f"<h2>{began.capitalize()} and {ended}</h2>"
    if not cards:
        return f"<section>{heading}<p>The first and the last gallery have no prompt and noise in common.</p></section>"
    which = "all images"
    if len(cards) < pairs.in_all:
        which = f"the first {len(cards)} of {pairs.in_all} images"
    about = (
        "Each pair has the same prompt and the same starting noise; only the training between step "
        f"{pairs.first_step} and step {pairs.last_step} differs. Not hand-picked: {which}."
    )
    if pairs.means:
        a, b = (format_number(mean, 3) for mean in pairs.means)
        about += f' Mean score of {pairs.scored} images: <b class="score">{a}</b> → <b class="score">{b}</b>.'
    if not from_start:
        about += " No images were made before training: validation.val_before_train = true asks for them."
    return f'<section id="before-after">{heading}<p>{about}</p><div class="pairs">{"".join(cards)}</div></section>'


def render_only_gallery(step: int, gallery: Gallery, inliner: Inliner) -> str:
    """The only gallery that there is."""
    cards = "".join(_card(inliner, _pair(one), one) for one in gallery)
    return (
        f"<section><h2>Images at step {step}</h2><p>One gallery so far: nothing to compare it with.</p>"
        f'<div class="cards">{cards}</div></section>'
    )


def render_strip(images: Images, inliner: Inliner) -> str:
    """The same prompts and noise over the steps."""
    if not images.strip:
        return ""
    rows = []
    for first, columns in images.strip:
        cells = "".join(_image(inliner, _small(one), one, f"step {step}") for step, one in columns)
        rows.append(f'<figure class="row"><figcaption>{_prompt(first)}</figcaption><div>{cells}</div></figure>')
    return (
        '<section id="over-time"><h2>The same images over time</h2><p>One row for each prompt, from the same '
        f"starting noise at every step shown.</p>{''.join(rows)}</section>"
    )


def render_extremes(images: Images, inliner: Inliner) -> str:
    """Best and worst of the newest rollouts with their scores."""
    if images.extremes is None:
        return ""
    step, groups = images.extremes
    parts = [
        f'<h3>{name.capitalize()}</h3><div class="cards" id="{name}">'
        + "".join(_card(inliner, _extreme(one), one) for one in gallery)
        + "</div>"
        for name, gallery in groups.items()
    ]
    return (
        f'<section id="extremes"><h2>What the reward likes and dislikes</h2><p>Training samples of step {step} with '
        f"the highest and the lowest total. Look here for signs of reward hacking.</p>{''.join(parts)}</section>"
    )


# ---- parts -----------------------------------------------------------------------------------------------------------


def _strip(galleries: Mapping[int, Gallery]) -> list[tuple[Entry, list[tuple[int, Entry]]]]:
    if len(galleries) < 3:  # two are before and after
        return []
    steps = sorted(galleries)
    last = len(steps) - 1
    columns = min(_COLUMNS, len(steps))
    picked = list(dict.fromkeys(steps[round(i * last / (columns - 1))] for i in range(columns)))
    by_step = {step: {one.key: one for one in galleries[step]} for step in picked}
    rows = pick_first_of_each_prompt(galleries[picked[0]], lambda one: one.key in by_step[picked[-1]], _ROWS)
    return [(row, [(s, by_step[s][row.key]) for s in picked if row.key in by_step[s]]) for row in rows]


def _extremes(record: Record) -> tuple[int, dict[str, Gallery]] | None:
    for step in sorted(record.rollout, reverse=True):
        gallery = record.rollout[step]
        groups = {name: [one for one in gallery if one.group == name][:_EXTREMES] for name in ("best", "worst")}
        if any(groups.values()):
            return step, {name: found for name, found in groups.items() if found}
    return None


def _card(inliner: Inliner, placed: Placed, one: Entry) -> str:
    names = [name for name in one.scores if name != TOTAL]
    single = names == [] or (len(names) == 1 and one.scores[names[0]] == one.total)
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{_score(one.scores[name])}</td></tr>" for name in names)
    table = "" if single else f"<table>{rows}</table>"
    words = f"<figcaption>{_prompt(one)}{table}</figcaption>"
    return f'<figure class="card">{_image(inliner, placed, one, "")}{words}</figure>'


def _image(inliner: Inliner, placed: Placed, one: Entry, label: str) -> str:
    total = ""
    if TOTAL in one.scores:
        total = f'<b class="score">{_score(one.total)}</b>'
    text = f"<span>{label}</span> {total}"
    return f'<div class="image">{inliner.tag(placed, one.prompt)}<div class="under">{text}</div></div>'


def _prompt(one: Entry) -> str:
    return f'<bdi class="prompt" dir="auto">{escape(one.prompt, _PROMPT_CHARS) or "(empty prompt)"}</bdi>'


def _score(score: float | None) -> str:
    if score is None:
        return "missing"
    return format_number(score, 3)


def _pair(one: Entry) -> Placed:
    return Placed(one.file, _PAIR_SIDE, one.clip)


def _small(one: Entry) -> Placed:
    return Placed(one.file, _STRIP_SIDE)


def _extreme(one: Entry) -> Placed:
    return Placed(one.file, _EXTREME_SIDE, one.clip)
