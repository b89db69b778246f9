"""On-policy distillation with one teacher for each prompt set: each sample is compared with its own teacher."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_rl.checkpoint import layout
from cosmos_rl.data.prompts import PromptRecord
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.policy.config import cross_check
from cosmos_rl.policy.config.plan import keeps_common_reference, list_teachers, number_teachers, plan_online
from cosmos_rl.policy.trainer.loop import TrainLoop
from cosmos_rl.policy.trainer.rl.online import OnlineTask
from cosmos_rl.policy.trainer.rl.teachers import plan_passes
from cosmos_rl.policy.trainer.same_run import collect_fixed_settings, compare
from cosmos_rl.storage import run_folder
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.exports import export_policy
from tests.support.nft_runs import Job, nft_toml, nft_trainer, prompt_file, run_forked
from tests.support.states import assert_same_state, drop_steps_after, saved_state, trace
from tests.support.toy_models import FOUR_MODES, TiltedModel
from tests.support.toy_tasks import Never, metrics_of, mmd2, toy_config, toy_trainer

JOB = "train.train_policy."
NAMES = ("right", "up", "start")
SLOPES = {"right": [0.5, 0.0], "up": [0.0, 0.6]}
SETS = [
    {"local_dir": "right.txt", "teacher": "teachers/right", "weight": 2.0},
    {"local_dir": "up.txt", "teacher": "teachers/up"},
    {"local_dir": "start.txt"},
]
TABLES = {
    "train.train_batch_per_replica": 32,
    "rollout.n_generation": 8,
    "train.max_num_steps": 6,
    "train.optm_lr": 5e-3,
    "policy.diffusers.timesteps_fraction": 0.4,
    "policy.diffusers.weight_copy_decay_type": 0,
    JOB + "bypass_reward": True,
    JOB + "kl_beta": 1.0,
    JOB + "mini_batch": 8,
    JOB + "dataset": {"sets": SETS},
}
FLOW = {
    JOB + "trainer_type": "flow_grpo",
    JOB + "on_policy": True,
    "policy.diffusers.sample": {"num_steps": 6, "guidance_scale": 1.0, "solver": "flow", "noise_level": 0.7},
}
RECORDS = [PromptRecord(name, prompt_set=number) for number, name in enumerate(NAMES)]


def task_of(sets: int = 3, **changes: Any) -> OnlineTask:
    """On the first ``sets`` sets, with the exact tilts as the teachers."""
    config = toy_config({**TABLES, JOB + "dataset": {"sets": SETS[:sets]}, **changes})
    task = toy_trainer(config, TiltedModel(NAMES), RECORDS[:sets])
    tilt = task.model.transformer.tilt
    for number, name in enumerate(tuple(SLOPES)[:sets], 1):
        task.policies.load_reference(lambda name=name: tilt.data.copy_(torch.tensor(SLOPES[name])), number)
    return task


# ---- which passes are run ------------------------------------------------------------------------------------------


def blocks_of(rows: int, size: int, each: int) -> list[list[slice]]:
    slices = [slice(i, i + size) for i in range(0, rows, size)]
    return [slices[i : i + each] for i in range(0, len(slices), each)]


def test_a_row_is_in_one_pass_of_its_own_reference_in_order() -> None:
    reference = torch.tensor([1, 0, 1, 1, 2, 1, 1, 0, 0, 2])
    first, second = plan_passes(reference, 3, blocks_of(10, 2, 3), 2, list)
    assert first == [(0, [1]), (1, [0, 2]), (1, [3, 5]), (2, [4])]
    assert second == [(0, [1, 2]), (1, [0]), (2, [3])]


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_run_the_same_passes_in_the_same_order(seed: int) -> None:
    """Each rank knows its own rows and the maxima; a pass without rows is there to meet the others."""
    generator = torch.Generator().manual_seed(seed)
    ranks = [torch.randint(0, 4, (24,), generator=generator) for _ in range(2)] + [torch.zeros(24, dtype=torch.int64)]
    planned = simulate(ranks, 3, 4)
    assert len({json.dumps([[one.reference for one in block] for block in rank]) for rank in planned}) == 1
    for reference, blocks in zip(ranks, planned, strict=True):
        for number, block in enumerate(blocks):
            own = reference[12 * number : 12 * number + 12]
            rows = [row for one in block for row in one.rows]
            assert sorted(rows) == list(range(12))
            assert all(own[row] == one.reference for one in block for row in one.rows)
            assert all(len(one.rows) <= 3 for one in block)


def simulate(ranks: Sequence[Tensor], size: int, each: int) -> list[Any]:
    """``plan_passes`` of all ranks, each answered with the maxima of what all of them ask."""
    asked: list[Sequence[float]] = []
    options = [(reference, 4, blocks_of(len(reference), size, each), size) for reference in ranks]
    for given in options:
        plan_passes(*given, lambda values: asked.append(values) or list(values))
    most = [max(values) for values in zip(*asked, strict=True)]
    return [plan_passes(*given, lambda _: most) for given in options]


# ---- a step --------------------------------------------------------------------------------------------------------


def keep_micros(task: OnlineTask) -> list[Any]:
    """The micro-batches of a task, with the terms of their rows."""
    inner, kept = task.algorithm, []

    class Keeping:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def loss(self, velocity: Any, micro: Any, *more: Any) -> Any:
            loss, terms = inner.loss(velocity, micro, *more)
            kept.append((micro, terms))
            return loss, terms

    task.algorithm = Keeping()  # pyright: ignore[reportAttributeAccessIssue]
    return kept


def exact_velocity(name: str, state: Tensor, sigma: Tensor) -> Tensor:
    return FOUR_MODES.tilted(torch.tensor(SLOPES.get(name, [0.0, 0.0]))).velocity(state, sigma)


@pytest.mark.parametrize("more", [{}, FLOW, {JOB + "trainer_type": "awm"}], ids=["nft", "flow_grpo", "awm"])
@pytest.mark.parametrize("size", [8, 32])
def test_each_sample_is_compared_with_its_own_teacher(more: dict[str, Any], size: int) -> None:
    task = task_of(**more, **{JOB + "mini_batch": size})
    kept = keep_micros(task)
    task.train_step(0)
    mixed, names = 0, Counter[str]()
    for micro, terms in kept:
        names += Counter(micro.prompts)
        mixed += len(set(micro.prompts)) > 1
        for row, name in enumerate(micro.prompts):
            one = slice(row, row + 1)
            expected = exact_velocity(name, micro.state[one], micro.level.sigma[one])
            torch.testing.assert_close(micro.frozen["reference"][one], expected, rtol=1e-5, atol=1e-5)
            if name == "start":
                assert float(terms["kl_loss"][row]) < 1e-9
    assert names["right"] == 2 * names["up"] == 2 * names["start"]
    assert (mixed > 0) == (size == 32)


def test_micro_batches_do_not_change_the_gradient() -> None:
    gradients = [task_of(**{JOB + "mini_batch": size}).compute_gradients(0)[0][0] for size in (4, 16, 32)]
    for name, value in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("more", [{}, FLOW], ids=["nft", "flow_grpo"])
def test_the_distance_of_each_set_is_logged(more: dict[str, Any]) -> None:
    task = task_of(**more)
    kept = keep_micros(task)
    metrics = task.train_step(0).metrics
    for name in NAMES:
        rows = [float(terms["kl_loss"][i]) for m, terms in kept for i, one in enumerate(m.prompts) if one == name]
        assert metrics[f"train/{name}/kl_loss_mean"] == pytest.approx(float(np.mean(rows)), rel=1e-5, abs=1e-12)
    assert metrics["train/right/kl_loss_mean"] > metrics["train/start/kl_loss_mean"]
    whole = task_of(1, **more).train_step(0).metrics
    assert whole["train/right/kl_loss_mean"] == pytest.approx(whole["train/kl_loss_mean"])


def test_it_costs_one_frozen_evaluation_for_each_row() -> None:
    several = task_of()
    one = {JOB + "dataset": {"sets": [{**row, "teacher": ""} for row in SETS]}, JOB + "teacher": "given by the test"}
    single = toy_trainer(toy_config({**TABLES, **one}), TiltedModel(NAMES), RECORDS)
    for task in (several, single):
        task.train_step(0)
    units = [task.model.units for task in (several, single)]  # pyright: ignore[reportAttributeAccessIssue]
    assert units[0] == units[1] > 0
    assert several._num_evaluations == single._num_evaluations
    assert plan_online(several._config).reference_forwards == plan_online(single._config).reference_forwards + 2


def test_the_model_at_the_start_is_kept_only_where_a_set_has_no_teacher() -> None:
    three, two = task_of().policies, task_of(2).policies
    with three.using("reference"):
        pass
    with pytest.raises(ValueError, match="keeps no reference"), two.using("reference"):
        pass
    for state, slope in zip(two.teacher_states(), SLOPES.values(), strict=True):
        assert state["tilt"].tolist() == pytest.approx(slope)


def test_teachers_are_numbered_once_whatever_the_sets_repeat() -> None:
    def job(*teachers: str, common: str = "") -> Any:
        sets = [{"local_dir": f"{i}.txt", "teacher": name} for i, name in enumerate(teachers)]
        return toy_config({**TABLES, JOB + "dataset": {"sets": sets}, JOB + "teacher": common}).train.train_policy

    key = "train.train_policy.dataset.sets."
    assert number_teachers(job("a", "b", "a", "")) == (1, 2, 1, 0)
    assert list_teachers(job("a", "b", "a", "")) == {f"{key}0.teacher": "a", f"{key}1.teacher": "b"}
    assert number_teachers(job("a", "b", common="a")) == (0, 1)
    assert number_teachers(job("", "")) == number_teachers(job("a", "", common="a")) == ()
    assert keeps_common_reference(job("a", ""))
    assert not keeps_common_reference(job("a", "b"))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_resume_in_the_middle_is_the_undisturbed_run(tmp_path: Path, seed: int) -> None:
    saving = {"train.ckpt.save_freq": 3, "train.ckpt.save_mode": "sync", "train.ckpt.max_keep": -1}

    def train(folder: Path, task: OnlineTask, resume_from: Path | None) -> Path:
        run = run_folder.find_newest_run(folder) or run_folder.create_run(folder)
        TrainLoop(task._config, run, Context(torch.device("cpu")), task, (), {}, Never()).run(resume_from)
        return run.root

    more = {**saving, "train.seed": seed, **(FLOW if seed else {})}
    calm = train(tmp_path / "calm", task_of(**more), None)
    shutil.copytree(tmp_path / "calm", tmp_path / "again", symlinks=True)
    again = tmp_path / "again" / calm.name
    drop_steps_after(again, 3)
    task = task_of(**more)
    task.policies.load_reference(lambda: task.model.transformer.tilt.data.fill_(9.0), 1)  # the checkpoint has it
    train(tmp_path / "again", task, layout.policy_dir(again / "checkpoints", 3))
    end = saved_state(calm, 6)
    assert {"teacher1", "teacher2"} <= {key.split(".")[0] for key in end}
    assert_same_state(saved_state(again, 6), end)
    lines = [[row["train/kl_loss_mean"] for row in metrics_of(tmp_path / name)] for name in ("calm", "again")]
    assert lines[0] == lines[1]
    assert lines[0][-1] < lines[0][0]


def write_teacher(place: Path, value: float) -> str:
    """An adapter's files as PEFT writes them."""
    place.mkdir(parents=True)
    place.joinpath("adapter_config.json").write_text('{"r": 4}')
    save_file({"weight": torch.full((8,), value)}, place / "adapter_model.safetensors")
    return str(place)


