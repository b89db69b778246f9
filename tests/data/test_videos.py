"""Video files -> consecutive frames with the true rate."""

import random
from pathlib import Path

import pytest
import torch
from PIL import Image

from cosmos_rl.data.items import BadSample, Part, identify, take
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.data.streams import MapStream, Skipped, load_batches
from cosmos_rl.data.videos import count_frames, load_clip
from cosmos_rl.errors import UserError
from tests.support.videos import STEP, write_video


def frame_numbers(visual: torch.Tensor) -> list[int]:
    """Which frames of ``write_video`` these are."""
    return [round((float(frame.mean()) + 1) * 127.5 / STEP) for frame in visual.unbind(1)]


def save_clip(folder: Path, name: str, frames: int, **options: object) -> None:
    write_video(folder / f"{name}.mp4", frames, **options)  # type: ignore[arg-type]
    (folder / f"{name}.txt").write_text(name)


@pytest.mark.parametrize("frames", [1, 4, 5, 6, 20])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi", ".mov"])
def test_every_frame_is_counted(tmp_path: Path, suffix: str, frames: int) -> None:
    write_video(tmp_path / f"a{suffix}", frames)
    assert count_frames(tmp_path / f"a{suffix}") == frames


def test_frames_follow_one_another_from_any_start(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", 8, fps=24)
    starts = set()
    for seed in range(40):
        clip = load_clip(tmp_path / "a.mp4", 5, 32, 32, random.Random(seed).randrange)
        assert frame_numbers(clip.visual) == list(range(clip.start, clip.start + 5))
        assert clip.fps == 24
        starts.add(clip.start)
    assert starts == set(range(4))  # the first and the last window too


def test_a_clip_of_exactly_the_needed_frames_is_taken_and_a_shorter_one_named(tmp_path: Path) -> None:
    write_video(tmp_path / "five.mp4", 5)
    write_video(tmp_path / "four.mp4", 4)
    assert frame_numbers(load_clip(tmp_path / "five.mp4", 5, 32, 32).visual) == [0, 1, 2, 3, 4]
    with pytest.raises(BadSample, match=r"four.mp4: 4 frames, need 5 \(policy.diffusers.train_frames\)"):
        load_clip(tmp_path / "four.mp4", 5, 32, 32)


def test_a_window_is_identified_without_decoding_it(tmp_path: Path) -> None:
    save_clip(tmp_path, "a", 8, fps=24)
    pairs = LocalPairs(tmp_path, 32, 32, frames=5)
    whole = Part(pairs, 0, 1)
    seen: dict[str, list[int]] = {}
    for sample_id in (None, *range(20)):
        item, known = take(whole, 0, sample_id), identify(whole, 0, sample_id)
        assert known is not None
        assert (known.source, known.fps, known.prompt, known.name) == (item.source, 24, item.prompt, item.name)
        assert known.visual.numel() == 0
        assert known.source is not None
        assert seen.setdefault(known.source, frame_numbers(item.visual)) == frame_numbers(item.visual)
    assert len(seen) == len({tuple(frames) for frames in seen.values()}) == 4
    other_size = LocalPairs(tmp_path, 16, 16, frames=5).identify(0, None)
    assert other_size is not None
    assert other_size.source not in seen


def test_a_variable_rate_changes_neither_count_nor_order(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mkv", 6, times=[0, 40, 50, 300, 310, 900])
    assert count_frames(tmp_path / "a.mkv") == 6
    assert frame_numbers(load_clip(tmp_path / "a.mkv", 6, 32, 32).visual) == list(range(6))


def test_the_crop_keeps_the_aspect(tmp_path: Path) -> None:
    """A wide clip whose middle square is covered."""
    write_video(tmp_path / "a.mp4", 2, size=(32, 96))
    assert load_clip(tmp_path / "a.mp4", 2, 16, 16).visual.shape == (3, 2, 16, 16)
    assert load_clip(tmp_path / "a.mp4", 2, 64, 48).visual.shape == (3, 2, 64, 48)


def test_pairs_stay_paired_when_a_clip_is_too_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, frames in (("a", 9), ("b", 3), ("c", 9)):
        save_clip(tmp_path, name, frames)
    pairs = LocalPairs(tmp_path, 32, 32, frames=5)
    skipped = Skipped(3, 0.5)
    stream = MapStream(3, 1, seed=0)
    batches = list(load_batches(pairs, stream, 0, 6, skipped=skipped))
    assert {(batch.items[0].name, batch.items[0].prompt) for batch in batches} == {("a", "a"), ("c", "c")}
    (reason,) = skipped.reasons.values()
    assert "b.mp4: 3 frames, need 5" in reason


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_clips_are_named_once_and_left_out(tmp_path: Path, num_workers: int) -> None:
    for number in range(8):
        save_clip(tmp_path, f"{number}", 6)
    whole = (tmp_path / "0.mp4").read_bytes()
    (tmp_path / "0.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "1.mp4").write_bytes(b"")
    (tmp_path / "2.mp4").write_text("not a video")
    pairs, skipped = LocalPairs(tmp_path, 32, 32, frames=5), Skipped(8, 0.5)
    batches = list(load_batches(pairs, MapStream(8, 2, seed=0), 0, 8, skipped=skipped, num_workers=num_workers))
    assert sorted(skipped.reasons) == [0, 1, 2]
    assert all("cannot be read as a video" in reason for reason in skipped.reasons.values())
    assert {item.name for batch in batches for item in batch.items} == {"3", "4", "5", "6", "7"}


def test_a_file_that_ends_in_the_middle_is_not_a_shorter_clip(tmp_path: Path) -> None:
    """Matroska can be read up to where it breaks off; MP4 with its index at the front knows what is missing."""
    import av

    write_video(tmp_path / "whole.mp4", 30, size=(128, 128))
    with (
        av.open(str(tmp_path / "whole.mp4")) as source,
        av.open(str(tmp_path / "front.mp4"), "w", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    content = (tmp_path / "front.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(content[: len(content) * 2 // 3])
    assert count_frames(tmp_path / "front.mp4") == 30
    with pytest.raises(BadSample, match=r"half.mp4: (30 frames announced|cannot be read as a video)"):
        count_frames(tmp_path / "half.mp4")


def test_a_set_of_bad_clips_ends_the_run(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.mp4").write_text("not a video")
        (tmp_path / f"{number}.txt").write_text("a caption")
    pairs = LocalPairs(tmp_path, 32, 32, frames=5)
    with pytest.raises(UserError, match="cannot be read"):
        list(load_batches(pairs, MapStream(4, 1, seed=0), 0, 4, skipped=Skipped(4, 0.05)))


def test_windows_depend_on_the_position_alone(tmp_path: Path) -> None:
    for name in "abcd":
        save_clip(tmp_path, name, 12)
    pairs = LocalPairs(tmp_path, 32, 32, frames=5)
    stream = MapStream(4, 4, seed=0)

    def seen(first: int, ranks: int) -> dict[int, list[int]]:
        return {
            position.sample_id: frame_numbers(item.visual)
            for rank in range(ranks)
            for batch in load_batches(pairs, stream, first, 6, rank=rank, world_size=ranks)
            for position, item in zip(batch.positions, batch.items, strict=True)
        }

    whole = seen(0, 1)
    assert len(whole) == 24
    assert len({numbers[0] for numbers in whole.values()}) > 4  # windows of several epochs differ
    assert seen(0, 2) == whole
    assert seen(3, 1) == {number: frames for number, frames in whole.items() if number >= 12}


def test_a_held_out_clip_has_the_same_window_at_every_call(tmp_path: Path) -> None:
    for name in "ab":
        save_clip(tmp_path, name, 12)
    held_out = Part(LocalPairs(tmp_path, 32, 32, frames=4), 1, 2)
    assert frame_numbers(held_out[0].visual) == frame_numbers(take(held_out, 0, None).visual) == [4, 5, 6, 7]
    assert held_out[0].fps == 16


def test_images_in_a_folder_of_videos_are_not_read(tmp_path: Path) -> None:
    save_clip(tmp_path, "a", 5)
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    (tmp_path / "b.txt").write_text("an image")
    pairs = LocalPairs(tmp_path, 32, 32, frames=5)
    assert [pair.name for pair in pairs.pairs] == ["a"]
    assert pairs.problems == ["b.txt: has no video; b.png is of a kind that is not read"]
    only = tmp_path / "only"
    save_clip(only, "a", 5)
    with pytest.raises(UserError, match="without policy.diffusers.is_video = true"):
        LocalPairs(only, 32, 32)
