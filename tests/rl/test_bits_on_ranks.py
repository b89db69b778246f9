"""With ``train.rank_invariant`` reinforcement learning has the same bits on any number of ranks."""

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl.distributed.context import process_group
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.diffusers.diffuser_model import DiffuserModel
from cosmos_rl.policy.trainer.base import Gradients
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding, StepConditions
from cosmos_rl.policy.trainer.task import StepReport
from tests.model.test_experts import WAN
from tests.rl.test_flow_grpo_pipeline import GATED, LAGGED, flow_options
from tests.rl.test_resume_of_every_algorithm import FLOW, JOB
from tests.rl.test_sizes import BUCKETS, GUARD, sized_prompts
from tests.rl.test_teachers_of_sets import export_teachers, set_options
from tests.support.family_runs import family_toml
from tests.support.kills import newest_step
from tests.support.nft_runs import Job, forked, nft_toml, nft_trainer, run_forked
from tests.support.pairs import marked_folder
from tests.support.patience import wait_until
from tests.support.states import assert_same_bits
from tests.support.toy_models import PlaneModel
from tests.support.toy_tasks import POINT, bump, toy_config, toy_trainer

INVARIANT = ("--train.rank_invariant=true", "--train.optm_impl=foreach", "--train.train_policy.mini_batch=1")
PER_STEP = 8
"""Samples of an optimiser step at most; 16 are made in a training step."""
UNEVEN = "--train.train_policy.learnt_share=0.7"
"""11 of 16 samples are learnt from, in optimiser steps of 6 and 5, which neither 2 nor 4 ranks share evenly."""
OF_A_RANK = "train/nfe"
"""Evaluations of the network, which count samples that only fill up."""
VALIDATION = (
    "--validation.enable=true",
    "--validation.freq=2",
    "--validation.n_generation=2",
    "--train.ema_enable=true",
)