def test_a_resume_with_another_teacher_of_a_set_is_refused_and_a_moved_one_is_not(tmp_path: Path) -> None:
    def settings(*places: str, common: str = "") -> dict[str, Any]:
        sets = [{**row, "teacher": place} for row, place in zip(SETS, places, strict=True)]
        config = toy_config({**TABLES, JOB + "dataset": {"sets": sets}, JOB + "teacher": common})
        return collect_fixed_settings(config, Context(torch.device("cpu")), {})

    right, up = write_teacher(tmp_path / "right", 1.0), write_teacher(tmp_path / "up", 2.0)
    saved = settings(right, up, "")
    moved = [str(shutil.copytree(place, tmp_path / "moved" / Path(place).name)) for place in (right, up)]
    compare(tmp_path, saved, settings(*moved, ""))
    as_file = settings(f"{right}/adapter_model.safetensors", up, "")
    for now, label in ((settings(up, right, ""), "right"), (settings(right, up, right), "start")):
        with pytest.raises(UserError, match=f"saved with the teacher of prompt set {label} .* = '"):
            compare(tmp_path, saved, now)
    with pytest.raises(UserError, match="prompt set start"):
        compare(tmp_path, saved, settings(right, up, "", common=right))
    shutil.rmtree(up)
    write_teacher(Path(up), 3.0)
    for now in (settings(right, up, ""), settings(right, f"{up}/adapter_model.safetensors", "")):
        with pytest.raises(UserError, match="prompt set up"):
            compare(tmp_path, saved, now)
    with pytest.raises(UserError, match="prompt set up"):
        compare(tmp_path, as_file, settings(f"{right}/adapter_model.safetensors", up, ""))
    common = settings("", "", "", common=right)
    assert settings(right, "", "", common=right) == common  # there is one for all prompts
    for now in (settings("", "", ""), settings("", "", "", common=up)):
        with pytest.raises(UserError, match="saved with the teacher of all prompts"):
            compare(tmp_path, common, now)


