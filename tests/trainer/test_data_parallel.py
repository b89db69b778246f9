"""How samples are split over optimiser steps and ranks, and what is reduced over ranks."""

import functools
import itertools
import math
import pickle
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, DiffusersConfig
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.policy.config.policy import SampleConfig
from cosmos_rl.policy.trainer.data_parallel import optimizer_batches, split_evenly
from cosmos_rl.policy.trainer.peers import compare_fingerprints, compare_peers
from cosmos_rl.policy.trainer.rl.scoring import Scoring
from cosmos_rl.rollout.sampler import Rollouts, Sample
from tests.support.scored import config, make
from tests.support.toy_models import PlaneModel


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(73, 72, [37, 36]), (144, 72, [72, 72]), (72, 72, [72]), (5, 72, [5]), (200, 72, [67, 67, 66]), (0, 72, [])],
)
def test_the_optimiser_batches_of_a_pass_are_as_equal_as_can_be(count: int, size: int, sizes: list[int]) -> None:
    kept = [3 * i for i in range(count)]
    batches = optimizer_batches(kept, size=size, passes=2, seed=0, purpose="nft", step=1)
    assert [len(batch) for batch in batches] == 2 * sizes
    passes = [list(itertools.chain(*part)) for part in (batches[: len(sizes)], batches[len(sizes) :])]
    assert all(sorted(each) == kept for each in passes)
    if len(sizes) > 1:
        assert passes[0] != passes[1] != kept  # shuffled, each in its own way
    assert optimizer_batches(kept, size=None, passes=1, seed=0, purpose="nft", step=1) == ([kept] if kept else [])


def test_the_share_of_sigmas_is_that_of_the_decimal_number() -> None:
    """A float just below the product, 28.999999999999996 for 0.58 x 50, must not cost a level."""
    diffusers = {"timesteps_fraction": 0.58, "sample": {"num_steps": 50}}
    job = {"type": "grpo", "trainer_type": "diffusion_nft"}
    config = Config.from_dict({"policy": {"diffusers": diffusers}, "train": {"train_policy": job}})
    assert plan_online(config).sigmas == 29
    for steps in range(1, 101):
        for percent in range(1, 101):
            config = DiffusersConfig(timesteps_fraction=percent / 100, sample=SampleConfig(num_steps=steps))
            assert config.trained_levels == math.floor(Fraction(percent, 100) * steps), (steps, percent)


# ---- over ranks ----------------------------------------------------------------------------------------------------


Function = Callable[[Context], object]


