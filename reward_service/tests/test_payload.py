"""Bodies byte by byte: what is read, as what, and what is refused with which reason."""

import contextlib
import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rl_reward.payload.arrays import BFLOAT16, load, read_npy
from cosmos_rl_reward.payload.errors import Refused
from cosmos_rl_reward.payload.media import read_payload
from cosmos_rl_reward.payload.metadata import check_counts, parse_line
from cosmos_rl_reward.payload.torch_file import read_torch
from tests.service import npy


def torch_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read(data, media):
    return read_payload(io.BytesIO(b"before" + data), 6, 6 + len(data), media)


def values(tmp_path, data, media):
    found = read(data, media)
    path = tmp_path / "body"
    path.write_bytes(b"before" + data)
    return found, load(str(path), found.array)


def header(descr, order, shape, version=1):
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    length = struct.pack("<H", len(text)) if version == 1 else struct.pack("<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i4", "<f2", "<f4", ">f8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_images_of_every_number_type(tmp_path, dtype, order):
    array = np.asarray(np.arange(2 * 4 * 5 * 3).reshape(2, 4, 5, 3) % 200, dtype=dtype, order=order)
    found, got = values(tmp_path, npy(array), "image")
    assert (found.kind, found.count, found.pixels) == ("image", 2, 20)
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_npy_versions(version):
    data = header("'|u1'", False, (1, 2, 2, 3), version) + bytes(12)
    assert read(data, "image").array.shape == (1, 2, 2, 3)


def test_the_documented_example_has_the_documented_size():
    data = npy(np.zeros((2, 512, 512, 3), np.uint8))
    assert len(data) == 1_572_992
    assert read(data, "image").array.offset == 6 + 128


def test_uint8_latents_are_bfloat16_bits(tmp_path):
    latents = torch.randn(2, 16, 3, 4, 6).bfloat16()
    wire = latents.view(torch.uint8).numpy()
    assert wire.shape == (2, 16, 3, 4, 12)
    found, got = values(tmp_path, npy(wire), "latent")
    assert (found.kind, found.array.dtype, found.array.shape) == ("latent", BFLOAT16, (2, 16, 3, 4, 6))
    assert torch.equal(torch.from_numpy(got.view(np.int16)).view(torch.bfloat16), latents)
    assert found.pixels == 9 * 32 * 48


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("media", ["latent", None])
def test_torch_latents_of_old_clients(tmp_path, dtype, media):
    latents = torch.randn(2, 48, 2, 3, 4, dtype=dtype)
    found, got = values(tmp_path, torch_file(latents), media)
    assert found.array.shape == (2, 48, 2, 3, 4)
    want = latents.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else latents.numpy()
    np.testing.assert_array_equal(got, want)


def test_torch_views_keep_their_strides(tmp_path):
    whole = torch.arange(3 * 7 * 8 * 4, dtype=torch.uint8).reshape(4, 3, 7, 8)
    part = whole[1:].permute(0, 2, 3, 1)
    _, got = values(tmp_path, torch_file(part), "image")
    np.testing.assert_array_equal(got, part.numpy())


def test_channels_first_images_are_looked_at_the_other_way_round(tmp_path):
    array = np.random.default_rng(0).integers(0, 255, (2, 3, 5, 6), np.uint8)
    _, got = values(tmp_path, npy(array), "image")
    np.testing.assert_array_equal(got, array.transpose(0, 2, 3, 1))


IMAGE = np.zeros((2, 4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("data", "media", "reason"),
    [
        (npy(IMAGE), None, "media_type is absent"),
        (npy(IMAGE), "images", "'images' is not one of"),
        (npy(IMAGE), "video", "must be [B, 3, T, H, W]"),
        (npy(IMAGE[..., :2]), "image", "must be [B, H, W, 3]"),
        (npy(IMAGE[:0]), "image", "B = 0"),
        (npy(IMAGE[:, :0]), "image", "must be [B, H, W, 3]"),
        (npy(IMAGE)[:-1], "image", "truncated"),
        (npy(IMAGE) + b"x", "image", "extra bytes"),
        (npy(IMAGE)[:60], "image", "cannot be read"),
        (b"", "image", "empty"),
        (b"\x89PNG", "image", "neither a .npy nor a torch.save file"),
        (npy(np.zeros((1, 17, 2, 4, 4), np.float16)), "latent", "16 or 48"),
        (npy(np.zeros((1, 16, 2, 4, 5), np.uint8)), "latent", "last axis has 5"),
        (npy(IMAGE.astype(complex)), "image", "not an array of real numbers"),
        (header("[('a', '<f4')]", False, (1,)) + bytes(4), "image", "plain array"),
        (header("'|O'", False, (1, 1, 1, 3)) + bytes(24), "image", "not an array of real numbers"),
        (header("'|u1'", False, (2**39, 2**39, 2**39, 3)), "image", "truncated"),
        (header("'|u1'", False, (-1, 4, 4, 3)), "image", "not possible"),
        (header("'|u1'", False, (True, 4, 4, 3)) + bytes(48), "image", "not possible"),
        (b"\x93NUMPY\x09\x00" + bytes(20), "image", "version 9"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + bytes(20), "image", "is too long"),
        (torch_file([torch.zeros(2), torch.ones(2)]), "image", "one plain tensor"),
        (torch_file({"a": 1}), "image", "one plain tensor"),
        (torch_file(torch.zeros(2, 4, 4, 3).to_sparse()), "image", "only a plain tensor is read"),
        (torch_file(torch.zeros(2, 4, 4, 3, dtype=torch.complex64)), "image", "type that is not read"),
    ],
)
def test_refused_with_the_reason(data, media, reason):
    with pytest.raises(Refused, match=".*") as refused:
        read(data, media)
    assert reason in str(refused.value)


class Gadget:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def rewritten(data, name, content, **kwargs):
    """The torch file with one entry replaced."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", **kwargs) as new:
        for info in old.infolist():
            new.writestr(info.filename, content if info.filename.endswith(name) else old.read(info))
    return out.getvalue()


def test_no_pickle_runs(tmp_path):
    good, ran = torch_file(torch.zeros(1, 4, 4, 3)), tmp_path / "ran"
    pickle.loads(pickle.dumps(Gadget(ran)))
    ran.unlink()  # so it would run
    for protocol in (0, 2, 4, 5):
        bad = rewritten(good, "/data.pkl", pickle.dumps(Gadget(ran), protocol))
        with pytest.raises(Refused):
            read(bad, "image")
    with pytest.raises(Refused):
        read(torch_file(Gadget(ran)), "image")
    with pytest.raises(Refused, match="larger than its data"):
        read(rewritten(good, "/data/0", b"short"), "image")
    with pytest.raises(Refused):
        read(rewritten(good, "/data/0", bytes(192), compression=zipfile.ZIP_DEFLATED), "image")
    assert not ran.exists()


@pytest.mark.parametrize("name", ["/byteorder", "/data.pkl", "/data/0", "/version"])
def test_no_entry_is_decompressed(name):
    """A few hundred bytes must not become megabytes, whatever the entry is called."""
    good, out = torch_file(torch.zeros(1, 4, 4, 3)), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            if info.filename.endswith(name):
                new.writestr(info.filename, bytes(100 << 20), zipfile.ZIP_DEFLATED)
            else:
                new.writestr(info.filename, old.read(info))
    data = out.getvalue()
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            read(data, "image")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, dtype=torch.uint8).expand(1, 16000, 15900, 3),
        torch.zeros(2, 4, 1, 3).expand(2, 4, 4, 3),
        torch.zeros(200).as_strided((2, 4, 4, 3), (48, 11, 3, 1)),
    ],
    ids=["all of it", "one axis", "rows that share a part"],
)
def test_tensors_that_would_grow_when_they_are_read_are_refused(tensor):
    with pytest.raises(Refused, match=r"share memory .* tensor.contiguous"):
        read(torch_file(tensor), "image")


def test_slices_of_larger_tensors_are_read(tmp_path):
    part = torch.arange(4 * 8 * 8 * 4, dtype=torch.uint8).reshape(4, 8, 8, 4)[::2, 1:5, ::2, :3]
    _, got = values(tmp_path, torch_file(part), "image")
    np.testing.assert_array_equal(got, part.numpy())
    assert got.flags.c_contiguous


def doubled(depth):
    """Instructions for a pair of pairs of pairs ..., which takes ``2 ** depth`` steps to compare, hash or show."""
    step = pickle.BINPUT + b"\x09" + pickle.BINGET + b"\x09" + pickle.TUPLE2
    return pickle.EMPTY_TUPLE + step * depth


@pytest.mark.timeout(60)
@pytest.mark.parametrize("depth", [3, 400])
@pytest.mark.parametrize("place", ["storage", "callee", "value", "key"])
def test_values_without_end_are_neither_hashed_nor_compared_nor_shown(place, depth):
    text = lambda word: pickle.BINUNICODE + struct.pack("<I", len(word)) + word  # noqa: E731
    bomb = doubled(depth)
    kind = text(b"torch") + bomb + pickle.TUPLE2 if place == "storage" else b"ctorch\nByteStorage\n"
    key = bomb if place == "key" else text(b"0")
    storage = pickle.MARK + text(b"storage") + kind + key + text(b"cpu") + pickle.BININT1 + b"\x30" + pickle.TUPLE
    call = bomb if place == "callee" else b"ctorch._utils\n_rebuild_tensor_v2\n"
    sizes = b"".join(pickle.BININT1 + bytes([n]) for n in (1, 4, 4, 3))
    shape = pickle.MARK + sizes + pickle.TUPLE
    arguments = pickle.MARK + storage + pickle.BINPERSID + pickle.BININT1 + b"\0" + shape + shape + pickle.TUPLE
    stream = b"\x80\x02" + (bomb if place == "value" else call + arguments + pickle.REDUCE) + pickle.STOP
    with pytest.raises(Refused):
        read(rewritten(torch_file(torch.zeros(1, 4, 4, 3)), "/data.pkl", stream), "image")


def test_a_zip_with_a_huge_directory_is_not_read():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for i in range(3000):
            archive.writestr(f"archive/data/{i}", b"")
    with pytest.raises(Refused, match="more than one tensor"):
        read(out.getvalue(), "image")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not one JSON object"),
        (b"[]", "must be a JSON object"),
        (b'{"a": NaN}', "invalid JSON"),
        (b"[" * 100_000, "not one JSON object"),
        (b"\xff", "not UTF-8"),
        (b'{"prompts": ["a"]}', "reward_fn"),
        (b'{"prompts": ["a"], "reward_fn": {}}', "reward_fn"),
        (b'{"prompts": ["a"], "reward_fn": ["a"]}', "reward_fn"),
        (b'{"prompts": ["a"], "reward_fn": {"a": "1"}}', "reward_fn.a"),
        (b'{"prompts": ["a"], "reward_fn": {"a": true}}', "reward_fn.a"),
        (b'{"prompts": ["a"], "reward_fn": {"a": 1e999}}', "reward_fn.a"),
        (b'{"prompts": ["a"], "reward_fn": {"../a": 1}}', "not a reward name"),
        (b'{"reward_fn": {"a": 1}}', "prompts"),
        (b'{"prompts": [1], "reward_fn": {"a": 1}}', "prompts"),
        (b'{"prompts": ["a"], "media_type": 3, "reward_fn": {"a": 1}}', "media_type"),
        (b'{"prompts": ["a"], "video_infos": [3], "reward_fn": {"a": 1}}', "video_infos"),
        (b'{"prompts": ["a"], "reward_fn": {"a": 1%s}}' % (b"0" * 400), "reward_fn.a"),
        (b'{"prompts": ["a"], "reward_fn": {"a": -1e999}}', "reward_fn.a"),
        *(
            (b'{"prompts": ["a"], "reward_fn": {"a": 1}, "video_infos": [{"%s": %s}]}' % (name, value), reason)
            for name in (b"video_fps", b"fps")
            for value, reason in [
                *(
                    (v, "video_infos[0].")
                    for v in (b'"fast"', b"null", b"-3", b"0", b"true", b"[8]", b"1" + b"0" * 400)
                ),
                (b"1e999", "video_infos"),
            ]
        ),
        (b'{"prompts": ["a\\ud800"], "reward_fn": {"a": 1}}', "metadata.prompts: holds half of a surrogate pair"),
        (b'{"prompts": ["a"], "note": {"\\udfff": 1}, "reward_fn": {"a": 1}}', "metadata.note: holds half"),
        (b'{"prompts": ["a"], "\\udfff": 1, "reward_fn": {"a": 1}}', "half of a surrogate pair"),
        (b'{"prompts": ["a"], "media_type": "\\udfff", "reward_fn": {"a": 1}}', "half of a surrogate pair"),
        (b'{"prompts": ["a"], "reward_fn": {"\\udfff": 1}}', "not a reward name"),
        (b'{"prompts": ["a"], "reference": [1e999], "reward_fn": {"a": 1}}', "metadata.reference: holds a number"),
        (b'{"prompts": ["a"], "reward_fn": {"a": 1}, "per_item": "level"}', "per_item: must be a list of names"),
        (b'{"prompts": ["a"], "reward_fn": {"a": 1}, "per_item": null}', "per_item: must be a list of names"),
        (b'{"prompts": ["a"], "reward_fn": {"a": 1}, "per_item": [["x"]]}', "per_item: must be a list of names"),
        (b'{"prompts": ["a"], "reward_fn": {"a": 1}, "per_item": ["level"]}', "names level, which is no field"),
        (b'{"prompts": ["a"], "reward_fn": {"a": 1}, "per_item": ["per_item"]}', "names per_item, which is no field"),
    ],
)
def test_metadata_refused_with_the_field(line, reason):
    with pytest.raises(Refused) as refused:
        parse_line(line)
    assert reason in str(refused.value)
    str(refused.value).encode()  # it can be sent


def test_whole_surrogate_pairs_and_rates_of_any_number_type_are_fine():
    line = rb'{"prompts": ["\ud83d\ude00"], "video_infos": [{"fps": 8}], "reward_fn": {"a": 1e30}}'
    data = parse_line(line)
    assert (data["prompts"], data["video_infos"]) == (["\N{GRINNING FACE}"], [{"fps": 8, "video_fps": 8}])


def test_counts_must_fit():
    data = parse_line(b'{"prompts": ["a", "b", "c"], "reward_fn": {"a": 1}}')
    with pytest.raises(Refused, match="prompts: has 3 entries, but the payload has 2 samples"):
        check_counts(data, 2)
    check_counts(data, 3)
    line = b'{"prompts": ["a", "b"], "reward_fn": {"a": 1}, "level": %s, "note": [7], "per_item": ["level"]}'
    check_counts(parse_line(line % b"[1, null]"), 2)
    for value, have in ((b"[1]", "1"), (b"null", "no list"), (b"3", "no list"), (b'"ab"', "no list")):
        with pytest.raises(Refused, match=f"metadata.level: has {have} entries, but the payload has 2 samples"):
            check_counts(parse_line(line % value), 2)


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_refused_never_worse(data):
    for reader in (read_npy, read_torch):
        for start in (b"", b"\x93NUMPY\x01\x00"):
            blob = start + data
            with pytest.raises(Refused):
                reader(io.BytesIO(blob), 0, len(blob))


FILES = [npy(IMAGE), torch_file(torch.zeros(1, 2, 2, 3)), torch_file(torch.zeros(1, 16, 1, 2, 2).bfloat16())]


@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6))
@settings(max_examples=500, deadline=None)
def test_damaged_files_are_read_within_bounds_or_refused(data, changes):
    blob = bytearray(data)
    for at, value in changes:
        blob[at % len(blob)] = value
    for media in ("image", "latent"):
        try:
            found = read(bytes(blob), media)
        except Refused:
            continue
        assert found.array.offset >= 6
        assert found.array.offset + found.array.span <= 6 + len(blob)


def test_a_directory_said_to_be_beyond_any_file_is_never_looked_for_there():
    data = FILES[1]
    at = data.rindex(b"PK\x06\x07") + 8  # where the zip64 locator says its record is: Python may ignore that
    for place in (1 << 62, (1 << 64) - 1):
        changed = data[:at] + place.to_bytes(8, "little") + data[at + 8 :]
        with contextlib.suppress(Refused):
            assert read(changed, "image") == read(data, "image")


@given(st.text(), st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.floats() | st.text(max_size=5)))
@settings(max_examples=200, deadline=None)
def test_any_json_is_parsed_or_refused(prompt, extra):
    line = json.dumps({"reward_fn": {"a": 1}, "prompts": [prompt], **extra}).encode()
    try:
        data = parse_line(line)
    except Refused:
        return
    assert isinstance(data["prompts"], list)
