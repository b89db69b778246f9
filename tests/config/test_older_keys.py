"""What keys of the older configuration become: each of `[model.rl]` with another value than its default, and others."""

import tomllib
from typing import Any

import pytest
import tomli_w

from cosmos_rl.policy.config import Config, world_size
from cosmos_rl.policy.config.policy import ParallelismConfig
from tests.config.test_older_config import VIDEO, translated, value

JOB_TABLE, SAMPLE = "train.train_policy.", "policy.diffusers.sample."


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"num_rollout": 4}, {"rollout.n_generation": 4}),
    ({"on_policy": False}, {JOB_TABLE + "on_policy": False, "policy.diffusers.weight_copy_decay_type": 1}),
    ({"sample_steps": 14}, {SAMPLE + "num_steps": 15}),
    ({"solver_option": "1euler"}, {SAMPLE + "solver": "1euler"}),
    ({"s_churn": 0.5}, {SAMPLE + "noise_level": 0.5}),
    ({"s_t_min": 0.1, "s_t_max": 50.0}, {SAMPLE + "noise_above": 0.1, SAMPLE + "noise_below": 50.0}),
    ({"s_noise": 1.1}, {SAMPLE + "noise_scale": 1.1}),
    ({"guidance": 2.5}, {SAMPLE + "guidance_scale": 3.5}),
    ({"use_same_seed": False}, {SAMPLE + "same_initial_noise": False}),
    (
        {"min_num_conditional_frames": 0, "max_num_conditional_frames": 2},
        {"policy.diffusers.conditional_frames": [0, 2]},
    ),
    ({"train_on": [3, -1, 1]}, {JOB_TABLE + "steps.indices": [1, 3, -1]}),
    ({"update_ref_every_iter": 5}, {JOB_TABLE + "reference_reset_interval": 5}),
    ({"clip_ratio": 1e-3}, {JOB_TABLE + "epsilon_low": 1e-3, JOB_TABLE + "logprob_weight": "ve"}),
    ({"kl_beta": 0.2}, {JOB_TABLE + "kl_beta": 0.2, JOB_TABLE + "trainer_type": "flow_grpo"}),
    ({"data_beta": 0.3}, {JOB_TABLE + "data_term.beta": 0.3, JOB_TABLE + "trainer_type": "flow_grpo"}),
    ({"data_beta": 0.3, "kl_beta": 0.0}, {JOB_TABLE + "trainer_type": "ddrl"}),
    (
        {"data_beta": 0.3, "use_rl_sigma_and_noise": False},
        {
            JOB_TABLE + "data_term.levels": "training",
            JOB_TABLE + "data_term.noise": "fresh",
            JOB_TABLE + "data_term.per_step": True,
        },
    ),
    ({"exp_reward": True}, {JOB_TABLE + "advantage_transform": "exp_reward"}),
    (
        {"reward_config": {"adv_clip_min": -2.0, "adv_clip_max": 3.0}},
        {JOB_TABLE + "advantage_low": -2.0, JOB_TABLE + "advantage_high": 3.0},
    ),
    (
        {"reward_config": {"remote_reward": {"reward_fn": "ocr", "score_key": "a+b", "reward_clip_min": -1.0}}},
        {
            JOB_TABLE + "remote_reward.reward_fns": [
                {"name": "ocr", "weight": 1.0, "score_key": "a+b", "clip_min": -1.0, "clip_max": 5.0}
            ]
        },
    ),
    ({"reward_config": {"remote_reward": {"scale": 0.5}}}, {JOB_TABLE + "remote_reward.scale": 0.5}),
]


@pytest.mark.parametrize(("given", "expected"), CASES, ids=["-".join(given) for given, _ in CASES])
def test_every_key_of_the_rl_table_acts_with_another_value_than_its_default(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    translation = translated(model={"rl": given})
    assert {name: value(translation, name) for name in expected} == expected
    assert Config.from_dict(tomllib.loads(tomli_w.dumps(translation.tables))) != Config.from_dict(
        tomllib.loads(tomli_w.dumps(translated().tables))
    )


def test_the_first_data_with_a_share_are_read() -> None:
    image = {"ratio": 0.5, "dataset_dir": "images", "batch_size": 3}
    for share, place, batch in ((1, "videos", 1), (0, "images", 3)):
        data = {"type": "local", "video_dataloader": {**VIDEO, "ratio": share}, "image_dataloader": image}
        translation = translated(dataloader_train=data)
        job = value(translation, "train.train_policy")
        assert (job["dataset"]["local_dir"], job["mini_batch"]) == (place, batch)
        lost = {note.old for note in translation.notes if note.lost}
        assert ("dataloader_train.image_dataloader.ratio" in lost) == (share == 0)


def test_the_group_of_gpus_is_the_product_of_all_sizes() -> None:
    sizes = {"fsdp_shard_size": 4, "dp_replicate_size": 2}
    translation = translated(model=sizes, model_parallel={"context_parallel_size": 2, "data_parallel_size": 3})
    parallelism = ParallelismConfig.model_validate(value(translation, "policy.parallelism"))
    assert world_size(parallelism) == 3 * 2 * 4 * 2
    assert value(translation, "train.train_batch_per_replica") == 3 * 2 * 4  # context parallel ranks share a sample


def test_steps_without_noise_are_left_out_with_a_note() -> None:
    translation = translated(model={"rl": {"sample_steps": 5, "train_on": [4, -1, 2, 0, -1]}})
    assert value(translation, "train.train_policy.steps.indices") == [0, 2, -1, -1]
    assert any("without [4], which have no noise" in line for line in translation.describe())


def test_a_data_term_in_the_first_step_alone_has_its_share_of_the_mean() -> None:
    rl = {"data_beta": 0.1, "kl_beta": 0.0, "data_on_first_only": True, "train_on": [0, 2, 4, 6]}
    term = value(translated(model={"rl": rl}), "train.train_policy.data_term")
    assert (term["beta"], term["per_step"]) == (pytest.approx(0.025), False)


@pytest.mark.parametrize(("dropout", "named"), [(0.0, True), (0.2, False)])
def test_guidance_that_had_no_effect_is_named(dropout: float, named: bool) -> None:
    conditioner = [{"name": "text", "dropout_rate": dropout}]
    translation = translated(model={"rl": {"guidance": 3.0}, "conditioner": conditioner})
    assert value(translation, "policy.diffusers.sample.guidance_scale") == 4.0
    assert any(note.old == "model.rl.guidance" and note.lost for note in translation.notes) == named