@pytest.fixture
def run_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[object]]:
    """Runs a function as several ranks, threads here, that are joined by gloo itself."""
    world = threading.local()

    def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        (group or world.group).allreduce([tensor], options).wait()

    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        (group or world.group).allgather([parts], [tensor]).wait()

    def broadcast_object_list(objects: list[object], group: dist.ProcessGroup, group_src: int) -> None:
        options, sent = dist.BroadcastOptions(), pickle.dumps(objects)
        options.rootRank = group_src
        length = torch.tensor(len(sent))
        group.broadcast([length], options).wait()
        data = torch.zeros(int(length), dtype=torch.uint8)
        if group.rank() == group_src:
            data = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        group.broadcast([data], options).wait()
        objects[:] = pickle.loads(data.numpy().tobytes())

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast_object_list)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather", all_gather)

    def run(function: Function, ranks: int = 2, cp_size: int = 1) -> list[object]:
        store = dist.HashStore()
        results: list[object] = [None] * ranks

        def start(rank: int) -> None:
            world.group = dist.ProcessGroupGloo(dist.PrefixStore("world", store), rank, ranks)
            peers = dist.PrefixStore(f"cp {rank % cp_size}", store)
            data: Any = dist.ProcessGroupGloo(peers, rank // cp_size, ranks // cp_size) if cp_size > 1 else None
            neighbours = dist.PrefixStore(f"dp {rank // cp_size}", store)
            shared: Any = dist.ProcessGroupGloo(neighbours, rank % cp_size, cp_size) if cp_size > 1 else None
            context = Context(torch.device("cpu"), rank, ranks, cp_size=cp_size, dp_group=data, cp_group=shared)
            results[rank] = function(context)

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    return run


@pytest.mark.parametrize("lost", [0, 1])
def test_a_maximum_over_ranks_keeps_nan_whoever_has_it(run_ranks: Callable[..., list[object]], lost: int) -> None:
    found = run_ranks(lambda context: context.max_over_ranks([math.nan if context.rank == lost else 1.0, context.rank]))
    for values in found:
        assert math.isnan(values[0])  # type: ignore[index]
        assert values[1] == 1.0  # type: ignore[index]
    assert run_ranks(lambda context: context.max_over_ranks([-math.inf])) == [[-math.inf]] * 2
    assert math.isnan(Context(torch.device("cpu")).max_over_ranks([math.nan])[0])


def test_context_parallel_peers_count_once_and_all_ranks_have_a_vote(run_ranks: Callable[..., list[object]]) -> None:
    """Four ranks, two shares of the data: ranks 0 and 1 have the first one, 2 and 3 the second."""

    def function(context: Context) -> object:
        rows = torch.tensor([[10.0 * context.dp_rank], [10.0 * context.dp_rank + 1]])
        return (
            (context.dp_rank, context.dp_size),
            context.sum_over_ranks([1.0, 5.0 * context.dp_rank]),
            context.gather_rows(rows).flatten().tolist(),
            context.max_over_ranks([float(context.rank == 1)]),  # a signal that one rank got
        )

    found = run_ranks(function, ranks=4, cp_size=2)
    rest = ([2.0, 5.0], [0.0, 1.0, 10.0, 11.0], [1.0])
    assert found == [((rank // 2, 2), *rest) for rank in range(4)]


def test_samples_are_split_by_the_index_of_the_data() -> None:
    peers = [Context(torch.device("cpu"), rank, 4, cp_size=2) for rank in range(4)]
    splits = [split_evenly(range(5), peer.dp_rank, peer.dp_size) for peer in peers]
    assert splits[0] == splits[1]
    assert splits[2] == splits[3]
    assert splits[0].indices + splits[2].indices == (0, 1, 2, 3, 4, 0)
    assert splits[0].weights + splits[2].weights == (1.0,) * 5 + (0.0,)


def test_ranks_take_samples_in_blocks_or_in_turn() -> None:
    blocks = [split_evenly([7, 8, 9, 10, 11], rank, 2) for rank in range(2)]
    assert [split.indices for split in blocks] == [(7, 8, 9), (10, 11, 7)]
    assert [split.positions for split in blocks] == [(0, 1, 2), (3, 4, 0)]
    in_turn = [split_evenly([7, 8, 9, 10, 11], rank, 2, in_turn=True) for rank in range(2)]
    assert [split.indices for split in in_turn] == [(7, 9, 11), (8, 10, 7)]
    assert [split.positions for split in in_turn] == [(0, 2, 4), (1, 3, 0)]
    assert [split.weights for split in in_turn] == [(1.0, 1.0, 1.0), (1.0, 1.0, 0.0)]


def test_peers_share_the_scores_of_one_request(run_ranks: Callable[..., list[object]]) -> None:
    """The reward is another one at every call, as a judge that draws may be."""
    calls: list[tuple[str, float]] = []
    lock = threading.Lock()

    def moody(to_be_evaluated: torch.Tensor, prompt: str, **_: object) -> float | None:
        with lock:
            calls.append((prompt, float(len(calls))))
            return None if prompt == "a1" else calls[-1][1]

    def function(context: Context) -> object:
        names = [f"{'ab'[context.dp_rank]}{k}" for k in range(3)]
        samples = tuple(Sample(k, k, name, {}) for k, name in enumerate(names))
        rewards = make({"moody": moody})
        media = torch.zeros(3, 4, 4, 3, dtype=torch.uint8)
        rollouts = Rollouts(samples, torch.zeros(3, 1, 2, 2), media, torch.ones(3, dtype=torch.bool))
        scoring = Scoring(rewards, PlaneModel(), online_table(config()), 3, context)
        table = scoring.wait(scoring.submit(rollouts))
        rewards.close()
        return names, table.total_N.tolist(), table.scores["moody"].tolist(), dict(table.reasons)

    found = run_ranks(function, ranks=4, cp_size=2)
    assert sorted(name for name, _ in calls) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    for names, totals, scores, reasons in found:  # type: ignore[misc]
        numbers = dict(calls)
        expected = [math.nan if name == "a1" else numbers[name] for name in names]
        np.testing.assert_array_equal(totals, expected)
        np.testing.assert_array_equal(scores, expected)
        assert list(reasons) == ([1] if names[0] == "a0" else [])


def test_peers_that_do_not_have_the_same_samples_are_named_on_all_ranks(
    run_ranks: Callable[..., list[object]],
) -> None:
    def function(context: Context, *, other: dict[int, torch.Tensor]) -> str:
        value = torch.arange(6.0).reshape(2, 3) + context.dp_rank
        try:
            compare_peers("their noise", [other.get(context.rank, value)], context)
        except UserError as error:
            return str(error)
        return ""

    rounding = {1: torch.arange(6.0).reshape(2, 3) * (1 + 1e-6)}
    assert run_ranks(functools.partial(function, other=rounding), ranks=4, cp_size=2) == [""] * 4
    for wrong in (torch.zeros(2, 3), torch.zeros(2, 4)):
        found = run_ranks(functools.partial(function, other={3: wrong}), ranks=4, cp_size=2)
        assert all("ranks 2 and 3 share the samples of one data-parallel rank" in str(text) for text in found)
        assert all("(policy.parallelism.cp_size = 2), but their noise differ by" in str(text) for text in found)


def test_peers_with_other_data_are_named_on_all_ranks_by_what_differs(run_ranks: Callable[..., list[object]]) -> None:
    def function(context: Context, *, wrong: int | None) -> str:
        prompts = "8 (0d5f)" if context.rank != wrong else "8 (77ab)"
        try:
            compare_fingerprints({"seed": 0, "prompts": prompts, "of the share": context.dp_rank}, context)
        except UserError as error:
            return str(error)
        return ""

    assert run_ranks(functools.partial(function, wrong=None), ranks=4, cp_size=2) == [""] * 4
    for wrong, ranks in ((3, "2 and 3"), (0, "0 and 1")):
        found = run_ranks(functools.partial(function, wrong=wrong), ranks=4, cp_size=2)
        assert all(f"ranks {ranks} share the samples of one data-parallel rank" in str(text) for text in found)
        assert all("(policy.parallelism.cp_size = 2), but prompts differ; data," in str(text) for text in found)
