"""The cache of text features for driven pipelines: the same run, without the encoders."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save
from torch import Tensor
from torch.utils import _pytree as tree

from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.driver.conditions import RAGGED, DrivenCond, MediaCond, concat_all
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding
from cosmos_rl.policy.trainer.rl.build import build_online
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.family_runs import ORDINARY, PARAMS, Clips, TrainedFamily, family_toml
from tests.support.pairs import marked_folder
from tests.support.trainer_runs import bundled_data, train

CACHE = "--train.train_policy.cache.text=true"


def nested(rows: int) -> DrivenCond:
    """Conditions of every form that pipelines return."""
    draw = torch.Generator().manual_seed(rows)
    first = (torch.rand(rows, 3, 2, generator=draw).bfloat16(), None, [torch.ones(rows, dtype=torch.bool)])
    ragged = [torch.rand(row + 1, 2, generator=draw) for row in range(rows)]
    shared = torch.arange(4).reshape(2, 2)
    second = [ragged, shared, {"a": 1}["a"], "text", torch.rand(2, rows, generator=draw)]
    return DrivenCond([first, second], [[0, None, [0]], [RAGGED, None, None, None, 1]], rows, guided=True)


def same(a: DrivenCond, b: DrivenCond) -> bool:
    left, form = tree.tree_flatten(a.values)
    right, other = tree.tree_flatten(b.values)
    bits = all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(left, right, strict=True))
    return bits and form == other and (a.axes, a.size, a.guided) == (b.axes, b.size, b.guided)


@pytest.mark.parametrize("rows", [1, 3])
def test_conditions_come_back_from_plain_tensors(rows: int) -> None:
    cond = nested(rows)
    again = DrivenCond.from_tensors(load(save({k: v.contiguous() for k, v in cond.to_tensors().items()})))
    assert same(again, cond)
    assert same(again.rows(torch.tensor([0])), cond.rows(torch.tensor([0])))


def test_what_media_were_made_into_comes_back_from_plain_tensors() -> None:
    draw = torch.Generator().manual_seed(0)
    state, image = torch.rand(1, 2, 3, generator=draw), torch.rand(1, 4, generator=draw).bfloat16()
    inputs = {"off": {"[1]['image']": image.unsqueeze(0)}, "on": {}}
    media = MediaCond((None, state, 7), (True, False, True), {"encode_image": [image, (image, None)]}, inputs, (1,))
    again = MediaCond.from_tensors(load(save({k: v.clone() for k, v in media.to_tensors().items()})))
    pairs = [(media.prepared, again.prepared), (media.encoded, again.encoded), (media.inputs, again.inputs)]
    for ours, theirs in pairs:
        left, form = tree.tree_flatten(ours)
        right, other = tree.tree_flatten(theirs)
        assert form == other
        assert all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(left, right, strict=True))
    assert (again.shared, again.kinds) == (media.shared, media.kinds)


def test_rows_are_joined_in_their_order_and_other_lengths_are_noticed() -> None:
    cond = nested(5)
    rows = [cond.rows(torch.tensor([row])) for row in range(5)]
    joined = concat_all(rows)
    assert joined is not None
    assert same(joined, cond)
    longer = DrivenCond([torch.zeros(1, 4)], [0], 1, guided=False)
    assert concat_all([DrivenCond([torch.zeros(1, 3)], [0], 1, guided=False), longer]) is None


def count_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that goes to an encoder from now on, but for the empty one, which a start asks for."""
    texts: list[str] = []
    stock = Driver._run_encoder

    def run(self: Driver, prompts: list[str], negatives: list[str] | None, guidance: float | None) -> list[object]:
        texts.extend(text for text in prompts if text)
        return stock(self, prompts, negatives, guidance)

    monkeypatch.setattr(Driver, "_run_encoder", run)
    return texts


