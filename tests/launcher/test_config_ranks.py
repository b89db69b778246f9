"""How many ranks a configuration gets on a machine."""

from typing import Any

import pytest

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.machine import gpus
from cosmos_rl.policy.config import Config, data_ranks, world_size
from cosmos_rl.policy.config.ranks import resolve_world_size, with_world_size


def config(device: str = "auto", **sizes: Any) -> Config:
    tables = {"policy": {"parallelism": sizes}, "rollout": {"parallelism": sizes}, "train": {"device": device}}
    return Config.from_dict(tables)


def ranks_of(fitted: Config) -> tuple[int, int, int]:
    sizes = fitted.policy.parallelism
    return world_size(sizes), sizes.dp_shard_size, sizes.dp_replicate_size


@pytest.mark.parametrize(
    ("asked", "nproc", "gpus", "got"),
    [
        ({"dp_shard_size": 8}, None, 0, (1, 1, 1)),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, None, 0, (1, 1, 1)),
        ({"dp_shard_size": -1}, None, 0, (1, 1, 1)),
        ({"dp_shard_size": 8}, 2, 0, (2, 2, 1)),
        ({}, 4, 0, (4, 4, 1)),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, 4, 0, (4, 2, 2)),
        ({"dp_shard_size": 8}, None, 8, (8, 8, 1)),
        ({"dp_shard_size": 2}, None, 8, (2, 2, 1)),
        ({"dp_shard_size": -1}, None, 8, (8, 8, 1)),
        ({"dp_shard_size": -1, "dp_replicate_size": 2}, None, 8, (8, 4, 2)),
        ({"dp_shard_size": 8}, 1, 1, (1, 1, 1)),
        ({"dp_shard_size": 8, "device": "cpu"}, None, 8, (1, 1, 1)),
        ({"dp_shard_size": 8, "device": "cpu"}, 16, 8, (16, 16, 1)),
        ({"dp_shard_size": 4, "cp_size": 2}, None, 8, (8, 4, 1)),
        ({"dp_shard_size": -1, "dp_replicate_size": 2, "cp_size": 2}, None, 8, (8, 2, 2)),
        ({"dp_shard_size": 4, "cp_size": 2}, 4, 0, (4, 2, 1)),
        ({"cp_size": 2}, 2, 0, (2, 1, 1)),
        ({"dp_shard_size": 4, "cp_size": 2}, None, 0, (1, 1, 1)),
    ],
)
def test_a_cpu_runs_one_rank_a_gpu_machine_what_is_asked_and_a_flag_decides(
    asked: dict[str, Any], nproc: int | None, gpus: int, got: tuple[int, int, int]
) -> None:
    fitted = resolve_world_size(config(**asked), nproc, gpus)
    assert ranks_of(fitted) == got
    peers = asked.get("cp_size", 1) if got[0] > 1 else 1
    assert fitted.policy.parallelism.cp_size == peers
    assert data_ranks(fitted.policy.parallelism) * peers == got[0]
    assert fitted.rollout.parallelism == fitted.policy.parallelism


@pytest.mark.parametrize(
    ("asked", "nproc", "gpus", "message"),
    [
        (
            {"dp_shard_size": 8},
            None,
            1,
            "[policy.parallelism] (dp_shard_size 8 = 8 ranks) needs 8 GPUs, this machine has 1 GPU",
        ),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, None, 3, "(dp_shard_size 2 x dp_replicate_size 2 = 4 ranks)"),
        (
            {},
            4,
            2,
            "--nproc-per-node 4 needs 4 GPUs, this machine has 2 GPUs; --nproc-per-node 2 runs on what is there",
        ),
        ({"dp_replicate_size": 2}, 3, 0, "3 ranks are not a multiple of 2, the product of the other sizes"),
        ({"cp_size": 2}, 3, 0, "the product of the other sizes in [policy.parallelism]: cp_size 2"),
        ({"dp_shard_size": 4, "cp_size": 2}, None, 4, "(dp_shard_size 4 x cp_size 2 = 8 ranks) needs 8 GPUs"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    asked: dict[str, Any], nproc: int | None, gpus: int, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        resolve_world_size(config(**asked), nproc, gpus)
    assert message in str(caught.value)


def test_a_changed_number_of_ranks_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    resolve_world_size(config(dp_shard_size=8), None, 0)
    assert "on a CPU: 1 rank, policy.parallelism.dp_shard_size = 1 in place of 8" in capsys.readouterr().out
    resolve_world_size(config(), 2, 0)
    assert "--nproc-per-node 2: 2 ranks, policy.parallelism.dp_shard_size = 2 in place of 1" in capsys.readouterr().out
    resolve_world_size(config(cp_size=2), None, 0)
    assert "on a CPU: 1 rank, policy.parallelism.cp_size = 1 in place of 2" in capsys.readouterr().out
    resolve_world_size(config(), None, 0)
    assert capsys.readouterr().out == ""


def test_a_rollout_table_that_is_not_given_stays_so() -> None:
    assert with_world_size(Config(), 4).rollout.parallelism is None


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == 0