def test_a_run_does_not_continue_with_a_replaced_teacher(tmp_path: Path) -> None:
    places = [write_teacher(tmp_path / name, value) for name, value in (("right", 1.0), ("up", 2.0))]
    sets = [{**row, "teacher": place} for row, place in zip(SETS, places, strict=False)]
    saving = {"train.ckpt.save_freq": 1, "train.ckpt.save_mode": "sync", "train.max_num_steps": 1}
    run = run_folder.create_run(tmp_path / "runs")

    def train(resume_from: Path | None) -> int:
        task = task_of(2, **saving, **{JOB + "dataset": {"sets": sets}})
        return TrainLoop(task._config, run, Context(torch.device("cpu")), task, (), {}, Never()).run(resume_from)

    train(None)
    saved = layout.policy_dir(run.checkpoints, 1)
    assert train(saved) == 0
    shutil.rmtree(places[1])
    write_teacher(Path(places[1]), 3.0)
    with pytest.raises(UserError, match="the teacher of prompt set up"):
        train(saved)


@pytest.mark.zoo
def test_each_set_samples_what_its_own_teacher_does() -> None:
    """The teachers are the exact velocities of two tilts of one mixture; the loss has the floor 0."""
    more = {
        "train.train_batch_per_replica": 512,
        "rollout.n_generation": 128,
        "train.max_num_steps": 70,
        "train.optm_lr": 3e-3,
        "train.optm_decay_type": "linear",
        JOB + "mini_batch": 128,
        JOB + "batch_size_per_optimize": 128,
    }
    sets = [{**SETS[0], "weight": 1.0}, SETS[1]]
    task = task_of(2, **more, **{JOB + "dataset": {"sets": sets}})
    distances = [task.train_step(step).metrics["train/kl_loss_mean"] for step in range(task.total_steps)]
    assert distances[-1] < 0.08 * distances[0]
    noise = torch.randn(2000, 2, generator=torch.Generator().manual_seed(1))
    exact = {}
    for name, slope in SLOPES.items():
        exact[name] = FOUR_MODES.tilted(torch.tensor(slope)).draw(2000, torch.Generator().manual_seed(3))
    for name, other in (("right", "up"), ("up", "right")):
        cond = task.model.encode_prompts([name] * 2000)
        samples = task.model.sample_latents(cond, noise, num_steps=40, guidance=1.0)  # pyright: ignore[reportCallIssue]
        assert mmd2(samples, exact[name]) <= 0.01
        assert mmd2(samples, exact[other]) > 0.1
    assert not task.model.transformer.tilt.any()


