"""A pipeline with two denoisers, one for high and one for low noise: which is trained, and what an export holds."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.selection import select
from cosmos_rl.launcher.pipeline_files import read_pipeline
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.model.quiet import load_adapter
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model, prepare_export
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.family_runs import TEXTS, Clips, TrainedFamily, family_toml, folder_of, stock_pipeline
from tests.support.nft_runs import Job, nft_train, run_forked
from tests.support.ranks import train_on_ranks
from tests.support.trainer_runs import train

pytestmark = pytest.mark.zoo
WAN = TrainedFamily("wan2.2", frames=("num_frames", 5), experts=("transformer", "transformer_2"))
NAMES = {"all": ["transformer", "transformer_2"], "transformer": ["transformer"], "transformer_2": ["transformer_2"]}


def build(folder: Path, trained: str, *, lora: bool, family: TrainedFamily = WAN) -> DrivenModel:
    options = [f'--policy.diffusers.trained_denoiser="{trained}"']
    config = load_config(family_toml(folder, family, job="nft", lora=lora), options)
    model = build_model(config, Context(torch.device("cpu")), rest_on_cpu=False)
    assert isinstance(model, DrivenModel)
    return model


def velocities(model: DrivenModel, sigmas: list[float]) -> Tensor:
    cond, sigma = model.encode_prompts(TEXTS[: len(sigmas)]), torch.tensor(sigmas)
    shape = len(sigmas), *model.latent_shape(32, 32)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return model.velocity(model.start_state(noise), model.training_level(sigma), cond)


def gradients(model: DrivenModel, sigmas: list[float]) -> dict[str, Tensor]:
    params = model.trainable_parameters()
    for param in params.values():
        param.grad = None
    velocities(model, sigmas).square().sum().backward()
    return {name: param.grad.clone() for name, param in params.items() if param.grad is not None}


def test_a_batch_on_both_sides_of_the_boundary_trains_both(tmp_path: Path) -> None:
    model = build(tmp_path, "all", lora=True)
    high, low, both = (gradients(model, sigmas) for sigmas in ([0.95, 0.9], [0.3, 0.1], [0.95, 0.3]))
    assert {name.split(".")[0] for name in high} == {"transformer"}
    assert {name.split(".")[0] for name in low} == {"transformer_2"}
    assert both.keys() == high.keys() | low.keys() == model.trainable_parameters().keys()
    with torch.no_grad():
        together, ends = (
            velocities(model, [0.95, 0.3]),
            [velocities(model, [s, s])[i] for i, s in enumerate([0.95, 0.3])],
        )
    torch.testing.assert_close(together, torch.stack(ends), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("trained", NAMES)
def test_only_the_named_ones_are_trained_and_exported(tmp_path: Path, trained: str, lora: bool) -> None:
    model = build(tmp_path, trained, lora=lora)
    params = model.trainable_parameters()
    names = {name.split(".")[0] for name in params if name.startswith("transformer")}
    assert sorted(names or {"transformer"}) == NAMES[trained]
    # what a check says before anything is loaded
    options = [f'--policy.diffusers.trained_denoiser="{trained}"']
    config = load_config(family_toml(tmp_path, WAN, job="nft", lora=lora), options)
    selection = select(config, read_pipeline(config.policy))
    assert selection.trained == sum(param.numel() for param in params.values())
    denoisers = [model.pipeline.transformer, model.pipeline.transformer_2]
    numbers = [p.numel() for part in denoisers for name, p in part.named_parameters() if ".lora_" not in name]
    assert selection.frozen + (0 if lora else selection.trained) == sum(numbers)
    with torch.no_grad():
        for name, param in params.items():
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name))))
    export = tmp_path / "export"
    prepare_export(model)(export)
    changed = _load_export(export, lora)
    base = folder_of("wan2.2")
    for part in ("transformer", "transformer_2"):
        adapter = export / "lora" / ("" if part == "transformer" else part) / "model.safetensors"
        weights = f"{part}/diffusion_pytorch_model.safetensors"
        if lora:
            assert adapter.is_file() == (part in NAMES[trained])
        else:
            ours, theirs = load_file(export / weights), load_file(base / weights)
            assert any(not torch.equal(ours[name], theirs[name]) for name in ours) == (part in NAMES[trained])
    ours = model.sample(TEXTS[:1], _noise(model), num_steps=4, guidance=1.0)
    theirs, plain = (_media(pipeline) for pipeline in (changed, stock_pipeline(base)))
    assert (ours - theirs).abs().max() <= 1e-4
    assert (ours - plain).abs().max() > 1e-3
    if lora:
        again = stock_pipeline(base)
        load_adapter(again, export / "lora")
        assert torch.equal(_media(again), theirs)


@pytest.mark.process
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_frozen_expert_is_sharded_too(tmp_path: Path, lora: bool) -> None:
    config, option = family_toml(tmp_path, WAN, job="nft", lora=lora), "--policy.diffusers.trained_denoiser=transformer"
    held, found = {}, {}
    for ranks in (1, 2):
        folder = train_on_ranks(ranks, config, tmp_path / f"{ranks}", option, module="tests.support.expert_on_ranks")
        held[ranks] = [
            dict(re.findall(r"(transformer\w*) holds (\d+ bytes trained \w+)", (folder / f"rank_{k}.log").read_text()))
            for k in range(ranks)
        ]
        parts = [load_file(folder / f"rank_{k}.safetensors") for k in range(ranks)]
        norms = [float(part.pop("norm")) for part in parts]
        found[ranks] = ({name: value for part in parts for name, value in part.items()}, norms)
    (whole,), shards = held[1], held[2]
    for name, trained in (("transformer", "True"), ("transformer_2", "False")):
        total = int(whole[name].split()[0])
        sizes = [int(part[name].split()[0]) for part in shards]
        assert {part[name].split()[-1] for part in (whole, *shards)} == {trained}
        assert sum(sizes) == total
        assert max(sizes) < 0.6 * total, name
    (one, (norm,)), (two, norms) = found[1], found[2]
    assert one.keys() == two.keys()
    assert len(one) == 8
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)
    # the gradient is averaged over the ranks
    assert 4 * sum(norms) == pytest.approx(norm, rel=1e-3)
    assert norm > 0


@pytest.mark.process
@pytest.mark.parametrize("trained", ["all", "transformer"])
def test_two_ranks_train_as_one_does_where_each_forward_pass_needs_one_expert(tmp_path: Path, trained: str) -> None:
    config = family_toml(tmp_path, WAN, job="nft", lora=True)
    options = (f"--policy.diffusers.trained_denoiser={trained}", "--policy.diffusers.timesteps_fraction=1.0")
    options += ("--train.train_policy.mini_batch=1",)
    for ranks in (1, 2):
        run_forked([Job(config, tmp_path / f"{ranks}", options)], ranks, tmp_path)
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("1", "2"))
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        for key in ("train/loss_mean", "optim/grad_norm", "reward/mean"):
            assert a[key] == pytest.approx(b[key], rel=2e-3), key


@pytest.mark.parametrize("trained", ["transformer", "transformer_2"])
def test_fine_tuning_draws_only_levels_at_which_the_trained_expert_is_called(tmp_path: Path, trained: str) -> None:
    model, whole = build(tmp_path, trained, lora=True), build(tmp_path, "all", lora=True)
    assert whole.train_sampling_steps == 1000
    boundary = 0.875 * 1000  # the pipeline's boundary_ratio, in its scheduler's timesteps
    high = whole.timestep_map >= boundary
    expected = high if trained == "transformer" else ~high
    assert torch.equal(model.timestep_map, whole.timestep_map[expected])
    assert torch.equal(model.sigma_map, whole.sigma_map[expected])
    assert model.train_sampling_steps == int(expected.sum())
    noise = torch.ones(2, *model.latent_shape(32, 32))
    assert torch.equal(model.start_state(noise), whole.start_state(noise))


RESUMED = r"trained_denoiser\) = \['transformer'\], this run has \['transformer', 'transformer_2'\]"


def test_a_run_of_one_expert_is_not_resumed_as_one_of_both(tmp_path: Path) -> None:
    config = family_toml(tmp_path, WAN, job="nft")
    run = nft_train(config, '--policy.diffusers.trained_denoiser="transformer"', "--train.max_num_steps=1")
    with pytest.raises(UserError, match=RESUMED):
        nft_train(config, resume=(run, 1))


def test_fine_tuning_of_one_expert_is_not_resumed_as_that_of_both(tmp_path: Path, image_folder: Path) -> None:
    config, data = family_toml(tmp_path, WAN, job="sft", images=image_folder), Clips(5)
    run = train(config, '--policy.diffusers.trained_denoiser="transformer"', "--train.max_num_steps=1", dataset=data)
    with pytest.raises(UserError, match=RESUMED):
        train(config, resume=(run, 1), dataset=data)


def test_an_adapter_of_both_is_continued_from(tmp_path: Path) -> None:
    model = build(tmp_path, "all", lora=True)
    with torch.no_grad():
        for param in model.trainable_parameters().values():
            param.add_(0.05)
    prepare_export(model)(tmp_path / "export")
    config = load_config(family_toml(tmp_path, WAN, job="nft"), [f"--policy.lora.lora_path={tmp_path / 'export/lora'}"])
    again = build_model(config, Context(torch.device("cpu")), rest_on_cpu=False)
    ours, theirs = model.trainable_parameters(), again.trainable_parameters()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in ours.items())


def test_a_denoiser_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r'trained_denoiser = "transformer_2": .* has transformer; set it to one of them'
    ):
        build(tmp_path, "transformer_2", lora=True, family=TrainedFamily("wan", frames=("num_frames", 5)))


def _load_export(export: Path, lora: bool) -> Any:
    if not lora:
        return stock_pipeline(export)
    pipeline = stock_pipeline(folder_of("wan2.2"))
    if (export / "lora/model.safetensors").is_file():
        pipeline.load_lora_weights(export / "lora")
    if (export / "lora/transformer_2").is_dir():
        pipeline.load_lora_weights(export / "lora/transformer_2", load_into_transformer_2=True)
    return pipeline


def _noise(model: DrivenModel) -> Tensor:
    return torch.randn(1, *model.latent_shape(32, 32), generator=torch.Generator().manual_seed(11))


def _media(pipeline: Any) -> Tensor:
    arguments = {**WAN.call(TEXTS[:1], 1.0), "generator": [torch.Generator().manual_seed(11)]}
    with torch.no_grad():
        return pipeline(**arguments, output_type="pt", return_dict=False)[0].float()
