"""A frozen base in host memory, of which a block at a time is on the device."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.check import advice, estimate, out_of_memory
from cosmos_rl.policy.config import ConfigError, load_config
from cosmos_rl.policy.config.model_rules import find_block
from cosmos_rl.policy.model.base_offload import find_resting
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.model.quantised import is_packed, map_leaves, pack
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.checks import sizes
from tests.support.exports import noise_for
from tests.support.family_runs import PARAMS, TrainedFamily, family_toml, folder_of
from tests.support.nft_runs import Job, run_forked
from tests.support.trainer_runs import train

RECOMPUTE, OFFLOAD = "--policy.model_gradient_checkpointing=true", "--train.base_offload=true"
FORMS = [f"--policy.lora.quantize_base={form}" for form in ("none", "int8", "nf4")]
Toml = Callable[..., Path]


def load(path: Path, *options: str) -> Any:
    """A model whose weights have allocations of their own: in a mapped file the address, by which kernels round, may be
    any."""
    config = load_config(path, [RECOMPUTE, *options])
    model = build_model(config, Context(torch.device("cpu")), rest_on_cpu=False)
    for denoiser in model.denoisers.values():
        for param in denoiser.parameters():
            param.data = map_leaves(param.detach(), Tensor.clone)
    return model


def list_frozen(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(block, tensor) of all that frozen weights of blocks consist of."""
    for name, denoiser in model.denoisers.items():
        for weight, value in denoiser.named_parameters():
            block = find_block(weight)
            if block is not None and ".lora_" not in weight:
                leaves: list[Tensor] = []
                map_leaves(value.detach(), lambda leaf: leaves.append(leaf) or leaf)  # noqa: B023 - called at once
                yield from ((f"{name}.{block}", leaf) for leaf in leaves)


class HostMemory(TorchDispatchMode):
    """Nothing computes with what is in host memory; it is copied, and the copies are counted while they live."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._host = {leaf.untyped_storage().data_ptr(): block for block, leaf in list_frozen(model)}
        self._copies: list[tuple[str, StorageWeakRef]] = []
        self.most, self.fetched = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for given in tree.tree_leaves((args, kwargs)):
            block = self._find(given)
            if block is None or func is torch.ops.aten.detach.default:
                continue
            assert func is torch.ops.aten._to_copy.default, (block, func)
            self._copies.append((block, StorageWeakRef(out.untyped_storage())))
            if self.fetched[-1:] != [block]:
                self.fetched.append(block)
        self.most = max(self.most, len(self.living))
        return out

    def _find(self, given: Any) -> str | None:
        if not isinstance(given, Tensor) or given.is_meta or type(given) not in (Tensor, torch.nn.Parameter):
            return None
        return self._host.get(given.untyped_storage().data_ptr())

    @property
    def living(self) -> set[str]:
        """Blocks of which something is on the device."""
        self._copies = [(block, copy) for block, copy in self._copies if not copy.expired()]
        return {block for block, _ in self._copies}


def learn(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Velocities of both experts, where there are two, and the gradients of a loss of them."""
    cond = model.encode_prompts(["a cat"])
    total, found = torch.zeros(()), []
    for timestep in (990.0, 100.0):
        level = Level(torch.tensor([timestep]), torch.tensor([timestep / 1000]))
        found.append(model.velocity(model.pack_noise(noise_for(model)), level, cond))
        total = total + found[-1].square().sum()
    total.backward()
    gradients = {name: weight.grad for name, weight in model.trainable_parameters().items()}
    return torch.cat(found).detach(), {name: value for name, value in gradients.items() if value is not None}


def compare(path: Path, *options: str) -> HostMemory:
    """The same bits with the base in host memory, and what was where."""
    expected = learn(load(path, *options))
    model = load(path, *options, OFFLOAD)
    with HostMemory(model) as memory:
        found = learn(model)
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys() != set()
    assert all(torch.equal(found[1][name], right) for name, right in expected[1].items())
    assert memory.living == set()
    return memory


DEPTHS = ("num_layers", "num_single_layers", "n_layers", "num_mmdit_layers", "num_single_dit_layers")


def deepen(folder: Path, out: Path, *, layers: int = 5) -> Path:
    """The pipeline of a folder with more blocks in each denoiser, with drawn weights."""
    shutil.copytree(folder, out)
    for part in out.glob("transformer*"):
        kind = getattr(diffusers, json.loads((part / "config.json").read_text())["_class_name"])
        config = kind.load_config(part)
        numbers = {key: layers for key in config if key in DEPTHS}
        torch.manual_seed(3)
        kind.from_config({**config, **numbers}).save_pretrained(part)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_a_block_at_a_time_is_on_the_device_and_all_bits_are_the_same(
    write_toml: Toml, tiny_sd3: Path, tmp_path: Path, form: str
) -> None:
    deep = deepen(tiny_sd3, tmp_path / "deep")
    memory = compare(write_toml(), form, f'--policy.model_name_or_path="{deep}"')
    assert len(set(memory.fetched)) == 5
    assert memory.most == 1
    forward = [f"transformer.transformer_blocks.{number}" for number in range(5)]
    assert memory.fetched == [*forward, *forward, *forward[3::-1], *forward[::-1]]  # passes of two losses


