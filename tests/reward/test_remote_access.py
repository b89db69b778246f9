"""The address and the token of the reward service, and its scores together with those of other rewards."""

from collections.abc import Callable
from itertools import combinations

import pytest

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.reward import access
from cosmos_rl.reward.access import find_missing_access, read_service_access
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.remote import RemoteScorer
from cosmos_rl.reward.table import RewardTable
from tests.support.reward_requests import WAIT, grey, request, table
from tests.support.reward_server import NOT_READY, RewardServer

# ---- the environment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generation", "expected"), [("REMOTE_REWARD", 0), ("WFM_REWARD", 3), ("DIFFUSION_REWARD", 3)])
def test_three_generations_of_names_are_read(
    server: RewardServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    generation: str,
    expected: int,
) -> None:
    monkeypatch.setattr(access, "_already_warned", set())
    values = {"ENQUEUE_URL": "http://h/enqueue", "FETCH_URL": "http://h/pull", "TOKEN": "t"}
    for name, value in values.items():
        monkeypatch.delenv(f"REMOTE_REWARD_{name}")
        monkeypatch.setenv(f"{generation}_{name}", value)
    for _ in range(2):
        found = read_service_access()
    assert (found.enqueue_url, found.fetch_url, found.token) == tuple(values.values())
    assert capsys.readouterr().out.count("is the name of an older version") == expected
    assert found.names["TOKEN"] == f"{generation}_TOKEN"


def test_the_newest_name_wins(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSION_REWARD_TOKEN", "oldest")
    monkeypatch.setenv("WFM_REWARD_TOKEN", "older")
    assert read_service_access().token == "s3cret"
    monkeypatch.delenv("REMOTE_REWARD_TOKEN")
    assert read_service_access().token == "older"


@pytest.mark.parametrize("present", [present for count in range(4) for present in combinations(range(3), count)])
def test_every_combination_of_the_three_names(
    present: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(access, "_already_warned", set())
    names = [f"{generation}_REWARD_ENQUEUE_URL" for generation in ("REMOTE", "WFM", "DIFFUSION")]
    for index, name in enumerate(names):
        monkeypatch.setenv(name, f"http://{index}:s3cret@host" if index in present else "")
        monkeypatch.setenv(name.replace("ENQUEUE", "FETCH"), "http://host")  # those agree
    missing = find_missing_access(Config.from_dict({"train": {"train_policy": RL}}))
    printed = capsys.readouterr().out
    assert bool(missing) == (not present)
    assert ("is the name of an older version" in printed) == (bool(present) and 0 not in present)
    assert ("differ; " in printed) == (len(present) > 1)
    assert all(f"{names[present[0]]} counts" in line for line in printed.splitlines() if "differ" in line)
    assert "s3cret" not in printed
    if present:
        access_found = read_service_access()
        assert access_found.enqueue_url == f"http://{present[0]}:s3cret@host"
        assert access_found.names["ENQUEUE_URL"] == names[present[0]]


def test_secrets_are_in_no_text(
    server: RewardServer,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., RemoteScorer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", "ftp://user:pa55word@host/x")
    with pytest.raises(UserError) as caught:
        read_service_access()
    assert "REMOTE_REWARD_ENQUEUE_URL: is not an address" in str(caught.value)
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", server.url.replace("//", "//user:pa55word@") + "/enqueue")
    server.take = lambda number, headers: (401, {"detail": "no"})
    with pytest.raises(UserError) as refused:
        start().submit(request()).result(WAIT)
    text = f"{caught.value} {refused.value} {read_service_access()} {capsys.readouterr().out}"
    assert "pa55word" not in text
    assert "s3cret" not in text


def test_the_time_for_an_upload_grows_with_its_size_within_bounds(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [read_service_access().upload_s(mib * 2**20) for mib in (0, 10, 50, 1000)] == [60.0, 60.0, 180.0, 600.0]
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_TIMEOUT_MAX_S", "100")
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S", "fast")
    assert read_service_access().upload_s(50 * 2**20) == 100.0
    assert 'REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S: found "fast"' in capsys.readouterr().out
    monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_TIMEOUT_S", "7")
    assert read_service_access().upload_s(50 * 2**20) == 7.0


RL = {"type": "grpo", "use_remote_reward": True}


def test_a_missing_address_is_named_before_anything_starts(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.from_dict({"train": {"train_policy": RL}})
    assert find_missing_access(config) == []
    monkeypatch.delenv("REMOTE_REWARD_FETCH_URL")
    [line] = find_missing_access(config)
    assert line.startswith("REMOTE_REWARD_FETCH_URL: missing in the environment")
    with pytest.raises(UserError, match="REMOTE_REWARD_FETCH_URL: missing"):
        make_rewards(config, None, validation=False)
    for without in ({**RL, "bypass_reward": True}, {"type": "grpo"}, {"type": "sft"}):
        assert find_missing_access(Config.from_dict({"train": {"train_policy": without}})) == []
    only_validation = {"enable": True, "remote_reward": {"batch_size": 2}}
    config = Config.from_dict({"train": {"train_policy": {"type": "grpo"}}, "validation": only_validation})
    assert len(find_missing_access(config)) == 1


# ---- together with the other rewards -------------------------------------------------------------------------------


def test_remote_and_local_rewards_add_up(server: RewardServer) -> None:
    job = {**RL, "remote_reward": {"scale": 2.0, "reward_fns": [{"name": "a", "weight": -3.0}]}}
    rewards = make_rewards(Config.from_dict({"train": {"train_policy": job}}), [lambda image: 0.25], validation=False)
    found: RewardTable = rewards.submit(request()).result(WAIT)
    assert found.total_N.tolist() == pytest.approx([0.25 - 6 * g for g in grey(2)])
    assert set(rewards.names) == set(found.scores) == {"<lambda>", "a"}
    server.pull = lambda job, reward, tries: (200, {"scores": {"a": [0.5, None]}, "item_errors": {"1": "no face"}})
    found = rewards.submit(request()).result(WAIT)
    assert found.missing_N.tolist() == [False, True]
    assert found.reasons == {1: "a: no face"}
    server.pull = lambda job, reward, tries: NOT_READY
    future = rewards.submit(request())
    rewards.close()
    with pytest.raises(RuntimeError, match="closed"):
        future.result(WAIT)


def test_wide_scores_get_a_wide_clip_and_a_word(server: RewardServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.pull = lambda job, reward, tries: (200, {"scores": {"hpsv3": [10.9, 7.1]}})
    scorer = RemoteScorer(table("hpsv3"))
    scorer.close()
    assert (scorer.sum.rewards[0].clip_min, scorer.sum.rewards[0].clip_max) == (-15.0, 15.0)
    assert "reward hpsv3: its scores are wide" in capsys.readouterr().out
