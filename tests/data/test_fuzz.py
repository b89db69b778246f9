"""Ten thousand images and captions with random damage: each is read or named, none ends a run another way."""

import io
import json
import os
import random
import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from cosmos_rl.data.images import load_image
from cosmos_rl.data.items import BadSample
from cosmos_rl.data.pair_files import scan_pairs
from cosmos_rl.data.prompts import read_prompts
from cosmos_rl.errors import UserError

CAPTIONS = [
    b'{"prompt": "a photo of the number 3", "seed": 1}',
    '{"prompt": "M\u00fcller \u4e09\u500b \U0001f600 e\u0301", "tags": ["a", null, 1e3]}'.encode(),
    b'\xef\xbb\xbf{"prompt": "with a mark"}',
    json.dumps({"prompt": "\U0001f600 and \U0001f1e9\U0001f1ea flags"}).encode(),  # escaped, in surrogate pairs
]


def small_images() -> list[tuple[str, bytes]]:
    """Small files of every kind that is read, with what decoders trip over: EXIF, palettes, 16 bits, animation."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 10, 4), dtype=np.uint8)
    rgba = Image.fromarray(noise)
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x9003] = 6, "maker", "2026:01:01 00:00:00"
    made: list[tuple[str, Image.Image, dict[str, object]]] = [
        (".jpg", rgba.convert("RGB"), {"exif": exif}),
        (".jpg", rgba.convert("CMYK"), {"progressive": True}),
        (".png", rgba, {"exif": exif}),
        (".png", rgba.convert("P"), {"transparency": 3}),
        (".png", Image.fromarray(noise[..., 0].astype(np.uint16) * 257), {}),
        (".png", rgba.convert("RGB"), {"save_all": True, "append_images": [rgba.convert("L").convert("RGB")]}),
        (".webp", rgba, {"exif": exif}),
        (".webp", rgba.convert("RGB"), {"lossless": True, "save_all": True, "append_images": [rgba.convert("RGB")]}),
    ]
    files = []
    for suffix, image, options in made:
        file = io.BytesIO()
        kind = {".jpg": "JPEG", ".png": "PNG", ".webp": "WEBP"}[suffix]
        image.save(file, kind, **options)
        files.append((suffix, file.getvalue()))
    return files


def damaged(content: bytes, draw: random.Random) -> bytes:
    """A few random changes of one file."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        place, length = draw.randrange(len(data) + 1), draw.choice((1, 2, 4, 16))
        match draw.randrange(6):
            case 0:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                data = data[:place] if draw.random() < 0.3 else data
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = draw.randbytes(length)
            case 4:
                data[place : place + length] = bytes([draw.choice((0, 255))]) * length
            case _:
                other = draw.randrange(len(data) + 1)
                data[place:place] = data[other : other + length]
    return bytes(data)


def read_images(folder: Path, count: int, seed: int) -> Counter[str]:
    draw, images, outcomes, messages = random.Random(seed), small_images(), Counter[str](), list[str]()
    for number in range(count):
        suffix, content = images[number % len(images)]
        path = folder / f"x{suffix}"
        path.write_bytes(damaged(content, draw))
        try:
            image = load_image(path, 8, 8)
        except BadSample as error:
            messages.append(str(error))
            continue
        assert image.shape == (3, 8, 8)
        assert bool(torch.isfinite(image).all())
        outcomes["read"] += 1
    named = re.compile(rf"{re.escape(str(folder))}/x\.\w+: cannot be read as an image \((\w+).*\)", re.DOTALL)
    for message in messages:
        match = named.fullmatch(message)
        assert match, message
        outcomes[match[1]] += 1
    return outcomes


def read_captions(folder: Path, count: int, seed: int, tokenizers: list[Tokenizer]) -> Counter[str]:
    draw, outcomes = random.Random(seed), Counter[str]()
    Image.new("RGB", (2, 2)).save(folder / "image", "PNG")
    contents = [damaged(CAPTIONS[number % len(CAPTIONS)], draw) for number in range(count)]
    for number, content in enumerate(contents):
        os.link(folder / "image", folder / f"{number}.png")
        (folder / f"{number}.json").write_bytes(content)
    pairs, problems = scan_pairs(folder)
    assert len(pairs) + len(problems) == count
    for pair in pairs:
        assert isinstance(pair.prompt.encode(), bytes)
        for tokenizer in tokenizers:
            tokenizer.encode(pair.prompt)
    why = re.compile(r"\d+\.json: (is not UTF-8 text|is not valid JSON|has no text under 'prompt'|has half|has null)")
    for problem in problems:
        match = why.match(problem)
        assert match, problem
        outcomes[match[1]] += 1
    outcomes["read"] = len(pairs)
    return outcomes


def read_rows(file: Path, count: int, seed: int) -> tuple[int, list[str]]:
    """How many damaged rows are read, and what is said of the others."""
    draw, read, messages = random.Random(seed), 0, list[str]()
    for number in range(count):
        file.write_bytes(damaged(CAPTIONS[number % len(CAPTIONS)], draw))
        try:
            read += bool(read_prompts(file))
        except UserError as error:
            messages.append(str(error))
    return read, messages


@pytest.fixture(scope="module")
def tokenizers(tiny_sd3: Path) -> list[Tokenizer]:
    files = sorted(tiny_sd3.glob("tokenizer*/tokenizer.json"))
    assert len(files) == 3
    return [Tokenizer.from_file(str(file)) for file in files]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")  # of Pillow, about EXIF data and palettes


@pytest.mark.parametrize(
    ("images", "captions", "seed"), [(400, 200, 1), pytest.param(8000, 2000, 0, marks=pytest.mark.zoo)]
)
def test_damaged_files_are_read_or_named(
    tmp_path: Path, tokenizers: list[Tokenizer], images: int, captions: int, seed: int
) -> None:
    found = read_images(tmp_path, images, seed)
    assert min(found["read"], images - found["read"]) > images / 20, found  # the damage is neither nothing nor all
    (tmp_path / "captions").mkdir()
    found = read_captions(tmp_path / "captions", captions, seed, tokenizers)
    assert min(found["read"], captions - found["read"]) > captions / 20, found
    assert min(found[why] for why in ("is not UTF-8 text", "is not valid JSON", "has no text under 'prompt'")) > 0
    read, messages = read_rows(tmp_path / "rows.jsonl", captions, seed)
    assert min(read, captions - read) > captions / 20, messages
    assert all(message.startswith(f"{tmp_path}/rows.jsonl") for message in messages)