# ---- what is refused, and what is said -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({JOB + "kl_beta": 0.0}, JOB + "kl_beta"),
        ({JOB + "reference_reset_interval": 3}, JOB + "reference_reset_interval"),
        ({JOB + "reference_reset_kl": 0.1}, JOB + "reference_reset_kl"),
        ({JOB + "trainer_type": "online_dpo"}, JOB + "dataset.sets.0.teacher"),
        ({"policy.trainable_pattern": ["a"]}, JOB + "dataset.sets.0.teacher"),
        ({JOB + "dataset": {"sets": SETS[:2]}, JOB + "teacher": "useless"}, JOB + "teacher"),
    ],
)
def test_teachers_that_could_not_act_are_refused(change: dict[str, Any], key: str) -> None:
    assert cross_check(toy_config(TABLES)) == []
    assert [line.partition(":")[0] for line in cross_check(toy_config({**TABLES, **change}))] == [key]


def set_options(folder: Path, teachers: Sequence[str], weight: float = 1.0) -> tuple[str, ...]:
    """Two sets of four prompts; ``weight``: of the first one."""
    files = [prompt_file(folder, [f"{name} {i}" for i in range(4)], f"{name}.txt") for name in "ab"]
    rows = [
        f'{{local_dir = "{file}", teacher = "{place}", weight = {share}}}'
        for file, place, share in zip(files, teachers, (weight, 1.0), strict=True)
    ]
    return (
        '--train.train_policy.dataset.local_dir=""',
        f"--train.train_policy.dataset.sets=[{', '.join(rows)}]",
        "--train.train_policy.bypass_reward=true",
        "--train.train_policy.kl_beta=1.0",
        "--policy.diffusers.weight_copy_decay_type=0",
        "--train.max_num_steps=4",
    )