def weights_of(run: Path, step: int = 2) -> dict[str, Tensor]:
    return load_file(run / "safetensors" / f"step_{step}" / "lora" / "model.safetensors")


def train_with_and_without(path: Path, *options: str) -> None:
    """Two steps end with the same adapter, average and checkpoint; what is compared has moved."""
    options = (RECOMPUTE, "--train.max_num_steps=2", *options)
    expected, found = train(path, *options), train(path, *options, OFFLOAD)
    right, ours = weights_of(expected), weights_of(found)
    assert right.keys() == ours.keys()
    assert all(torch.equal(ours[name], value) for name, value in right.items())
    assert any(float(value.abs().max()) > 0 for name, value in right.items() if "lora_B" in name)
    losses = [
        [line.get("train/loss_mean") for line in read_metrics(run / "metrics.jsonl")] for run in (expected, found)
    ]
    assert losses[0] == losses[1]


BF16 = "--train.param_dtype=bfloat16"  # in the type of the files a weight may have any address in a mapped one


@pytest.mark.parametrize(
    "options",
    [
        (BF16, "--train.ema_enable=true"),
        (FORMS[2], BF16, "--train.activation_offload=true", "--train.train_policy.cache.text=true"),
    ],
    ids=["plain", "with the other offloads"],
)
def test_fine_tuning_learns_the_same_bits(write_toml: Toml, options: tuple[str, ...]) -> None:
    train_with_and_without(write_toml(), *options)


def test_reinforcement_learning_learns_the_same_bits(write_nft_toml: Toml) -> None:
    train_with_and_without(write_nft_toml(), BF16, "--train.train_policy.kl_beta=0.1")


def test_a_run_is_resumed_with_the_base_in_host_memory(write_toml: Toml) -> None:
    options = (RECOMPUTE, BF16, "--train.max_num_steps=2", "--train.ckpt.save_freq=1")
    run = train(write_toml(), *options)
    again = train(write_toml(), *options, OFFLOAD, resume=(run, 1))
    expected, found = weights_of(run), weights_of(again)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_weights_have_their_names_and_values_at_rest(write_toml: Toml) -> None:
    plain, offloaded = load(write_toml()), load(write_toml(), OFFLOAD)
    expected, found = plain.transformer.state_dict(), offloaded.transformer.state_dict()
    learn(offloaded)
    after = offloaded.transformer.state_dict()
    assert list(expected) == list(found) == list(after)
    assert all(torch.equal(value, found[name]) and torch.equal(value, after[name]) for name, value in expected.items())


def test_the_rest_of_a_denoiser_moves_and_its_base_does_not(write_toml: Toml) -> None:
    """On a device without values: a base that came along would have lost them."""
    model = load(write_toml(), OFFLOAD)
    place, denoiser = model._placement, model.transformer
    place.device, place._present = torch.device("meta"), set()
    place.bring(denoiser)
    resting = [leaf for _, leaf in list_frozen(model)]
    assert resting
    assert not any(leaf.is_meta for leaf in resting)
    others = [p for name, p in denoiser.named_parameters() if ".lora_" in name or find_block(name) is None]
    assert others
    assert all(p.is_meta for p in others)


def test_a_packed_weight_keeps_its_form_on_another_device(write_toml: Toml) -> None:
    for form in ("int8", "nf4"):
        moved = map_leaves(pack(torch.randn(64, 128), form), lambda leaf: leaf.to("meta"))
        assert is_packed(moved)
        assert moved.device == torch.device("meta")


