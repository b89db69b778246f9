"""Caches of latents and text: what is kept, what is evicted, and that training does not notice."""

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl.data.cache import TensorCache, digest_files
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding
from cosmos_rl.storage.cache_folder import place_tensors
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.trainer_runs import train

CACHED = ("--train.train_policy.cache.latents=true", "--train.train_policy.cache.text=true")


def losses(run: Path) -> list[float]:
    return [line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl")]


def test_training_with_caches_is_training_and_encodes_each_thing_once(
    write_toml: Callable[..., Path], use_model: Callable[[type], type], tmp_path: Path
) -> None:
    encoded: dict[str, list[object]] = {"images": [], "texts": []}

    @use_model
    class Counting(SD3Model):
        def visual_embedding(self, visual_list: list[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
            encoded["images"] += [image.numpy().tobytes() for image in visual_list]
            return super().visual_embedding(visual_list, *args, **kwargs)

        def text_embedding(self, prompt_list: list[str], *args: Any, **kwargs: Any) -> Any:
            encoded["texts"] += prompt_list
            return super().text_embedding(prompt_list, *args, **kwargs)

    plain = losses(train(write_toml()))
    encoded.update(images=[], texts=[])
    cached = train(write_toml(), *CACHED)
    assert losses(cached) == pytest.approx(plain, rel=1e-5)  # an encoder's last bits depend on its batch
    # 24 samples were trained on, 4 a step: 12 images and 4 texts are new, in batches that are filled up to 8
    assert {kind: len(set(things)) for kind, things in encoded.items()} == {"images": 12, "texts": 4}
    assert len(encoded["images"]) == 3 * 8
    assert {len(things) % 8 for things in encoded.values()} == {0}
    encoded.update(images=[], texts=[])
    assert losses(train(write_toml(), *CACHED)) == losses(cached)
    assert encoded == {"images": [], "texts": []}
    assert (tmp_path / "out" / "cache" / "latents").is_dir()


def test_an_image_is_decoded_only_where_its_latent_is_not_in_the_cache(
    write_toml: Callable[..., Path], tmp_path: Path, image_folder: Path
) -> None:
    folder = tmp_path / "images"
    shutil.copytree(image_folder, folder)
    options = (*CACHED, f'--train.train_policy.dataset.local_dir="{folder}"')
    first = losses(train(write_toml(), *options))
    for path in folder.glob("*.png"):  # no decoder reads them now, and nothing else shows it
        stat = path.stat()
        path.write_bytes(b"x" * stat.st_size)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert losses(train(write_toml(), *options)) == first
    os.utime(folder / "000.png")
    with pytest.raises(UserError, match=r"000\.png: cannot be read as an image"):
        train(write_toml(), *options, "--train.train_policy.max_skipped_frac=0")


def test_other_sizes_lengths_and_weights_are_other_entries(
    write_toml: Callable[..., Path], tmp_path: Path, tiny_sd3: Path
) -> None:
    folder = f'--train.train_policy.cache.dir="{tmp_path / "shared"}"'
    train(write_toml(), *CACHED, folder, "--train.max_num_steps=1")
    train(write_toml(), *CACHED, folder, "--train.max_num_steps=1", "--policy.diffusers.inference_size=[16, 16]")
    train(write_toml(), *CACHED, folder, "--train.max_num_steps=1", "--policy.diffusers.max_prompt_length=12")
    assert len(list((tmp_path / "shared" / "latents").iterdir())) == 2
    assert len(list((tmp_path / "shared" / "text").iterdir())) == 2
    assert digest_files(tiny_sd3 / "vae") != digest_files(tiny_sd3 / "transformer")


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"/file: the cache cannot be made there \(Not a directory\); name another"):
        TensorCache(tmp_path / "file", "latents", "about", 1000)


def test_the_place_of_the_cache_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COSMOS_CACHE", raising=False)
    key, _, folder, advice = place_tensors(None, "out")
    assert (key, folder) == ("train.output_dir", Path("out/cache"))
    assert advice.startswith("choose another train.output_dir")
    assert place_tensors("mine", "out").advice.endswith("leave it out: then it is in train.output_dir")
    monkeypatch.setenv("COSMOS_CACHE", "shared")
    key, _, folder, advice = place_tensors(None, "out")
    assert (key, folder) == ("COSMOS_CACHE", Path("shared"))
    assert advice.endswith("unset it: then it is in train.output_dir")
    key, _, folder, advice = place_tensors("mine", "out")
    assert (key, folder) == ("train.train_policy.cache.dir", Path("mine"))
    assert advice.endswith("leave it out: then it is $COSMOS_CACHE, shared")


def test_what_was_not_used_for_longest_is_evicted(tmp_path: Path) -> None:
    bound = 18_500  # four entries of 4,000 bytes and a header fit below nine tenths of it, five do not
    cache = TensorCache(tmp_path, "latents", "about", bound)
    for number in range(4):
        cache.put(str(number), {"x": torch.full((1000,), float(number))})
        path = max(tmp_path.rglob("*.safetensors"), key=lambda p: p.stat().st_mtime_ns)
        used = time.time() - 100 + number
        os.utime(path, (used, used))
    fresh = TensorCache(tmp_path, "latents", "about", bound)
    assert fresh.get("0") is not None  # used now, so "1" is the oldest
    fresh.put("4", {"x": torch.zeros(1000)})
    again = TensorCache(tmp_path, "latents", "about", bound)
    assert [again.get(str(n)) is not None for n in range(5)] == [True, False, True, True, True]
    assert again.misses == 1


def test_a_broken_entry_is_computed_again(tmp_path: Path) -> None:
    TensorCache(tmp_path, "text", "about", 2**30).put("a", {"x": torch.ones(3)})
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:20])
    cache = TensorCache(tmp_path, "text", "about", 2**30)
    assert cache.get("a") is None
    cache.put("a", {"x": torch.ones(3)})
    found = TensorCache(tmp_path, "text", "about", 2**30).get("a")
    assert found is not None
    assert torch.equal(found["x"], torch.ones(3))


