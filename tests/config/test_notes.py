"""What a valid configuration is noted for: parts that are not built, keys without effect, keys of other jobs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl.policy.config import cross_check, load_config, notes, unsupported_settings


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("policy.is_diffusers=false", "policy.is_diffusers"),
        ("policy.parallelism.tp_size=2", "policy.parallelism.tp_size = 2; today only 1"),
        ("policy.parallelism.n_init_replicas=2", "policy.parallelism.n_init_replicas = 2"),
        ("train.compile=true", "train.compile = true; today only false"),
        ("train.fsdp_offload=true", "train.fsdp_offload = true"),
        ("train.train_policy.dataset.subset=x", 'train.train_policy.dataset.subset = "x"; today only unset'),
        ("train.train_policy.trainer_type=other", "train.train_policy.trainer_type"),
    ],
)
def test_what_is_documented_but_not_built_is_valid_and_named(
    toml: Callable[..., Path], override: str, part: str
) -> None:
    [line] = unsupported_settings(load_config(toml(), [override]))
    assert part in line


@pytest.mark.parametrize(
    "override",
    [
        "policy.parallelism.dp_shard_size=8",
        "policy.parallelism.dp_shard_size=-1",
        "policy.parallelism.dp_replicate_size=2",
        "train.optm_lr={global=1e-4, '^x'=1e-5}",
        "train.optm_lr=[1e-4]",
        "train.optm_impl=['foreach']",
        "train.optm_name=AdamW8bit",
        "train.fsdp_reshard_after_forward=never",
        "policy.diffusers.weighting_scheme=cosmap",
        "policy.trainable_map={'^blocks'=false}",
        "train.ckpt.save_freq_in_epoch=1",
        "train.train_policy.enable_dataset_cache=true",
        "train.train_policy.cache.max_gb=0.5",
        "logging.logger=['tensorboard','trackio']",
        "profiler.enable_profiler=true",
        "validation.dataset.subset=x",  # not read, as nothing is validated
    ],
)
def test_what_this_version_can_do_is_runnable_and_noted_nowhere(toml: Callable[..., Path], override: str) -> None:
    config = load_config(toml(), [override])
    assert unsupported_settings(config) == []
    assert notes(config) == []


def test_a_key_without_effect_is_accepted_and_named_once(toml: Callable[..., Path]) -> None:
    config = load_config(toml(more="sync_weight_interval = 2\nasync_tp_enabled = false\n[rollout]\nbackend = 'vllm'\n"))
    assert unsupported_settings(config) == []
    assert notes(config) == [
        "Upstream keys that can have no effect here: train.sync_weight_interval, rollout.backend",
    ]


def test_keys_of_another_job_are_named_as_not_read(toml: Callable[..., Path]) -> None:
    config = load_config(toml(more="[rollout]\nn_generation = 8\n[policy.diffusers]\ntrain_frames = 93\n"))
    assert unsupported_settings(config) == []
    assert notes(config) == [
        "Keys of other jobs that this one does not read: policy.diffusers.train_frames, rollout.n_generation",
    ]


def test_a_run_that_saves_nothing_gets_a_note(toml: Callable[..., Path]) -> None:
    [note] = notes(load_config(toml(), ["train.ckpt.enable_checkpoint=false"]))
    assert note.startswith("train.ckpt.enable_checkpoint = false: a run that is interrupted")


def test_a_plain_run_breaks_no_rule(toml: Callable[..., Path]) -> None:
    config = load_config(toml())
    assert cross_check(config) == []
    assert unsupported_settings(config) == []