def build_jobs(folder: Path, base: Path, images: Path) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Name -> configuration and options of each kind of run."""
    all_weights, lora = nft_toml(folder, base, lora=False), nft_toml(folder, base, lora=True)
    validated = (*VALIDATION, f"--validation.dataset.local_dir={folder / 'prompts.txt'}")
    term = (
        f'{{beta = 0.5, local_dir = "{images}", batch_size = 8, levels = "trained_steps", per_step = true, '
        'noise = "rollout"}'
    )
    sizes = [{"size": [16, 32]}, {"size": [32, 16]}] * 4
    named = f"--train.train_policy.dataset.local_dir={sized_prompts(folder, sizes)}"
    dropout, bfloat16 = "--policy.lora.lora_dropout=0.25", "--train.param_dtype=bfloat16"
    return {
        "nft": (all_weights, (BUCKETS, *GUARD, UNEVEN, *validated, "--policy.diffusers.even_levels=true")),
        "sized": (lora, (BUCKETS, named, dropout, bfloat16, UNEVEN, "--policy.diffusers.sample.guidance_scale=3.0")),
        "gated": (lora, (*flow_options(lora=True), *LAGGED, *GATED, UNEVEN, dropout)),
        "ddrl": (
            all_weights,
            (
                *flow_options(lora=False),
                "--train.train_policy.trainer_type=ddrl",
                "--train.train_policy.kl_beta=0.0",
                "--train.train_policy.advantage_transform=centred_exp_reward",
                f"--train.train_policy.data_term={term}",
                "--train.train_policy.steps={choose = 'window', size = 2}",
            ),
        ),
        "pairs": (
            all_weights,
            (
                "--train.train_policy.trainer_type=online_dpo",
                "--policy.diffusers.weight_copy_decay_type=0",
                "--train.train_policy.dpo_auto_beta.target_factor=0.2",
            ),
        ),
        "teachers": (lora, (*set_options(folder, export_teachers(folder, base, True), 3.0), UNEVEN)),
    }


def options_for(own: Sequence[str], ranks: int, steps: int) -> tuple[str, ...]:
    per_rank = f"--train.train_policy.batch_size_per_optimize={PER_STEP // ranks}"
    return (*own, *INVARIANT, per_rank, f"--train.max_num_steps={steps}")


@pytest.mark.zoo
@pytest.mark.process
def test_shards_and_replicas_have_the_bits_of_one_rank(tmp_path: Path, tiny_sd3: Path) -> None:
    steps, jobs = 3, build_jobs(tmp_path, tiny_sd3, marked_folder(tmp_path / "data", [(32, 32)] * 16))

    def job(what: str, ranks: int, replicas: int = 1) -> Job:
        config, own = jobs[what]
        sizes = (f"--policy.parallelism.dp_replicate_size={replicas}",)
        return Job(config, tmp_path / f"{what}_{ranks}_{replicas}", (*options_for(own, ranks, steps), *sizes))

    run_forked([job(what, 1) for what in jobs], 1, tmp_path)
    run_forked([job(what, 2) for what in jobs], 2, tmp_path)
    run_forked([job("nft", 4), job("ddrl", 4, 2), job("gated", 4, 4)], 4, tmp_path)
    for what in jobs:
        assert_same_bits(tmp_path / f"{what}_2_1", tmp_path / f"{what}_1_1", steps, OF_A_RANK)
    for what, replicas in (("nft", 1), ("ddrl", 2), ("gated", 4)):
        assert_same_bits(tmp_path / f"{what}_4_{replicas}", tmp_path / f"{what}_1_1", steps, OF_A_RANK)


@pytest.mark.zoo
@pytest.mark.process
def test_an_expert_that_no_sample_calls_stays_as_it_is_where_a_rank_is_filled_up(
    tmp_path: Path,
) -> None:
    """With even levels: a row that only fills up has those of the sample that it repeats, and no other expert's."""
    config = family_toml(tmp_path, WAN, job="nft", lora=True)
    own = (
        "--policy.diffusers.even_levels=true",
        "--policy.diffusers.timesteps_fraction=0.25",
        "--train.train_policy.learnt_share=0.375",
        "--train.train_batch_per_replica=8",
    )
    jobs = {
        ranks: Job(
            config,
            tmp_path / f"experts_{ranks}",
            (*own, *INVARIANT, f"--train.train_policy.batch_size_per_optimize={2 // ranks}", "--train.max_num_steps=6"),
        )
        for ranks in (1, 2)
    }
    for ranks, job in jobs.items():
        run_forked([job], ranks, tmp_path)
    assert_same_bits(jobs[2].folder, jobs[1].folder, 6, OF_A_RANK)


@pytest.mark.process
def test_killed_on_two_ranks_both_two_and_one_end_with_the_bits_of_one(tmp_path: Path, tiny_sd3: Path) -> None:
    """With drawn sizes, dropout, and an old policy that follows."""
    steps, config = 7, nft_toml(tmp_path, tiny_sd3)
    own = (BUCKETS, *GUARD, UNEVEN, "--policy.lora.lora_dropout=0.25", "--train.ckpt.save_freq=3")
    calm, killed, moved = (tmp_path / name for name in ("calm", "killed", "moved"))
    one, two = (options_for((*own, "--train.ckpt.save_mode=sync"), ranks, steps) for ranks in (1, 2))
    run_forked([Job(config, calm, one)], 1, tmp_path)
    first, second = forked([Job(config, killed, two, killed_after=5)], 2, tmp_path)
    wait_until(lambda: first.exitcode is not None, "the end of rank 0")
    assert first.exitcode == -signal.SIGKILL
    second.kill()
    second.join()
    saved = newest_step(killed)
    assert saved == 3
    shutil.copytree(killed, moved)
    run_forked([Job(config, killed, two, saved)], 2, tmp_path)
    run_forked([Job(config, moved, one, saved)], 1, tmp_path)
    for run in (killed, moved):
        assert_same_bits(run, calm, steps, OF_A_RANK)


