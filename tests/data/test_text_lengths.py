"""Captions longer than the text encoders take: one line, and none of the libraries' own."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cosmos_rl.data.text_lengths import describe_truncation, load_encoders
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.quiet import build_text_encoders
from tests.support.trainer_runs import train

LONG = " ".join(["a photo of the digit three"] * 67)  # 402 words


def folder_with(folder: Path, captions: dict[str, str]) -> Path:
    folder.mkdir()
    for name, caption in captions.items():
        Image.new("RGB", (32, 32), "red").save(folder / f"{name}.png")
        (folder / f"{name}.json").write_text(json.dumps({"prompt": caption}), encoding="utf-8")
    return folder


@pytest.fixture
def library_lines() -> Iterator[list[str]]:
    """What transformers and diffusers log meanwhile."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Kept()
    for name in ("transformers", "diffusers"):
        logging.getLogger(name).addHandler(handler)
    yield lines
    for name in ("transformers", "diffusers"):
        logging.getLogger(name).removeHandler(handler)


def test_files_and_loaded_tokenizers_count_alike(tiny_sd3: Path) -> None:
    from transformers import AutoTokenizer

    folders = sorted(tiny_sd3.glob("tokenizer*"))
    loaded = build_text_encoders([AutoTokenizer.from_pretrained(folder) for folder in folders], 12)
    texts = [LONG, "a cat", "", "M\u00fcller \U0001f600 \u4e09\u500b", "x" * 300]
    found = load_encoders(tiny_sd3, 12)
    kinds = [("CLIP", 16), ("CLIP", 16), ("T5", 12)]  # the tiny CLIP takes 16 tokens in place of 77
    assert [(e.name, e.limit) for e in found] == kinds
    assert [(e.name, e.limit) for e in loaded] == kinds
    for one, other in zip(found, loaded, strict=True):
        assert one.lengths(texts) == other.lengths(texts)
        assert one.lengths(["a b"])[0] >= 2 + (one.name == "CLIP")  # special tokens count


@pytest.mark.parametrize("cache", ["false", "true"])
def test_long_captions_are_counted_once(
    tmp_path: Path,
    write_toml: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    library_lines: list[str],
    cache: str,
    tiny_sd3: Path,
) -> None:
    captions = {f"{i}": LONG if i != 5 else f"{LONG} and a cat" for i in range(7)} | {"7": "short"}
    tokens = load_encoders(tiny_sd3, 64)
    longest = max(encoder.lengths([captions["5"]])[0] for encoder in tokens)
    expected = (
        "7 of 8 captions are longer than 64 tokens (T5), 7 than 16 (CLIP); what is beyond is cut off; "
        f"longest: 5.json, {longest} tokens"
    )
    options = [
        f"--train.train_policy.dataset.local_dir={folder_with(tmp_path / 'long', captions)}",
        "--policy.diffusers.max_prompt_length=64",
        f"--train.train_policy.enable_dataset_cache={cache}",
    ]
    config = write_toml()
    assert main(["check", "--env", "--config", str(config), *options]) == 0
    assert capsys.readouterr().out.count(expected) == 1
    train(config, *options, "--train.max_num_steps=2")
    printed = capsys.readouterr()
    assert printed.out.count(expected) == 1
    assert printed.out.count("longer than") == 1
    assert len(printed.out) + len(printed.err) < 6000
    assert library_lines == []


def test_short_captions_get_no_line(tiny_sd3: Path) -> None:
    encoders = load_encoders(tiny_sd3, 20)
    assert describe_truncation([("a.json", "a cat"), ("b.json", "\u4e09")], encoders) == ""
    text = "a photo of the digit three on a white background with one cat and two dogs and a red car in the rain"
    line = describe_truncation(
        [("a.json", "a cat"), ("b.json", text), ("c.json", "a photo of the digit " * 3)], encoders
    )
    assert re.fullmatch(
        r"1 of 3 captions are longer than 20 tokens \(T5\), 2 than 16 \(CLIP\); what is beyond is cut off; "
        r"longest: b\.json, \d+ tokens",
        line,
    )


def test_of_very_many_long_captions_the_first_are_counted(tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_rl.data.text_lengths._MOST_COUNTED", 3)
    encoders = [encoder for encoder in load_encoders(tiny_sd3, 20) if encoder.name == "T5"]
    texts = [(f"{i}.json", LONG) for i in range(3)]
    assert describe_truncation(texts, encoders).startswith("3 of 3 captions are longer than 20 tokens (T5); ")
    assert describe_truncation([*texts, ("x", LONG)], encoders).startswith(
        "at least 3 of 4 captions are longer than 20 tokens"
    )


def test_a_data_set_that_hides_its_captions_is_warned_of_when_they_come(
    write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str], library_lines: list[str]
) -> None:
    import torch

    data = [{"visual": torch.zeros(3, 32, 32), "prompt": LONG} for _ in range(8)]
    train(write_toml(), "--train.max_num_steps=2", dataset=data)
    assert (
        capsys.readouterr().out.count("1 of 1 prompts (so far) are longer than 16 tokens (T5), 1 than 16 (CLIP)") == 1
    )
    assert library_lines == []


class Stubborn:
    """A tokenizer that fails for one text."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, text: Any, *rest: Any, **keywords: Any) -> Any:
        if any("fails" in one for one in ([text] if isinstance(text, str) else text)):
            raise OverflowError("too odd")
        return self.inner(text, *rest, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def stubborn(use_model: Callable[[type], type]) -> None:
    @use_model
    class WithStubborn(SD3Model):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self.pipeline.tokenizer_3 = Stubborn(self.pipeline.tokenizer_3)
            self.tokenizers[2] = self.pipeline.tokenizer_3


@pytest.mark.usefixtures("stubborn")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_caption_that_a_tokenizer_refuses_is_one_bad_sample(
    tmp_path: Path, write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str], num_workers: int
) -> None:
    folder = folder_with(tmp_path / "some", {**{f"{i}": "a cat" for i in range(7)}, "x": "it fails"})
    options = [
        f"--train.train_policy.dataset.local_dir={folder}",
        f"--validation.dataset.local_dir={folder}",
        "--validation.enable=true",
        "--validation.val_before_train=true",
        f"--train.train_policy.dataloader_num_workers={num_workers}",
    ]
    if num_workers:
        options = [options[0], options[-1]]
    train(write_toml(), "--train.max_num_steps=4", *options)
    why = "caption of x: the tokenizer of Stubborn cannot read it (OverflowError: too odd)"
    assert capsys.readouterr().out.count(why) == (1 if num_workers else 2)  # training, validation


@pytest.mark.usefixtures("stubborn")
def test_a_prompt_that_a_tokenizer_refuses_is_named(tmp_path: Path, write_nft_toml: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"prompt 'it fails': the tokenizer of .* cannot read it \(OverflowError"):
        train(write_nft_toml(), dataset=["it fails", "a cat"])