def test_check_names_the_teacher_of_each_set(tmp_path: Path, tiny_sd3: Path, capsys: Any) -> None:
    (tmp_path / "t" / "transformer").mkdir(parents=True)
    options = set_options(tmp_path, [str(tmp_path / "t"), ""])
    full = nft_toml(tmp_path, tiny_sd3, lora=False)
    assert main(["check", "--env", "--config", str(full), *options]) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert f"references: a: {tmp_path / 't'}, b: the model at the start" in report
    assert "teachers of prompt sets" in report
    missing = set_options(tmp_path, ["nowhere/teacher", ""])
    assert main(["check", "--env", "--config", str(full), *missing]) == 2
    assert "train.train_policy.dataset.sets.0.teacher" in capsys.readouterr().err


# ---- on a pipeline -------------------------------------------------------------------------------------------------


def export_teachers(folder: Path, base: Path, lora: bool) -> list[str]:
    """Two adapters, or two pipelines, with weights of their own."""
    found = []
    for number in range(2):
        folder.joinpath(str(number)).mkdir()
        teacher = nft_trainer(nft_toml(folder / str(number), base, lora=lora), start=False)
        with torch.no_grad():
            for name, param in teacher.params.items():
                param.add_(0.02 * torch.randn(param.shape, generator=randomness.generator(number, name)))
        place = folder / str(number) / "export"
        export_policy(teacher, place)
        found.append(str(place / "lora" if lora else place))
    return found


@pytest.mark.zoo
@pytest.mark.process
@pytest.mark.parametrize("lora", [True, False])
def test_two_sharded_ranks_give_the_result_of_one_where_one_has_a_single_teachers_samples(
    tmp_path: Path, tiny_sd3: Path, lora: bool
) -> None:
    """Three prompts of the first set and one of the second: one rank has none of the second teacher's samples, and
    without a pass of its own the other one would wait for it for ever."""
    teachers = export_teachers(tmp_path, tiny_sd3, lora)
    config = nft_toml(tmp_path, tiny_sd3, lora=lora)
    options = (*set_options(tmp_path, teachers, weight=3.0), "--train.optm_lr=1e-3")
    for ranks in (1, 2):
        run_forked([Job(config, tmp_path / f"ranks{ranks}", options)], ranks, tmp_path)
    one, two = (tmp_path / f"ranks{ranks}" for ranks in (1, 2))
    np.testing.assert_allclose(trace(two), trace(one), rtol=1e-4, atol=1e-6)
    for single, double in zip(*(read_metrics(run / "metrics.jsonl") for run in (one, two)), strict=True):
        for name in ("train/kl_loss_mean", "train/a/kl_loss_mean", "train/b/kl_loss_mean"):
            assert double[name] == pytest.approx(single[name], rel=1e-3)
            assert double[name] > 0.0
    end = saved_state(one, 4)
    kept = [{key: value for key, value in end.items() if key.startswith(f"teacher{n}.")} for n in (1, 2)]
    assert len(kept[0]) == len(kept[1]) > 0
    for first, second in zip(kept[0].values(), kept[1].values(), strict=True):
        assert not torch.equal(first, second)


@pytest.mark.zoo
def test_doctor_tries_every_teacher(tmp_path: Path, tiny_sd3: Path, capsys: Any) -> None:
    teachers = export_teachers(tmp_path, tiny_sd3, lora=True)
    config, options = nft_toml(tmp_path, tiny_sd3), set_options(tmp_path, teachers)
    assert main(["doctor", "--config", str(config), *options]) == 0
    assert "forward" in capsys.readouterr().out
    assert main(["doctor", "--config", str(config), *options, "--policy.lora.r=2"]) == 1
    report = " ".join(capsys.readouterr().out.split())
    assert "teacher" in report
    assert "train.train_policy.dataset.sets.0.teacher" in report
    assert "does not fit policy.lora" in report
