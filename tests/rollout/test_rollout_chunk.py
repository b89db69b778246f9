"""How many samples one call of a rollout makes where the configuration leaves it open."""

import pytest

from cosmos_rl.policy.config import Config, rollout_chunk, validation_chunk

TABLE = dict[str, object]


def job(total: int, group: int, size: int, rollout: TABLE | None = None, **train_policy: object) -> Config:
    return Config.from_dict(
        {
            "policy": {
                "diffusers": {"inference_size": [size, size], "sample": {"guidance_scale": 1.0}},
                "parallelism": {"dp_shard_size": 1},
            },
            "rollout": {"n_generation": group, **(rollout or {})},
            "train": {
                "train_batch_per_replica": total,
                "train_policy": {"type": "grpo", "trainer_type": "diffusion_nft", **train_policy},
            },
        }
    )


@pytest.mark.parametrize(
    ("total", "group", "size", "expected"),
    [
        (96, 24, 32, 96),  # small images: one call
        (96, 24, 256, 96),
        (96, 24, 512, 24),  # 24 images of 512 x 512 are 6.3 million pixels
        (96, 24, 1024, 24),  # never less than a prompt's samples, which is what it was before
        (144, 12, 512, 24),  # two prompts fit
        (60, 12, 512, 24),  # 2 + 2 + 1 prompts
        (48, 12, 512, 24),
        (1000, 8, 256, 128),  # 128 samples fit: 8 calls, the last one smaller
    ],
)
def test_one_call_where_it_fits_and_else_calls_of_about_the_same_size(
    total: int, group: int, size: int, expected: int
) -> None:
    assert rollout_chunk(job(total, group, size)) == expected


def test_a_service_scores_one_half_while_the_other_is_sampled() -> None:
    assert rollout_chunk(job(80, 8, 32, use_remote_reward=True)) == 40
    assert rollout_chunk(job(8, 8, 32, use_remote_reward=True)) == 8  # a prompt is not divided
    assert rollout_chunk(job(80, 8, 32, use_remote_reward=True, bypass_reward=True)) == 80


def test_guidance_doubles_the_rows_and_what_is_set_holds() -> None:
    guided = job(48, 12, 512).model_dump()
    guided["policy"]["diffusers"]["sample"]["guidance_scale"] = 4.5
    assert rollout_chunk(Config.model_validate(guided)) == 12
    assert rollout_chunk(job(96, 24, 32, {"batch_size": 2})) == 48
    assert rollout_chunk(job(96, 24, 32, {"batch_size": 9})) == 96
    assert rollout_chunk(job(96, 24, 32, {"batch_size": 2, "n_generation_mini_batch": 5})) == 5


def test_validation_follows_the_same_rule() -> None:
    config = job(96, 24, 256)
    config = config.model_copy(update={"validation": config.validation.model_copy(update={"n_generation": 4})})
    assert validation_chunk(config, 10) == 40
    assert validation_chunk(config, 1000) == 128
    asked = config.validation.model_copy(update={"batch_size": 3})
    assert validation_chunk(config.model_copy(update={"validation": asked}), 10) == 12
    assert validation_chunk(job(96, 24, 256, {"batch_size": 2}), 10) == 2