def test_a_resumed_run_with_caches_is_the_undisturbed_one(write_toml: Callable[..., Path]) -> None:
    options = (*CACHED, "--train.ckpt.save_freq=2", "--train.train_policy.caption_dropout=0.3")
    config = write_toml()
    calm = losses(train(config, *options, "--train.train_policy.cache.dir=none"))
    run = train(config, *options, "--train.max_num_steps=2")
    train(config, *options, resume=(run, 2))
    assert losses(run) == calm


def test_the_bits_do_not_depend_on_what_was_missing_at_the_same_time(
    write_toml: Callable[..., Path], tmp_path: Path, tiny_sd3: Path, image_folder: Path
) -> None:
    config = load_config(write_toml(), [*CACHED])
    model = SD3Model(config.policy.diffusers, model_str=str(tiny_sd3))
    pairs = LocalPairs(image_folder, 32, 32)
    items = [pairs[i] for i in range(12)]
    texts = [f"a photo of {i}" for i in range(12)]
    chance = random.Random(0)

    def encoding(number: int) -> Encoding:
        folder = f'--train.train_policy.cache.dir="{tmp_path / str(number)}"'
        return Encoding(model, load_config(write_toml(), [*CACHED, folder]))

    whole = encoding(0)
    latents, text = whole.latents(items), whole.conditions(texts).text
    for number in range(1, 9):  # filled in other orders and portions, as by other ranks or after a kill
        part, order = encoding(number), chance.sample(range(12), 12)
        while order:
            some, order = order[: (size := chance.randint(1, 5))], order[size:]
            part.latents([items[i] for i in some])
            part.conditions([texts[i] for i in some])
        assert torch.equal(encoding(number).latents(items), latents)
        found = encoding(number).conditions(texts).text
        assert all(torch.equal(found[name], text[name]) for name in text)


def test_an_entry_that_is_put_again_counts_once(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, "latents", "about", 30_000)
    for number in range(7):
        cache.put(str(number), {"x": torch.zeros(1000)})
    for _ in range(5):
        cache.put("0", {"x": torch.ones(1000)})  # at first counted each time, which drove others out
    assert len(list(tmp_path.rglob("*.safetensors"))) == 7
    assert cache._memory_bytes == 7 * 4000
    found = TensorCache(tmp_path, "latents", "about", 30_000).get("0")
    assert found is not None
    assert torch.equal(found["x"], torch.ones(1000))


def test_a_cache_that_only_answers_never_counts_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TensorCache(tmp_path, "latents", "about", 30_000).put("0", {"x": torch.zeros(10)})
    monkeypatch.delattr("cosmos_rl.data.cache.count_bytes")
    cache = TensorCache(tmp_path, "latents", "about", 30_000)
    assert cache.get("0") is not None
    assert cache.get("1") is None