@pytest.mark.parametrize("trainer", ["diffusion_nft", "flow_grpo"])
def test_the_gradient_of_a_step_is_the_one_without_it(trainer: str) -> None:
    tables = {**(FLOW if trainer == "flow_grpo" else {}), JOB + "trainer_type": trainer, JOB + "learnt_share": 0.7}
    tables |= {JOB + "mini_batch": 1, JOB + "kl_beta": 0.1, "train.optm_impl": "foreach"}
    tables |= {"train.train_batch_per_replica": 16, "rollout.n_generation": 8}

    def compute(**more: object) -> tuple[list[Gradients], StepReport]:
        task = toy_trainer(toy_config({**tables, **more}), PlaneModel(), [POINT] * 2, reward_fns={"bump": bump})
        return task.compute_gradients(0)

    ((expected,), report), ((found,), same) = compute(), compute(**{"train.rank_invariant": True})
    assert same.metrics["train/loss_mean"] == pytest.approx(report.metrics["train/loss_mean"], rel=1e-5)
    assert any(float(gradient.norm()) > 1e-3 for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--rollout.n_generation_mini_batch=4",
            "rollout.n_generation_mini_batch: found 4; allowed with train.rank_",
        ),
        (
            "--rollout.batch_size=2",
            "rollout.batch_size: found 2; with train.rank_invariant one sample is made",
        ),
        (
            "--train.train_policy.mini_batch=4",
            "train.train_policy.mini_batch: found 4; allowed with train.rank_",
        ),
        ("--policy.parallelism.cp_size=2", "found true with policy.parallelism.cp_size = 2; allowed: 1"),
    ],
)
def test_what_would_depend_on_the_ranks_is_refused(tmp_path: Path, option: str, message: str) -> None:
    config = nft_toml(tmp_path, tmp_path)
    load_config(config, list(INVARIANT))
    with pytest.raises(UserError) as error:
        load_config(config, [*INVARIANT, option])
    assert message in str(error.value)


def test_samples_prompts_and_rows_come_one_at_a_time(
    tmp_path: Path, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rollouts, updates, validation, and where the guard measures; with real samples too."""
    rows: list[int] = []
    texts: list[int] = []
    predict, encode = DiffuserModel.predict, Encoding.conditions

    def our_predict(self: DiffuserModel, latents: torch.Tensor, *more: Any) -> torch.Tensor:
        rows.append(len(latents))
        return predict(self, latents, *more)

    def our_encode(self: Encoding, prompts: Sequence[str], *more: Any) -> Any:
        texts.append(len(prompts))
        return encode(self, prompts, *more)

    monkeypatch.setattr(DiffuserModel, "predict", our_predict)
    monkeypatch.setattr(Encoding, "conditions", our_encode)
    images = marked_folder(tmp_path / "data", [(32, 32)] * 4)
    term = f'--train.train_policy.data_term={{beta = 0.5, local_dir = "{images}", batch_size = 4}}'
    config = nft_toml(tmp_path, tiny_sd3)
    validation = (*VALIDATION, f"--validation.dataset.local_dir={tmp_path / 'prompts.txt'}")
    with process_group("cpu"):
        task = nft_trainer(config, *INVARIANT, *GUARD, *validation, term)
        task.train_step(0)
        learnt = len(rows)
        task.train_step(1)  # the guard measures after it
        task.validate(2, lambda *_: None)
    assert set(rows) == {1}
    assert set(texts) == {1}
    assert len(rows) > 2 * learnt > 0


def test_conditions_are_made_one_at_a_time_and_kept() -> None:
    calls: list[list[str]] = []

    class Rows:
        def __init__(self, texts: list[str]) -> None:
            self.texts = texts

        def rows(self, which: torch.Tensor) -> list[str]:
            return [self.texts[i] for i in which.tolist()]

    def encode(texts: Sequence[str], negatives: Sequence[str]) -> Rows:
        calls.append([*texts, *negatives])
        return Rows(list(texts))

    conditions = StepConditions(encode, each=True)  # type: ignore[arg-type]
    conditions.encode_all(["a", "b", "a"])
    assert calls == [["a", ""], ["b", ""]]
    assert conditions(["b", "b"]) == ["b", "b"]
    assert conditions(["a"], ["away"]) == ["a"]
    assert calls[2:] == [["a", "away"]]
    with pytest.raises(ValueError, match="conditions of 2 prompts together"):
        conditions(["a", "b"])
