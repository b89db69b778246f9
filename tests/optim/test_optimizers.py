"""Optimisers by name and by class: their steps, their state through a stop, and the arguments that they take."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl.checkpoint.state import collect, restore
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.check.optimizer_state import gathered_for_a_step, optimizer_state, optimizer_state_of_rank
from cosmos_rl.optim.classes import Hyperparameters
from cosmos_rl.optim.optimizer import Optimizer
from cosmos_rl.optim.schedule import LrSchedule
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.load import dump_toml, load_config
from cosmos_rl.policy.config.optimizers import OPTIMIZERS
from tests.support.ranks import train_on_ranks
from tests.support.states import assert_same_state, drop_steps_after, saved_state, trace
from tests.support.trainer_runs import train

NAMES = [
    "AdamW",
    "Muon",
    "Adafactor",
    "AdamWScheduleFree",
    "Prodigy",
    "torch.optim.NAdam",
    "schedulefree.RAdamScheduleFree",
]


def build(params: dict[str, torch.nn.Parameter], name: str, rate: float = 0.01, **kwargs: object) -> Optimizer:
    settings = Hyperparameters(name, (0.9, 0.99), 1e-8, 0.1, "foreach", kwargs)
    schedule = LrSchedule.build(20, 2, None, "none", 0.0, 0.0)
    return Optimizer(params, settings=settings, lr=rate, schedule=schedule, max_grad_norm=0.0)


def weights() -> dict[str, torch.nn.Parameter]:
    """A matrix, one that starts at zero as the up matrices of adapters do, and a vector."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (3, 4), "b": (4, 3), "c": (5,)}
    params = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    with torch.no_grad():
        params["b"].zero_()
    return params


