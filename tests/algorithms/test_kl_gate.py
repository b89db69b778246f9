"""Which samples GARDO's gate takes, against ranks by hand, and how its share follows their uncertainty."""

import numpy as np
import pytest
import torch

from cosmos_rl.algorithms.kl_gate import GateShare, gate_rows, measure_uncertainty

NAN = float("nan")


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_uncertain_is_what_the_trained_reward_ranks_above_the_others() -> None:
    reward = doubles(0.9, 0.1, 0.5, 0.7, 0.3)  # ranks 4 0 2 3 1 of 4
    aesthetic = doubles(1.0, 2.0, 3.0, 4.0, 5.0)  # 0 1 2 3 4
    image = doubles(10.0, 30.0, 20.0, 50.0, 40.0)  # 0 2 1 4 3
    found = measure_uncertainty(reward, [aesthetic, image])
    assert found.tolist() == pytest.approx([(4 - 0) / 4, (0 - 1.5) / 4, (2 - 1.5) / 4, (3 - 3.5) / 4, (1 - 3.5) / 4])
    assert gate_rows(found, 0.4).tolist() == [True, False, True, False, False]
    assert gate_rows(found, 0.1).tolist() == [True, False, False, False, False]  # one at least
    assert gate_rows(found, 1.0).tolist() == [True, False, True, False, False]  # and none below the others


def test_equal_scores_share_a_rank_and_rewards_that_agree_gate_nothing() -> None:
    reward = doubles(1.0, 1.0, 0.0, 2.0)
    assert measure_uncertainty(reward, [doubles(0.0, 1.0, 2.0, 3.0)]).tolist() == pytest.approx([0.5, 1 / 6, -2 / 3, 0])
    assert not gate_rows(measure_uncertainty(reward, [7 * reward + 1]), 0.5).any()


def test_a_missing_score_is_in_no_rank_and_its_sample_keeps_the_distance() -> None:
    reward, other = doubles(0.9, 0.5, 0.1, 0.7), doubles(0.0, NAN, 2.0, 1.0)
    found = measure_uncertainty(reward, [other])
    alone = measure_uncertainty(reward[[0, 2, 3]], [other[[0, 2, 3]]])
    assert found[[0, 2, 3]].tolist() == alone.tolist()
    assert bool(found[1].isnan())
    assert gate_rows(found, 0.1).tolist() == [True, True, False, False]
    nothing = measure_uncertainty(doubles(NAN, NAN), [doubles(0.0, 1.0)])
    assert gate_rows(nothing, 0.1).tolist() == [True, True]


def test_ranks_are_those_of_numpy() -> None:
    draws = np.random.default_rng(0).normal(size=(4, 200))
    ranks = draws.argsort(axis=1).argsort(axis=1) / 199
    found = measure_uncertainty(torch.from_numpy(draws[0]), [torch.from_numpy(row) for row in draws[1:]])
    expected = ranks[0] - ranks[1:].mean(0)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    chosen = np.flatnonzero(gate_rows(found, 0.1))
    assert set(chosen) == set(np.argsort(-expected)[:20])


def test_the_share_follows_what_is_more_or_less_uncertain_than_twenty_steps() -> None:
    state = GateShare(0.1)
    for number in range(20):
        state = state.follow(doubles(0.3 + 0.001 * number, -1.0), 0.02, 0.2)
        assert state.share == 0.1
    larger = state.follow(doubles(0.9, NAN), 0.02, 0.2)
    assert larger.share == pytest.approx(0.11)
    assert len(larger.means) == 20
    assert larger.means[-1] == 0.9
    assert state.follow(doubles(0.31), 0.02, 0.2).share == 0.1
    assert state.follow(doubles(0.2), 0.02, 0.2).share == pytest.approx(0.09)
    assert state.follow(doubles(-0.2), 0.02, 0.2).share == pytest.approx(0.09)  # none is above 0
    assert state.follow(doubles(0.9), 0.02, 0.105).share == 0.105
    assert state.follow(doubles(0.2), 0.095, 0.2).share == 0.095
