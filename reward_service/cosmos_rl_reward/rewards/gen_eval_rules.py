"""GenEval's rules: does a list of detections fulfil a list of requirements? Pure functions (Ghosh et al. 2023)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosmos_rl_reward.handler import BadInput

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
NOT_APPLICABLE = -10.0  # in the table per tag, for the tags that an image does not have
_CONFIDENCE, _CONFIDENCE_COUNTING, _MOST = 0.3, 0.9, 16
_SHRINK = 0.1  # share of both extents by which an offset must exceed 0 to count as a relation

# the 80 COCO classes in COCO's order, in GenEval's spelling
_NAMES = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella, handbag,
tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard,
tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot,
hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, computer mouse,
tv remote, computer keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors,
teddy bear, hair drier, toothbrush
"""
NAMES = tuple(name.strip() for name in _NAMES.split(","))


@dataclass(frozen=True)
class Detection:
    """One object: ``box`` = (left, top, right, bottom) in pixels, ``mask`` bool ``[H, W]`` or None."""

    box: tuple[float, float, float, float]
    confidence: float
    mask: np.ndarray | None = None


Objects = dict[str, list[Detection]]
ColorsOf = Callable[[str, list[Detection]], list[str]]


def select_detections(detections: Iterable[Detection], tag: str) -> list[Detection]:
    """The most certain ones first: above 0.3 (``counting``: 0.9), at most 16."""
    bound = _CONFIDENCE_COUNTING if tag == "counting" else _CONFIDENCE
    ranked = sorted(detections, key=lambda d: -d.confidence)
    return [d for d in ranked if d.confidence > bound][:_MOST]


def find_relations(a: Detection, b: Detection) -> set[str]:
    """Where a lies as seen from b: any of ``left of``, ``right of``, ``above``, ``below``."""
    box_a, box_b = (np.asarray(d.box, float).reshape(2, 2) for d in (a, b))
    offset = box_a.mean(0) - box_b.mean(0)
    extent = np.abs(box_a[1] - box_a[0]) + np.abs(box_b[1] - box_b[0])
    beyond = np.maximum(np.abs(offset) - _SHRINK * extent, 0) * np.sign(offset)
    if (np.abs(beyond) < 1e-3).all():
        return set()
    x, y = beyond / np.linalg.norm(offset)
    found = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in found.items() if holds}


def _in_relation(relation: str, found: list[Detection], targets: list[Detection]) -> bool:
    return all(relation in find_relations(a, b) for a in found for b in targets)


def score_strictly(
    objects: Objects, requirements: list[dict], colors_of: ColorsOf, *, upstream: bool = False
) -> tuple[float, bool]:
    """Exact counts. Returns the share of what is asked that holds (may be negative), and whether all of it does.

    With ``upstream`` a wrong position counts as 0 and as 1 in the mean, as it did in the first implementation.
    """
    parts: list[float] = []
    correct = True
    groups: list[list[Detection] | None] = []
    for requirement in requirements:
        name, count = requirement["class"], requirement["count"]
        found = objects.get(name, [])
        parts.append(1 - abs(count - len(found)) / count)
        matched = len(found) == count
        if not matched and ("color" in requirement or "position" in requirement):
            parts.append(0.0)
        if matched and "color" in requirement:
            right = colors_of(name, found).count(requirement["color"])
            parts.append(1 - abs(count - right) / count)
            matched = right == count
        if matched and "position" in requirement:
            relation, target = requirement["position"]
            targets = groups[target]
            if targets is None:
                matched = False
                parts.append(0.0)
            else:
                matched = _in_relation(relation, found, targets)
                parts += [0.0, 1.0] if upstream and not matched else [float(matched)]
        correct = correct and matched
        groups.append(found if matched else None)
    return float(np.mean(parts)) if parts else 0.0, correct


def score_leniently(objects: Objects, requirements: list[dict], excluded: list[dict], colors_of: ColorsOf) -> bool:
    """GenEval's own score: enough objects of each kind, of which the most confident count; none ``excluded``."""
    correct = True
    groups: list[list[Detection] | None] = []
    for requirement in requirements:
        name, count = requirement["class"], requirement["count"]
        found = objects.get(name, [])[:count]
        matched = len(found) == count
        if matched and "color" in requirement:
            matched = colors_of(name, found).count(requirement["color"]) >= count
        if matched and "position" in requirement:
            relation, target = requirement["position"]
            targets = groups[target]
            matched = targets is not None and _in_relation(relation, found, targets)
        correct = correct and matched
        groups.append(found if matched else None)
    return correct and contains_none(objects, excluded)


def contains_none(objects: Objects, excluded: list[dict]) -> bool:
    """No excluded class is there as often as it must not be."""
    return all(len(objects.get(entry["class"], [])) < entry["count"] for entry in excluded)


def check(tag: Any, requirements: Any, excluded: Any, index: int) -> None:
    """Check the metadata of one sample.

    Raises:
        BadInput: names the field that is missing or wrong.
    """
    if tag not in TAGS:
        raise BadInput(f"metadata.geneval_tags[{index}]: {tag!r} is none of {', '.join(TAGS)}")
    place = f"metadata.geneval_includes[{index}]"
    if not isinstance(requirements, list) or not requirements:
        raise BadInput(f"{place}: expected a list with at least one requirement")
    for number, requirement in enumerate(requirements):
        _check_entry(requirement, f"{place}[{number}]", number)
    for tags, key in ((("colors", "color_attr"), "color"), (("position",), "position")):
        if tag in tags and not any(key in requirement for requirement in requirements):
            raise BadInput(f"{place}: the tag {tag!r} needs a requirement with {key!r}")
    if not isinstance(excluded, list):
        raise BadInput(f"metadata.geneval_excludes[{index}]: expected a list")
    for number, entry in enumerate(excluded):
        _check_entry(entry, f"metadata.geneval_excludes[{index}][{number}]", 0)


def _check_entry(entry: Any, place: str, earlier: int) -> None:
    if not isinstance(entry, dict):
        raise BadInput(f"{place}: expected an object with class and count")
    name, count = entry.get("class"), entry.get("count")
    if name not in NAMES:
        close = difflib.get_close_matches(str(name), NAMES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else " that the detector knows"
        raise BadInput(f"{place}.class: {name!r} is none of the 80 classes{hint}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise BadInput(f"{place}.count: {count!r} is not a whole number above 0")
    if "color" in entry and entry["color"] not in COLORS:
        raise BadInput(f"{place}.color: {entry['color']!r} is none of {', '.join(COLORS)}")
    if "position" in entry:
        position = entry["position"]
        if not isinstance(position, (list, tuple)) or len(position) != 2 or position[0] not in RELATIONS:
            raise BadInput(f"{place}.position: expected [relation, index]; relations are {', '.join(RELATIONS)}")
        if not isinstance(position[1], int) or not 0 <= position[1] < earlier:
            raise BadInput(f"{place}.position: {position[1]!r} is not the index of an earlier requirement")