def descend(params: dict[str, torch.nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for name, param in params.items():
            param.grad = param.detach() - torch.cos(torch.arange(param.numel()) + step + len(name)).view(param.shape)
        optimizer.step(step)


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_and_a_new_start_change_no_bit(name: str, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    rate = 1.0 if name == "Prodigy" else 0.01
    calm = weights()
    undisturbed = build(calm, name, rate)
    descend(calm, undisturbed, range(9))
    stopped = weights()
    first = build(stopped, name, rate)
    descend(stopped, first, range(5))
    dcp.save(collect(stopped, first.torch_optimizer, {}), checkpoint_id=tmp_path, no_dist=True)
    counters = first.counters()
    resumed = weights()
    second = build(resumed, name, rate)
    restore(tmp_path, resumed, second.torch_optimizer, {})
    second.restore_counters(counters)
    descend(resumed, second, range(5, 9))
    for key, value in collect(calm, undisturbed.torch_optimizer, {}).items():
        assert torch.equal(value, collect(resumed, second.torch_optimizer, {})[key]), key
    assert second.counters() == undisturbed.counters()
    assert not torch.equal(calm["a"], stopped["a"])


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    params, alone = weights(), weights()
    ours = build(params, "Muon", momentum=0.9)
    muon = torch.optim.Muon([alone["a"], alone["b"]], weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([alone["c"]], betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(4):
        for name, param in alone.items():
            param.grad = param.detach() - torch.cos(torch.arange(param.numel()) + step + len(name)).view(param.shape)
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = ours.learning_rate(step)
        muon.step()
        adamw.step()
    descend(params, ours, range(4))
    for name in params:
        assert torch.equal(params[name], alone[name])
    assert ours.torch_optimizer.state[params["a"]].keys() == {"momentum_buffer"}


def test_schedule_free_weights_are_the_weighted_average_of_the_steps() -> None:
    """x_k = (1 - c_k) x_(k-1) + c_k z_k with c_k = 1/k and gradients at y = (1 - beta) z + beta x, at a constant rate
    (Defazio et al. 2024, arXiv:2405.15682, equations 1 to 3, with Adam's denominator)."""
    weight = torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    settings = Hyperparameters("AdamWScheduleFree", (0.9, 0.99), 1e-8, 0.0, "foreach", {})
    schedule = LrSchedule.build(20, 0, None, None, 0.0, 0.0)
    optimizer = Optimizer({"w": weight}, settings=settings, lr=0.1, schedule=schedule, max_grad_norm=0.0)
    x = z = torch.tensor([2.0, -1.0], dtype=torch.float64)
    square = torch.zeros(2, dtype=torch.float64)
    for step in range(6):
        y = 0.1 * z + 0.9 * x
        torch.testing.assert_close(weight.detach(), y)
        gradient = 3.0 * y
        weight.grad = 3.0 * weight.detach()
        optimizer.step(step)
        square = 0.99 * square + 0.01 * gradient**2
        z = z - 0.1 * gradient / ((square / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8)
        x = (1 - 1 / (step + 1)) * x + z / (step + 1)
    live = weight.detach().clone()
    with optimizer.average_parameters():
        torch.testing.assert_close(weight.detach(), x)
    assert torch.equal(weight.detach(), live)


def test_prodigy_finds_a_rate_and_the_metric_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    params = weights()
    optimizer = build(params, "Prodigy", 1.0)
    # the package prints how it decays weights
    assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith("[cosmos] ")] == []
    descend(params, optimizer, range(40))
    group = optimizer.torch_optimizer.param_groups[0]
    rate = optimizer.metrics()["optim/effective_learning_rate"]
    assert rate == group["d"] * group["lr"]
    assert rate > 1e-4  # it starts at 1e-6
    optimizer.forget_moments()
    assert group["d"] == 1e-6
    assert "optim/effective_learning_rate" not in build(weights(), "AdamW").metrics()


def test_prodigy_takes_single_numbers_and_weights_that_are_not_in_one_piece() -> None:
    """The sums, and so the steps, are those of the same numbers in a vector and in one piece."""
    generator = torch.Generator().manual_seed(2)
    matrix, number = torch.randn(3, 4, generator=generator), torch.randn((), generator=generator)
    found = []
    for transposed, shape in ((False, (1,)), (False, ()), (True, ())):
        whole = matrix.T.contiguous().T if transposed else matrix.clone()
        params = {"a": torch.nn.Parameter(whole), "b": torch.nn.Parameter(number.clone().view(shape))}
        assert params["a"].is_contiguous() is not transposed
        descend(params, build(params, "Prodigy", 1.0), range(12))
        found.append(torch.cat([params["a"].detach().reshape(-1), params["b"].detach().reshape(-1)]))
    assert not torch.equal(found[0][:12], matrix.reshape(-1))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=0.0)


def test_a_restart_is_at_the_full_rate_and_a_cycle_is_a_cosine() -> None:
    schedule = LrSchedule.build(32, 2, None, "cosine_with_restarts", 0.0, 0.1, num_cycles=3)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * (3 * done % 30) / 30)) / 2 for done in range(30)]
    assert [schedule.factor(step) for step in range(32)] == pytest.approx([0.0, 1.0, *expected], abs=1e-15)
    assert [schedule.factor(step) for step in (2, 12, 22)] == [1.0, 1.0, 1.0]
    assert schedule.factor(32) == pytest.approx(0.1)
    one = LrSchedule.build(32, 2, None, "cosine_with_restarts", 0.0, 0.1)
    cosine = LrSchedule.build(32, 2, None, "cosine", 0.0, 0.1)
    assert [one.factor(step) for step in range(34)] == [cosine.factor(step) for step in range(34)]


def test_restarts_are_those_of_transformers() -> None:
    from transformers.optimization import get_cosine_with_hard_restarts_schedule_with_warmup

    weight = torch.nn.Parameter(torch.zeros(1))
    stock = torch.optim.SGD([weight], lr=1.0)
    theirs = get_cosine_with_hard_restarts_schedule_with_warmup(stock, 0, 24, num_cycles=4)
    ours = LrSchedule.build(24, 0, None, "cosine_with_restarts", 0.0, 0.0, num_cycles=4)
    for step in range(24):
        assert ours.factor(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-7)
        stock.step()
        theirs.step()


@pytest.mark.parametrize(
    ("name", "kwargs"), [(name, {}) for name in (*OPTIMIZERS, "torch.optim.NAdam")] + [("Prodigy", {"slice_p": 11})]
)
def test_the_estimate_knows_what_each_keeps(name: str, kwargs: dict[str, Any]) -> None:
    if name.endswith("8bit"):
        pytest.importorskip("torchao")
        torch.compiler.set_stance("force_eager")
    shapes = [(64, 256), (48, 512), (24, 16, 2, 2), (300,)]
    params = {str(shape): torch.nn.Parameter(torch.ones(shape)) for shape in shapes}
    optimizer = build(params, name, **kwargs)
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step(5)
    torch.compiler.set_stance("default")
    kept = [
        value
        for key, value in collect(params, optimizer.torch_optimizer, {}).items()
        if key.startswith("optim.") and value.numel() > 1
    ]
    options = {"optm_name": name, "optm_kwargs": kwargs}
    expected = optimizer_state(Config.from_dict({"train": options}), shapes)
    assert sum(value.numel() * value.element_size() for value in kept) == expected


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("Prodigy", {"d_coeff": 1.0}, r"train\.optm_kwargs\.d_coeff: prodigyopt\.Prodigy has no such .*mean d_coef\?"),
        ("AdamW", {"lr": 1.0}, r"train\.optm_kwargs\.lr: is given by train\.optm_lr"),
        ("AdamW", {"weight_decay": 1.0}, r"is given by train\.optm_weight_decay"),
        ("AdamW8bit", {"block_size": 64}, "take no further arguments"),
        ("Prodigy", {"d0": -1.0}, r'train\.optm_kwargs: train\.optm_name = "Prodigy" refuses them: Invalid d0'),
        ("torch.optim.AdamX", {}, r'torch\.optim has no AdamX; did you mean "torch\.optim\.Adam'),
        ("torch.nn.Linear", {}, r"it is no torch\.optim\.Optimizer"),
        ("torchh.optim.NAdam", {}, r'optm_name: found "torchh\.optim\.NAdam"; there is no module torchh here; correct'),
        (
            "torch.optm.NAdam",
            {},
            r'optm_name: found "torch\.optm\.NAdam"; there is no module torch\.optm here;',
        ),
        ("torch.optim.LBFGS", {}, r'train\.optm_name: found "torch\.optim\.LBFGS"; its step computes the loss again'),
        ("torch.optim.LBFGS", {"history": 5}, r"LBFGS has no such argument; did you mean history_size\?"),
    ],
)
def test_wrong_arguments_and_classes_are_named(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(weights(), name, **kwargs)


def test_a_key_that_would_have_no_effect_is_named() -> None:
    changed = frozenset({"betas"})
    settings = Hyperparameters("Adafactor", (0.8, 0.9), 1e-6, 0.0, "fused", {}, changed)
    schedule = LrSchedule.build(20, 2, None, "none", 0.0, 0.0)
    with pytest.raises(
        UserError, match=r"train\.optm_betas: would have no effect, as torch\.optim\.Adafactor"
    ) as error:
        Optimizer(weights(), settings=settings, lr=0.1, schedule=schedule, max_grad_norm=0.0)
    assert "leave it out (--train.optm_betas=none)" in str(error.value)


@pytest.mark.parametrize(("size", "rate"), [(0.0, 0.01), (0.02, 0.01), (0.02, 0.6), (3.0, 1.0)])
def test_a_step_of_adafactor_is_a_share_of_the_size_of_the_weight(size: float, rate: float) -> None:
    draws = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.full((16, 8), size))
    optimizer = torch.optim.Adafactor([weight], lr=rate, weight_decay=0.0)
    for step in range(1, 6):
        before = weight.detach().clone()
        weight.grad = torch.randn(16, 8, generator=draws)
        optimizer.step()
        bound = max(1e-3, float(before.square().mean().sqrt())) * min(rate, step**-0.5)
        moved = float((weight.detach() - before).square().mean().sqrt())
        assert 0.5 * bound < moved <= bound * (1 + 1e-4)