def result(run: Path) -> tuple[list[float], dict[str, Tensor]]:
    losses = [line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl") if "train/loss_mean" in line]
    return losses, load_file(next(run.glob("safetensors/step_3/**/*.safetensors")))


def data(family: TrainedFamily) -> dict[str, Any]:
    return {} if family.frames is None else {"dataset": Clips(family.frames[1])}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        one if one.id in ("sana", "sd3", "wan") else pytest.param(*one.values, id=one.id, marks=pytest.mark.zoo)
        for one in PARAMS
    ],
)
def test_a_run_with_the_cache_is_the_one_without_and_needs_no_encoder(
    family: TrainedFamily, tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = family_toml(tmp_path, family, job="sft", images=image_folder)
    plain = result(train(path, **data(family)))
    folder = f'--train.train_policy.cache.dir="{tmp_path / "cache"}"'
    filled = result(train(path, CACHE, folder, **data(family)))
    texts = count_texts(monkeypatch)
    cached = result(train(path, CACHE, folder, **data(family)))
    assert texts == []
    assert cached[0] == filled[0]
    assert all(torch.equal(weights, filled[1][name]) for name, weights in cached[1].items())
    # the last bits of an encoder depend, on some processors, on how many texts a call has
    assert cached[0] == pytest.approx(plain[0], rel=1e-5)
    assert cached[1].keys() == filled[1].keys() == plain[1].keys()
    for name, weights in cached[1].items():
        torch.testing.assert_close(weights, plain[1][name], rtol=1e-4, atol=1e-5)


def test_prompts_of_other_lengths_are_encoded_together_as_without_a_cache(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = TrainedFamily("cogview4")  # pads to the longest prompt of a batch
    config = load_config(family_toml(tmp_path, family, job="sft", images=image_folder), [CACHE])
    model = build_model(config, Context(torch.device("cpu")), rest_on_cpu=True)
    assert isinstance(model, DrivenModel)
    prompts = ["a cat", "two birds " * 12, "a cat"]
    without = model.encode_prompts(prompts)
    assert same(Encoding(model, config).conditions(prompts), without)
    texts = count_texts(monkeypatch)
    assert same(Encoding(model, config).conditions(prompts), without)
    assert texts == []
    guided = Encoding(model, config).conditions(prompts, ["", "blurred", ""])
    assert same(guided, model.encode_prompts(prompts, ["", "blurred", ""]))


def test_what_an_encoding_depends_on_is_in_its_key(tmp_path: Path, image_folder: Path) -> None:
    path = family_toml(tmp_path, ORDINARY[0], job="sft", images=image_folder)
    spaces = set()
    for options in ([], ["--policy.diffusers.max_prompt_length=32"], ["--train.param_dtype=bfloat16"]):
        config = load_config(path, [CACHE, *options])
        model = build_model(config, Context(torch.device("cpu")), rest_on_cpu=True)
        spaces.add(Encoding(model, config)._describe_encoders())
    assert len(spaces) == 3


def count_encoder_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of the model's encoders gets, from now on."""
    calls: list[int] = []
    stock = SD3Model.encode_prompts

    def encode(self: SD3Model, prompts: list[str], *args: Any, **options: Any) -> object:
        calls.append(len(prompts))
        return stock(self, prompts, *args, **options)

    monkeypatch.setattr(SD3Model, "encode_prompts", encode)
    return calls


def test_all_texts_are_encoded_before_the_first_step(
    write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_encoder_calls(monkeypatch)
    train(write_toml(), CACHE, "--train.max_num_steps=2")
    assert calls == [8]


def test_the_prompts_of_a_run_are_encoded_before_its_first_step(
    write_nft_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_encoder_calls(monkeypatch)
    train(write_nft_toml(), CACHE)
    assert calls == [8]


SIZES = [(32, 32), (64, 32)]


def sizes_of_texts(
    path: Path, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *options: str
) -> list[tuple[tuple[int, int], str]]:
    """(size, text) of every text that is encoded before the first step, where pictures have one of two sizes."""
    found: list[tuple[tuple[int, int], str]] = []
    stock = Driver._run_encoder

    def run(self: Driver, prompts: list[str], negatives: list[str] | None, guidance: float | None) -> list[object]:
        found.extend(((self.size.height, self.size.width), text) for text in prompts if text)
        return stock(self, prompts, negatives, guidance)

    monkeypatch.setattr(Driver, "_run_encoder", run)
    config = load_config(path, [CACHE, "--policy.diffusers.buckets={sizes = [[32, 32], [64, 32]]}", *options])
    build(config, Context(torch.device("cpu")), **bundled_data(config))
    return sorted(found)


def test_captions_are_encoded_at_the_sizes_of_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = marked_folder(tmp_path / "pictures", [SIZES[number % 2] for number in range(8)])
    path = family_toml(tmp_path, ORDINARY[0], job="sft", images=folder)
    expected = sorted((SIZES[number % 2], f"picture {number}") for number in range(8))
    assert sizes_of_texts(path, build_sft, monkeypatch) == expected


@pytest.mark.parametrize(("named", "guard"), [(True, False), (True, True), (False, True)])
def test_prompts_are_encoded_at_the_sizes_that_they_name_or_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, guard: bool
) -> None:
    path = family_toml(tmp_path, ORDINARY[0], job="nft")
    rows = [{"prompt": f"text {number}", **({"size": SIZES[number % 2]} if named else {})} for number in range(4)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    path.write_text(re.sub(r'dataset\.local_dir = ".*"', f'dataset.local_dir = "{data}"', path.read_text()))
    wanted = [(size, f"text {number}") for number in range(4) for size in SIZES]
    if named:
        wanted = [(SIZES[number % 2], f"text {number}") for number in range(4)]
    if named and guard:  # its samples have the configured size
        wanted += [(SIZES[0], f"text {number}") for number in (1, 3)]
    option = f"--train.train_policy.reward_hacking_guard.enable={str(guard).lower()}"
    assert sizes_of_texts(path, build_online, monkeypatch, option) == sorted(wanted)


def test_texts_that_do_not_fit_into_the_cache_are_left_out_with_a_warning(
    write_toml: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = f'--train.train_policy.cache.dir="{tmp_path / "cache"}"'
    config = load_config(write_toml(), [CACHE, folder, "--train.train_policy.cache.max_gb=1e-9"])
    context = Context(torch.device("cpu"))
    encoding = Encoding(build_model(config, context, rest_on_cpu=True), config)
    calls = count_encoder_calls(monkeypatch)
    encoding.keep_texts({None: [(f"text {i}", None) for i in range(20)]}, context)
    assert calls == [8]
    assert "train.train_policy.cache.max_gb: too little for all texts" in caplog.text