@pytest.mark.parametrize("form", FORMS)
def test_the_estimate_counts_two_blocks_and_what_is_in_none(write_toml: Toml, form: str) -> None:
    path = write_toml()
    blocks = Counter[str]()
    model = load(path, form, OFFLOAD)
    for block, leaf in list_frozen(model):
        blocks[block] += leaf.nbytes
    outside = [p for name, p in model.transformer.named_parameters() if ".lora_" not in name and not find_block(name)]
    tables = model.transformer.pos_embed.pos_embed.nbytes  # a buffer, in the files too
    config, files = sizes(path, RECOMPUTE, form, OFFLOAD)
    found = estimate.memory(config, files, on_cpu=False, saves=1)
    expected = sum(p.nbytes for p in outside) + tables + sum(sorted(blocks.values())[-2:])
    assert found.parts[estimate.FROZEN] == expected
    here = estimate.memory(config, files, on_cpu=True, saves=1)
    assert here.parts[estimate.FROZEN] == expected + sum(blocks.values())
    without = estimate.memory(load_config(path, [RECOMPUTE, form]), files, on_cpu=False, saves=1)
    assert sum(blocks.values()) <= found.host - without.host < 2 * sum(blocks.values())  # powers of two


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "train.base_offload: found true without [policy.lora]"),
        (("--policy.lora.r=4", "--policy.model_gradient_checkpointing=false"), "policy.model_gradient_checkpointing"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(write_toml: Toml, options: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_toml(lora=False), [OFFLOAD, *options])
    assert "train.base_offload: found true" in str(caught.value)
    assert named in str(caught.value)


def test_a_model_without_blocks_or_checkpointing_is_refused() -> None:
    class Plain(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            setattr(self, name, torch.nn.ModuleList([torch.nn.Linear(2, 2)]))

    for name, said in (("parts", "none of whose weights"), ("blocks", "does not support gradient checkpointing")):
        with pytest.raises(UserError, match=f"train.base_offload: found true; allowed: false with Plain, .*{said}"):
            find_resting(Plain(name))


def test_a_base_that_is_the_largest_part_is_answered_with_the_key(write_toml: Toml) -> None:
    small = "--policy.diffusers.inference_size=[8, 8]"
    for form, said in (
        (FORMS[0], 'quantize_base = "int8", train.base_offload = true, or more GPUs'),
        (FORMS[2], "what lowers it: train.base_offload = true"),
    ):
        config, files = sizes(write_toml(), form, small, BF16)
        memory = estimate.memory(config, files, on_cpu=False, saves=1)
        memory = replace(memory, at_peak={estimate.FROZEN: memory.peak})
        assert said in [*advice.peak_lines(config, memory, memory.peak - 1)][1]
        assert "train.base_offload = true" in out_of_memory.explain(config, "training", on_cpu=False)
    offloaded, _ = sizes(write_toml(), OFFLOAD)
    assert "train.base_offload" not in out_of_memory.explain(offloaded, "training", on_cpu=False)


@pytest.mark.zoo
@pytest.mark.parametrize("family", [pytest.param(*one.values, id=one.id) for one in PARAMS if one.id != "sd3"])
def test_of_no_family_more_than_two_blocks_are_on_the_device(family: TrainedFamily, tmp_path: Path) -> None:
    path = family_toml(tmp_path, family, job="nft")
    deep = deepen(folder_of(family.name), tmp_path / "deep")
    memory = compare(path, f'--policy.model_name_or_path="{deep}"')
    assert len(set(memory.fetched)) >= 5
    assert memory.most <= 2
    assert {name.split(".")[0] for name in memory.fetched} == set(family.experts)


@pytest.mark.zoo
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("name", ["wan", "wan2.2"])
def test_a_packed_base_of_videos_has_the_same_bits_too(name: str, form: str, tmp_path: Path) -> None:
    [family] = [found for param in PARAMS for found in param.values if param.id == name]
    assert isinstance(family, TrainedFamily)
    assert compare(family_toml(tmp_path, family, job="nft"), form).most == 1


@pytest.mark.zoo
def test_preferences_and_two_experts_are_learnt_with_the_same_bits(
    write_toml: Toml, image_folder: Path, tmp_path: Path
) -> None:
    rejected = tmp_path / "rejected"
    rejected.mkdir()
    for number, path in enumerate(sorted(image_folder.glob("*.png"))):
        Image.new("RGB", (48, 40), (20 * number, 60, 120)).save(rejected / path.name)
    kind = ("--train.train_policy.type=dpo", f"--train.train_policy.dataset.rejected_dir={rejected}")
    train_with_and_without(write_toml(), BF16, *kind)
    experts = TrainedFamily("wan2.2", frames=("num_frames", 5), experts=("transformer", "transformer_2"))
    train_with_and_without(family_toml(tmp_path, experts, job="nft"), BF16)


@pytest.mark.zoo
@pytest.mark.process
@pytest.mark.parametrize("split", ["dp_shard_size=2", "dp_replicate_size=2", "cp_size=2"])
def test_two_ranks_hold_the_whole_base_in_host_memory_and_have_the_numbers_of_the_plain_one(
    write_nft_toml: Toml, tmp_path: Path, split: str
) -> None:
    forms = {"dp_shard_size=2": FORMS[0], "dp_replicate_size=2": FORMS[1], "cp_size=2": FORMS[0]}
    common = (RECOMPUTE, forms[split], f"--policy.parallelism.{split}", "--train.max_num_steps=2")
    jobs = [
        Job(write_nft_toml(name=f"{name}.toml"), tmp_path / name, (*common, f"--train.base_offload={name}"))
        for name in ("false", "true")
    ]
    run_forked(jobs, 2, tmp_path)
    plain, offloaded = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("false", "true"))
    assert len(plain) == len(offloaded) == 2
    for a, b in zip(plain, offloaded, strict=True):
        for key in ("train/loss_mean", "optim/grad_norm", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