def exported_weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / f"safetensors/step_{step}/transformer/diffusion_pytorch_model.safetensors")


@pytest.mark.slow
def test_a_schedule_free_run_exports_the_average_and_resumes_exactly(
    write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    from cosmos_rl.checkpoint.layout import policy_dir
    from cosmos_rl.policy.trainer.offline import export_checkpoint

    options = ('--train.optm_name="AdamWScheduleFree"', "--train.ckpt.save_freq=1", "--train.ckpt.max_keep=-1")
    options += ("--train.max_num_steps=4", "--train.optm_lr=1e-2", '--train.param_dtype="float32"')
    config = write_toml(lora=False)
    run = train(config, *options)
    state = saved_state(run, 4)
    exported = exported_weights(run, 4)
    far = 0.0
    for key, average in state.items():
        name = key.removeprefix("average.")
        if name != key:
            trained, z = state[f"model.{name}"], state[f"optim.{name}.z"]
            torch.testing.assert_close(average, trained + (1 - 1 / 0.9) * (z - trained))
            assert torch.equal(exported[name], average)
            far = max(far, float((average - trained).abs().max()))
    assert far > 1e-4
    (run / "config.toml").write_text(dump_toml(load_config(config, list(options))))
    [again] = export_checkpoint(policy_dir(run / "checkpoints", 4), tmp_path / "again")
    from safetensors.torch import load_file

    offline = load_file(again / "transformer/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(offline[name], value) for name, value in exported.items())
    drop_steps_after(run, 2)
    train(config, *options, resume=(run, 2))
    assert_same_state(saved_state(run, 4), state)


def test_the_means_of_adafactor_are_whole_on_each_rank_and_a_weight_at_a_time_is_gathered() -> None:
    shapes = [(30, 20), (20,), (6, 5)]
    found = {}
    for name in ("AdamW", "Adafactor"):
        config = Config.from_dict({"train": {"optm_name": name}})
        found[name] = [
            size(config, shapes, n) for n in (1, 2) for size in (optimizer_state_of_rank, gathered_for_a_step)
        ]
    assert found == {"AdamW": [8 * 650, 0, 4 * 650, 0], "Adafactor": [4 * 81, 0, 4 * 81, 4 * 4 * 600]}


@pytest.mark.zoo
@pytest.mark.process
def test_two_ranks_end_like_one_and_resume_exactly(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    train_on_ranks(2, out, tmp_path / "ranks", module="tests.support.optimizers_on_ranks")
    found = json.loads(out.read_text())
    for kind in found.values():
        assert {name: values["from undisturbed"] for name, values in kind.items()} == dict.fromkeys(kind, 0.0)
    replicated, found = found["replicated"], found["sharded"]
    for name, values in replicated.items():
        assert values["from one rank"] < (5e-3 if name == "Muon" else 1e-4), name
    assert found["AdamW"]["from one rank"] < 1e-4  # a hundredth of a step, as the norm is rounded otherwise
    assert found["AdamWScheduleFree"]["from one rank"] < 1e-4
    assert found["Muon"]["from one rank"] < 5e-3  # it orthogonalises in bfloat16; eight steps of 0.01 each
    assert found["AdamWScheduleFree"]["kinds"] == 2
    assert found["Adafactor"]["from one rank"] < 1e-5  # the step of the whole weight, after eight of 0.01 each
    assert found["Adafactor"]["resumed on another number"] < 1e-5
    assert found["Adafactor"]["moved"] > 1e-2
    # where its first rate of 1e-6 is nearly all of the motion; see the next test
    assert max(found["Prodigy"][name] for name in ("from one rank", "resumed on another number")) < 1e-9
    assert found["Prodigy"]["moved"] > 1e-5


@pytest.mark.zoo
@pytest.mark.process
def test_prodigy_has_the_sums_of_whole_weights_on_parts_and_replicas_of_parts(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    train_on_ranks(4, out, tmp_path / "ranks", module="tests.support.prodigy_on_ranks")
    found = json.loads(out.read_text())
    assert found.pop("growth") > 10.0
    assert found.pop("moved") > 0.1
    assert {name: value for name, value in found.items() if not value < 1e-6} == {}  # roundings of sums in float32
    places = ("one rank", "four parts", "replicas of two parts")
    assert [found[f"{place} to {place}"] for place in places] == [0.0] * 3


@pytest.mark.zoo
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "rate", "ranks"),
    [
        ("Prodigy", 1.0, "dp_replicate_size=2"),
        ("Prodigy", 1.0, "dp_shard_size=2"),
        ("Adafactor", 0.1, "dp_shard_size=2"),
    ],
    ids=["Prodigy on replicas", "Prodigy on parts", "Adafactor on parts"],
)
def test_two_ranks_train_an_adapter_as_one_does(
    write_toml: Callable[..., Path], tmp_path: Path, name: str, rate: float, ranks: str
) -> None:
    options = (f"--train.optm_name={name}", f"--train.optm_lr={rate}", "--train.global_batch_size=4")
    options += ("--train.train_policy.mini_batch=2", "--train.max_num_steps=4")
    one = train(write_toml(), *options)
    split = (*options, "--policy.parallelism.dp_shard_size=1", f"--policy.parallelism.{ranks}")
    two = train_on_ranks(2, write_toml(), tmp_path / "two", *split)
    np.testing.assert_allclose(trace(two), trace(one), rtol=1e-5, atol=1e-6)
    assert saved_state(two, 4).keys() == saved_state(one, 4).keys()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
