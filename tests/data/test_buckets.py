"""Sizes of pictures on disk, and which of several sizes they are trained at."""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cosmos_rl.data.bucket_stream import BucketStream
from cosmos_rl.data.images import load_image
from cosmos_rl.data.items import BadSample, Item
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.data.picture_sizes import (
    LOOKED_AT,
    Measured,
    describe_buckets,
    describe_cuts,
    measure_image,
    measure_some,
    measure_video,
    name_pictures,
)
from cosmos_rl.data.streams import Position, Skipped, load_batches
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.buckets import choose_size, generate_sizes, kept_share
from tests.support.pairs import marked_folder
from tests.support.videos import write_video

SIDES = st.tuples(st.integers(1, 4000), st.integers(1, 4000))


def test_the_share_that_a_crop_keeps_in_closed_form() -> None:
    assert kept_share((32, 96), (32, 32)) == Fraction(1, 3)
    assert kept_share((96, 32), (32, 32)) == Fraction(1, 3)
    assert kept_share((100, 100), (512, 512)) == 1
    assert kept_share((200, 300), (100, 100)) == Fraction(2, 3)  # scaled to 100 x 150, of which 100 x 100 are left


@given(SIDES, st.lists(SIDES, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_picture_goes_to_the_same_size_in_whatever_order_they_are_given(picture, sizes, order) -> None:
    chosen = choose_size(picture, sizes)
    shuffled = list(sizes)
    order.shuffle(shuffled)
    assert choose_size(picture, shuffled) == chosen
    assert kept_share(picture, chosen) == max(kept_share(picture, size) for size in sizes)


def test_ties_are_resolved_by_area_and_then_by_height() -> None:
    assert choose_size((64, 64), [(32, 48), (48, 32)]) == (48, 32)  # equally far from both
    assert choose_size((600, 600), [(512, 512), (1024, 1024), (256, 256)]) == (512, 512)  # the largest it covers
    assert choose_size((100, 100), [(512, 512), (1024, 1024)]) == (512, 512)  # it covers none: the least upscaling


def test_generated_sizes_have_about_one_area_and_at_most_the_ratio() -> None:
    sizes = generate_sizes(1024 * 1024, 64, 2.0)
    assert (1024, 1024) in sizes
    assert {(w, h) for h, w in sizes} == set(sizes)
    for height, width in sizes:
        assert height % 64 == width % 64 == 0
        assert 0.9 * 1024 * 1024 <= height * width <= 1024 * 1024
        assert max(height, width) <= 2 * min(height, width)
    assert (448, 448) in generate_sizes(250_000, 64, 2.0)  # a square, although 448 x 512 has room too
    assert generate_sizes(100, 64, 2.0) == ()


@pytest.mark.parametrize(
    ("area", "step", "ratio", "widest"),
    [
        (1024, 16, 3.0, (16, 48)),
        (512 * 512, 64, 2.0, (320, 640)),
        (512 * 512, 64, 3.0, (256, 768)),
        (1024 * 1024, 64, 2.0, (704, 1408)),
        (1024 * 1024, 64, 3.0, (576, 1728)),
        (1024 * 1024, 64, 1.0, (1024, 1024)),
        (512 * 512, 64, 2.3, (320, 704)),
    ],
)
def test_the_widest_generated_size_is_cut_to_the_ratio(
    area: int, step: int, ratio: float, widest: tuple[int, int]
) -> None:
    sizes = generate_sizes(area, step, ratio)
    assert max(sizes, key=lambda size: size[1] / size[0]) == widest
    assert {(width, height) for height, width in sizes} == set(sizes)
    assert all(height * width <= area and max(height, width) <= ratio * min(height, width) for height, width in sizes)
    shorter = [height for height, width in sizes if height < width]
    assert len(set(shorter)) == len(shorter)  # one longer side for each


@given(st.integers(1, 4_000_000), st.sampled_from([8, 16, 32, 64, 128]), st.floats(1.0, 8.0))
def test_no_generated_size_could_be_longer(area: int, step: int, ratio: float) -> None:
    sizes = generate_sizes(area, step, ratio)
    assert bool(sizes) == (step * step <= area)
    assert len(set(sizes)) == len(sizes)
    for height, width in sizes:
        short, long = min(height, width), max(height, width)
        assert (width, height) in sizes
        assert short % step == long % step == 0
        assert short * long <= area
        assert long <= ratio * short + 1e-6
        longer = long + step
        square = height == width  # the largest, although a longer side may have room
        assert square or short * longer > area or longer > ratio * short


@given(st.integers(1, 4_000_000), st.sampled_from([8, 16, 32, 64, 128]), st.integers(1, 8))
def test_a_whole_ratio_that_has_room_is_among_the_generated_sizes(area: int, step: int, ratio: int) -> None:
    widest = max((width / height for height, width in generate_sizes(area, step, ratio)), default=None)
    assert (widest == ratio) == (ratio * step * step <= area)


@given(st.integers(1, 4_000_000), st.sampled_from([8, 16, 32, 64, 128]), st.floats(1.0, 8.0))
def test_what_is_wider_than_the_generated_sizes_keeps_little_more_on_fewer_pixels(
    area: int, step: int, ratio: float
) -> None:
    """Where multiples of the step do not reach the ratio, a shorter side may come nearer to it."""
    sizes = generate_sizes(area, step, ratio)
    widest = max((size for size in sizes), key=lambda size: (Fraction(size[1], size[0]), size), default=None)
    if widest is None:
        return
    for short in range(step, math.isqrt(area) + 1, step):
        long = min(area // short, math.floor(ratio * short)) // step * step
        if long * widest[0] > widest[1] * short:
            assert short * long < widest[0] * widest[1]
            lost = 1 - kept_share((short, long), widest)  # of a picture of that shape
            assert lost < Fraction(step, widest[0]) / Fraction(long, short)


@pytest.mark.parametrize("area", [1024, 512 * 512, 1024 * 1024])
def test_generated_sizes_keep_the_area_of_pictures_up_to_their_ratio(area: int) -> None:
    pictures, step = [(600, 1800), (900, 900), (1800, 600)], 16 if area == 1024 else 64
    square = generate_sizes(area, step, 1.0)
    assert sum(kept_share(one, choose_size(one, square)) for one in pictures) == pytest.approx(5 / 3)
    sizes = generate_sizes(area, step, 3.0)
    assert sum(kept_share(one, choose_size(one, sizes)) for one in pictures) == pytest.approx(3.0)


def test_pictures_are_measured_as_they_are_shown(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    for name, options in {"a.jpg": {"exif": exif}, "b.png": {"exif": exif}, "c.webp": {}}.items():
        Image.new("RGB", (30, 20)).save(tmp_path / name, **options)
    assert measure_image(tmp_path / "a.jpg") == measure_image(tmp_path / "b.png") == (30, 20)
    assert measure_image(tmp_path / "c.webp") == (20, 30)
    assert load_image(tmp_path / "a.jpg", 30, 20).shape == (3, 30, 20)
    write_video(tmp_path / "d.mp4", 2, size=(32, 64))
    assert measure_video(tmp_path / "d.mp4") == (32, 64)
    (tmp_path / "e.png").write_bytes(b"nothing")
    for measure in (measure_image, measure_video):
        with pytest.raises(UserError, match=r"e\.png: cannot be read as a"):
            measure(tmp_path / "e.png")


def test_cuts_are_counted_and_the_worst_is_named() -> None:
    pictures = [Measured("square", (64, 64)), Measured("wide", (32, 96)), Measured("wider", (32, 128))]
    line = describe_cuts(pictures, [(32, 32)], 3, "images", in_buckets=False)
    assert line == (
        "2 of 3 images lose more than a quarter of their area when they are cropped to 32 x 32 (height x width); wider "
        "loses most, 75%; [policy.diffusers.buckets] trains on several sizes"
    )
    pictures.append(Measured("widest", (32, 192)))
    line = describe_cuts(pictures, [(32, 32), (32, 96)], 4, "images", in_buckets=True)
    assert line.endswith("add a size of their ratio to policy.diffusers.buckets")
    assert line.startswith("1 of 4 images lose more than a quarter of their area when they are cropped to the nearest")
    assert "widest loses most, 50%" in line
    one = describe_cuts(pictures, [(32, 32)], 4, "images", in_buckets=True)
    assert one.endswith("add a size of their ratio to policy.diffusers.buckets")
    assert describe_cuts(pictures[:1], [(32, 32)], 1, "images", in_buckets=False) == ""
    assert (
        describe_cuts([Measured("edge", (32, 24))], [(32, 32)], 1, "images", in_buckets=False) == ""
    )  # a quarter, and not more


def test_a_folder_that_is_repeated_has_samples_and_not_so_many_images() -> None:
    def config(*folders: dict[str, object]) -> Config:
        return Config.model_validate({"train": {"train_policy": {"dataset": {"folders": list(folders)}}}})

    assert name_pictures(config({"local_dir": "a"}, {"local_dir": "b"})) == "images"
    assert name_pictures(config({"local_dir": "a"}, {"local_dir": "b", "repeats": 2})) == "samples"


def test_of_many_pictures_some_are_looked_at() -> None:
    asked: list[int] = []

    def measure(index: int) -> Measured:
        asked.append(index)
        return Measured(str(index), (1, 3))

    found = measure_some(3 * LOOKED_AT + 1, measure)
    assert len(found) == len(asked) <= LOOKED_AT
    assert max(asked) > 2.9 * LOOKED_AT
    assert f"{len(found)} of {len(found)} looked at among {3 * LOOKED_AT + 1} images" in describe_cuts(
        found, [(1, 1)], 3 * LOOKED_AT + 1, "images", in_buckets=False
    )


# ---- the stream --------------------------------------------------------------------------------------------------

MANY: list[tuple[int, int] | None] = [(8, 8)] * 7 + [(8, 16)] * 3 + [(16, 8)] + [None] + [(8, 8)] * 2
"""Sizes of a small data set; one element cannot be read."""


def list_steps(stream: BucketStream, last: int, first: int = 0) -> list[list[Position]]:
    return list(stream.batches(first, last))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_has_one_size_and_all_are_taken_equally_often(shuffle: bool) -> None:
    stream = BucketStream.of_sizes(MANY, 4, 3, shuffle=shuffle)
    epochs = 4  # after as many as a step has samples no bucket has a rest
    steps = list_steps(stream, stream.steps_until(epochs))
    assert len(steps) == epochs * 13 // 4
    assert stream.count_waiting(epochs) == 0
    for number, step in enumerate(steps):
        assert {position.size for position in step} == {MANY[step[0].index]}
        assert {MANY[position.index] for position in step} == {step[0].size}
        assert [position.sample_id for position in step] == list(range(4 * number, 4 * number + 4))
    counts = Counter(position.index for step in steps for position in step)
    assert counts == {index: epochs for index in range(len(MANY)) if MANY[index] is not None}


def test_what_fills_no_step_waits_for_the_next_epoch() -> None:
    stream = BucketStream.of_sizes(MANY, 4, 3)  # 9, 3 and 1 elements
    assert [stream.steps_until(epoch) for epoch in range(5)] == [0, 2, 5, 8, 13]
    assert [stream.epoch_of(step) for step in range(13)] == [0] * 2 + [1] * 3 + [2] * 3 + [3] * 5
    assert [stream.count_waiting(epoch) for epoch in (1, 2, 3, 4)] == [1 + 3 + 1, 2 + 2 + 2, 3 + 1 + 3, 0]
    filled = BucketStream.of_sizes(MANY, 4, 3, drop_last=False)
    assert [filled.steps_until(epoch) for epoch in range(3)] == [0, 5, 10]
    assert filled.count_waiting(1) == 0
    first, second = (Counter(p.index for step in list_steps(filled, 5 * e + 5, 5 * e) for p in step) for e in range(2))
    assert set(first) == set(second) == {index for index, size in enumerate(MANY) if size is not None}
    assert first[10] == 4  # the only one of its size fills its step alone


@given(
    st.lists(st.sampled_from([(8, 8), (8, 16), (16, 8), None]), min_size=3, max_size=30),
    st.integers(1, 5),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_position_is_a_function_of_seed_and_step_alone(sizes, batch, seed, drop_last) -> None:
    if not any(sizes):
        return
    stream = BucketStream.of_sizes(sizes, batch, seed, drop_last=drop_last)
    steps = list_steps(stream, 12)
    again = BucketStream.of_sizes(sizes, batch, seed, drop_last=drop_last)
    for step in reversed(range(12)):  # any start, as of a resumed run, and in any order
        assert again.positions(step) == steps[step]
        assert stream.steps_until(stream.epoch_of(step)) <= step < stream.steps_until(stream.epoch_of(step) + 1)
    epoch = stream.epoch_of(11)
    whole = Counter(p.index for step in list_steps(stream, stream.steps_until(epoch)) for p in step)
    if drop_last:  # of one size no element is ever more than one pass ahead of another
        for size in set(sizes) - {None}:
            counts = [whole[index] for index, own in enumerate(sizes) if own == size]
            assert max(counts) - min(counts) <= 1


def test_another_seed_is_another_order_and_an_epoch_another_one() -> None:
    sizes = [(8, 8)] * 20 + [(8, 16)] * 20

    def order(seed: int, epoch: int) -> list[int]:
        steps = list_steps(BucketStream.of_sizes(sizes, 4, seed), 10 * epoch + 10, 10 * epoch)
        return [position.index for step in steps for position in step]

    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert sorted(order(0, 0)) == sorted(order(0, 1)) == list(range(40))


def test_a_run_without_a_whole_step_is_refused() -> None:
    stream = BucketStream.of_sizes(MANY, 64, 0)
    stream.require_steps(8)
    with pytest.raises(UserError, match="none of them fills a step of 64 in 7 epochs"):
        stream.require_steps(7)


class Shapes(Sequence[Item]):
    """Elements whose pixels are their index, in the sizes of ``MANY``; some cannot be read."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return len(MANY)

    def __getitem__(self, index: int) -> Item:  # pyright: ignore[reportIncompatibleMethodOverride]
        if index in self.broken:
            raise BadSample(f"element {index} is broken")
        return Item(torch.full((3, *(MANY[index] or (1, 1))), index / 100), str(index))


def test_any_number_of_ranks_sees_the_same_steps_of_one_shape_each() -> None:
    stream = BucketStream.of_sizes(MANY, 4, 3)
    whole = list(load_batches(Shapes(), stream, 0, 13))
    for world in (1, 2, 4):
        ranks = [list(load_batches(Shapes(), stream, 5, 13, rank=r, world_size=world)) for r in range(world)]
        assert {len(batches) for batches in ranks} == {8}
        for parts, expected in zip(zip(*ranks, strict=True), whole[5:], strict=True):
            assert len({tuple(item.visual.shape) for part in parts for item in part.items}) == 1
            found = {
                p.sample_id: item.prompt for part in parts for p, item in zip(part.positions, part.items, strict=True)
            }
            assert found == {p.sample_id: i.prompt for p, i in zip(expected.positions, expected.items, strict=True)}


def test_another_of_the_same_size_takes_the_place_of_a_broken_one() -> None:
    stream, skipped = BucketStream.of_sizes(MANY, 4, 3), Skipped(len(MANY), 0.5)
    batches = list(load_batches(Shapes(broken=(2, 8)), stream, 0, 13, skipped=skipped))
    assert set(skipped.reasons) == {2, 8}
    for batch in batches:
        assert {tuple(item.visual.shape[1:]) for item in batch.items} == {batch.positions[0].size}


# ---- a folder ----------------------------------------------------------------------------------------------------

FAR = [(96, 32), (32, 96)] * 4
"""Sizes of pictures that a square crop takes two thirds of."""


def count_red(pixels: torch.Tensor) -> int:
    return int(((pixels[0] > 0.6) & (pixels[1] < -0.6)).sum())


def test_both_ends_of_wide_and_tall_pictures_are_trained_with_buckets(tmp_path: Path) -> None:
    folder = marked_folder(tmp_path, [*FAR, (32, 32), (32, 128)])
    sizes = [(32, 32), (96, 32), (32, 96)]
    square, buckets = LocalPairs(folder, 32, 32), LocalPairs(folder, 32, 32, sizes=sizes)
    assert [count_red(square[i].visual) for i in range(8)] == [0] * 8
    assert [count_red(buckets[i].visual) for i in range(8)] == [2 * 8 * 32] * 8
    assert [tuple(item.visual.shape[1:]) for item in buckets] == [*FAR, (32, 32), (32, 96)]
    assert [buckets.bucket_of(i) for i in range(10)] == [*FAR, (32, 32), (32, 96)]
    kept = [kept_share(buckets.measure(i).sides, buckets.bucket_of(i)) for i in range(10)]
    assert sum(kept[:9]) / 9 >= 0.95
    assert [kept_share(square.measure(i).sides, (32, 32)) for i in range(8)] == [Fraction(1, 3)] * 8
    sources = {item.source for i in range(10) for item in (square.identify(i, None), buckets.identify(i, None)) if item}
    assert len(sources) == 10 + 9  # a latent of one size is not that of another
    taken, known = buckets[3], buckets.identify(3, None)
    assert known is not None
    assert taken.source == known.source


def test_buckets_are_described_with_what_they_keep() -> None:
    pictures = [Measured("wide", (32, 96)), Measured("square", (32, 32)), Measured("wider", (32, 120))]
    assert describe_buckets(pictures, [(32, 32), (96, 32), (32, 96)], "images") == [
        "3 images in buckets (height x width): 32 x 32: 1, 32 x 96: 2",
        "93.3% of their area is kept; wider loses most, 20.0%",
        "1 of the 3 sizes are those of no image",
    ]


def test_a_video_comes_out_at_the_size_of_its_bucket(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", 5, size=(32, 64))
    (tmp_path / "a.txt").write_text("a clip")
    pairs = LocalPairs(tmp_path, 32, 32, frames=3, sizes=[(32, 32), (16, 32)])
    assert pairs[0].visual.shape == (3, 3, 16, 32)
