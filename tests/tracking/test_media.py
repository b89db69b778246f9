"""Galleries on the disk, and which samples are picked for them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cosmos_rl.data.images import are_finite, to_uint8
from cosmos_rl.tracking.media import Shown, build_caption, is_blank, pick_best_and_worst, save_gallery, slugify

NAN = math.nan


def image(value: int) -> torch.Tensor:
    return torch.full((4, 6, 3), value, dtype=torch.uint8)


def test_names_of_images_are_safe(tmp_path: Path) -> None:
    assert slugify("../etc/passwd \0 Ünïcode") == "etc-passwd-n-code"
    assert slugify("???") == "empty"
    assert len(slugify("x" * 500)) == 40
    files = save_gallery(tmp_path / "p", [Shown(image(0), "same", 0), Shown(image(1), "same", 1)])
    assert [file.name for file in files] == ["000_same.png", "001_same.png"]


def test_the_index_says_what_each_image_is_and_a_missing_score_is_null(tmp_path: Path) -> None:
    shown = [
        Shown(image(7), "a <cat>", 41, "best", {"ink": 0.5, "total": 1.25}),
        Shown(image(9), "", 42, scores={"ink": NAN, "total": None}),
    ]
    files = save_gallery(tmp_path / "step_1", shown)
    assert json.loads((tmp_path / "step_1/index.json").read_text()) == [
        {
            "file": "000_a-cat.png",
            "prompt": "a <cat>",
            "sample_id": 41,
            "group": "best",
            "scores": {"ink": 0.5, "total": 1.25},
        },
        {
            "file": "001_empty.png",
            "prompt": "",
            "sample_id": 42,
            "group": "",
            "scores": {"ink": None, "total": None},
        },
    ]
    assert [np.unique(np.asarray(Image.open(file))).tolist() for file in files] == [[7], [9]]


def test_a_gallery_replaces_an_older_one_whole_or_leaves_it(tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    save_gallery(folder, [Shown(image(1), "old", 0), Shown(image(1), "older", 1)])
    with pytest.raises(TypeError):
        save_gallery(folder, [Shown(image(2), "new", 0), Shown(image(2).float(), "no image", 1)])
    assert sorted(p.name for p in folder.iterdir()) == ["000_old.png", "001_older.png", "index.json"]
    save_gallery(folder, [Shown(image(2), "new", 0)])
    assert sorted(p.name for p in folder.iterdir()) == ["000_new.png", "index.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_a_caption_is_the_prompts_beginning_and_the_total() -> None:
    assert build_caption(Shown(image(0), "a cat", 0, scores={"ink": 3.0, "total": 0.8125})) == "a cat | avg: 0.8125"
    assert build_caption(Shown(image(0), "x" * 300, 0, scores={"total": 1.0})) == f"{'x' * 100} | avg: 1"
    assert build_caption(Shown(image(0), "a cat", 0, scores={"total": None})) == "a cat"
    assert build_caption(Shown(image(0), "a cat", 0)) == "a cat"


def test_every_prompt_shows_its_best_before_one_shows_its_second_best() -> None:
    total = torch.tensor([0.9, 0.8, 0.1, 0.3, NAN, 0.2])
    groups = [0, 0, 0, 1, 1, 1]
    assert pick_best_and_worst(total, groups, 2) == ([0, 3], [2, 5])
    assert pick_best_and_worst(total, groups, 3) == ([0, 3, 1], [2, 5])
    assert pick_best_and_worst(total, torch.tensor(groups), 2) == ([0, 3], [2, 5])


@given(
    st.lists(st.tuples(st.floats(-5, 5) | st.just(NAN), st.integers(0, 3)), max_size=30),
    st.integers(0, 8),
)
@settings(derandomize=True, max_examples=200)
def test_picked_rows_have_scores_and_are_in_one_list_only(samples: list[tuple[float, int]], count: int) -> None:
    total = torch.tensor([t for t, _ in samples], dtype=torch.float64)
    best, worst = pick_best_and_worst(total, [g for _, g in samples], count)
    scored = [row for row, (t, _) in enumerate(samples) if not math.isnan(t)]
    assert set(best) | set(worst) <= set(scored)
    assert len({*best, *worst}) == len(best) + len(worst) == min(2 * count, len(scored))
    alone_best, alone_worst = pick_best_and_worst(total, [0] * len(samples), count)
    assert total[alone_best].tolist() == sorted(total[scored].tolist(), reverse=True)[: len(alone_best)]
    assert total[alone_worst].tolist() == sorted(total[scored].tolist())[: len(alone_worst)]


def test_an_image_with_one_pixel_that_is_not_finite_is_found() -> None:
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    images[1, 2, 3, 4], images[3, 0, 0, 0] = math.nan, -math.inf
    assert are_finite(images).tolist() == [True, False, True, False]


def test_images_of_one_colour_are_found() -> None:
    black, white = torch.zeros(8, 8, 3, dtype=torch.uint8), torch.full((8, 8, 3), 255, dtype=torch.uint8)
    lost = to_uint8(torch.full((1, 3, 8, 8), math.nan))[0]
    dotted = black.clone()
    dotted[3, 4, 1] = 1
    assert [is_blank(image) for image in (black, dotted, white, lost)] == [True, False, True, True]
