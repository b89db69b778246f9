"""rewards.toml: what is read, what is refused and how that is said."""

import re
import tomllib
from pathlib import Path

import pytest

from cosmos_rl_reward import cli
from cosmos_rl_reward.config import PACKAGED, DecodeArgs, RewardArgs, ServiceConfig, build, for_rewards, load
from cosmos_rl_reward.errors import UserError
from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.rewards import MODULES

DOCUMENTED = {
    "host": "localhost",
    "port": 8080,
    "redis_host": "localhost",
    "redis_port": 6379,
    "no_latent_decoder": False,
    "reward_args": [
        {
            "reward_type": "cosmos_reason1",
            "venv_python": "python",
            "model_path": "nvidia/Cosmos-Reason1-7B-Reward",
            "download_path": "/workspace",
            "setup_script": "",
            "dtype": "float16",
            "device": "cuda",
            "endpoint_url": "",
            "endpoint_api_key": "",
            "work_dir": "evaluation_results",
            "tmp_dir": "/tmp",
            "enable": True,
        }
    ],
    "decode_args": {
        "model_path": "/weights/vae.pth",
        "dtype": "float16",
        "device": "cuda",
        "chunk_duration": 81,
        "temporal_window": 16,
        "load_mean_std": False,
        "wan2pt2_model_path": "",
        "wan2pt2_credential_path": "",
    },
}


def test_a_file_with_every_documented_key_is_read():
    config = build(DOCUMENTED, "test")
    assert config.enabled[0].model_path == "nvidia/Cosmos-Reason1-7B-Reward"
    assert config.decode_args.model_path == "/weights/vae.pth"


def test_the_packaged_file_serves_rewards_that_need_nothing():
    config = load(None)
    assert [args.reward_type for args in config.enabled] == ["ocr", "jpeg_compressibility"]
    assert {args.reward_type for args in config.reward_args} <= MODULES.keys()
    assert load(None, port=9).port == 9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prot": 1}, "prot: unknown key; did you mean 'port'?"),
        (
            {"reward_args": [{"venv_pyhton": "x"}]},
            "reward_args[0].venv_pyhton: unknown key; did you mean 'venv_python'?",
        ),
        ({"reward_args": [{"normalisation": "x"}]}, "a reward's own settings go into [reward_args.options]"),
        ({"decode_args": {"modl_path": "x"}}, "decode_args.modl_path: unknown key; did you mean 'model_path'?"),
        ({"port": "many"}, "port: "),
        ({"port": 99999}, "port: "),
        ({"reward_args": [{"reward_type": "a"}, {"reward_type": "a"}]}, "'a' is enabled twice"),
        ({"reward_args": [{"reward_type": "_a"}]}, "reward_args[0].reward_type"),
        ({"reward_args": [{"reward_class": "a:B", "function": "a:b"}]}, "not both"),
        ({"reward_args": [{"reward_class": "a.B"}]}, "must look like 'module:name'"),
        ({"blob_store": "gs://bucket"}, "is not a folder"),
    ],
)
def test_mistakes_are_named(change, words):
    with pytest.raises(UserError) as refused:
        build({"reward_args": [], **change}, "my.toml")
    assert str(refused.value).startswith("my.toml: ")
    assert words in str(refused.value)


def test_files_that_are_not_there_or_not_toml(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml: No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("port = \n")
    with pytest.raises(UserError, match=r"bad\.toml: not valid TOML: .*line 1"):
        load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("utf-16-le", "has null characters, as UTF-16 without a byte order mark; save it as UTF-8"),
        ("utf-16", "is not UTF-8 text but UTF-16; save it as UTF-8"),
        ("latin-1", r"is not UTF-8 text \(byte 0xe9 at position 5\); save it as UTF-8"),
    ],
)
def test_a_file_in_another_encoding_is_named(tmp_path, encoding, words):
    (tmp_path / "my.toml").write_bytes("# caf\xe9\nport = 8080\n".encode(encoding))
    with pytest.raises(UserError, match=rf"my\.toml: {words}"):
        load(tmp_path / "my.toml")
    (tmp_path / "my.toml").write_bytes("port = 8080\n".encode("utf-8-sig"))  # as Windows editors save it
    assert load(tmp_path / "my.toml").port == 8080


def test_environment_and_broker(monkeypatch):
    monkeypatch.delenv("COSMOS_RL_REWARD_BROKER_URL", raising=False)
    assert build({}, "test").external_broker == ""
    assert build({"redis_host": "other", "redis_port": 7000}, "test").external_broker == "redis://other:7000"
    assert build({"redis_host": "other", "redis_port": 0}, "test").external_broker == ""
    monkeypatch.setenv("COSMOS_RL_REWARD_BROKER_URL", "rediss://x")
    assert build({"broker_url": "redis://y"}, "test").external_broker == "rediss://x"
    monkeypatch.setenv("COSMOS_RL_REWARD_MAX_PENDING_TASKS", "17")
    assert build({}, "test").max_queued_jobs == 17
    assert build({"max_queued_jobs": 5}, "test").max_queued_jobs == 5
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert build({}, "test").spool_dir == Path("/state/cosmos_rl_reward/spool")
    assert build({"blob_store": "/shared"}, "test").spool_dir == Path("/shared")


def test_secrets_do_not_show():
    config = build({"broker_url": "redis://:pass@x", "reward_args": [{"endpoint_api_key": "key-of-mine"}]}, "test")
    assert "pass@" not in repr(config)
    assert "key-of-mine" not in repr(config)


def test_rewards_without_a_file(capsys):
    assert [args.reward_type for args in for_rewards(["mock", "ocr"]).enabled] == ["mock", "ocr"]
    assert cli.main(["--rewards", "mock", "--config", "x.toml"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert cli.main(["--config", str(PACKAGED), "worker"]) == 2
    assert "broker_url and blob_store" in capsys.readouterr().err


def test_every_key_is_in_the_readme():
    """The README's tables and the schema name the same keys."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    for table in (ServiceConfig, RewardArgs, DecodeArgs):
        for name in table.model_fields:
            assert f"`{name}`" in text, name
    for block in re.findall(r"```toml\n(.*?)```", text, re.S):
        data = tomllib.loads(block)
        build({k: v for k, v in data.items() if k in ServiceConfig.model_fields}, "README")
        assert data.keys() <= ServiceConfig.model_fields.keys()


def test_the_registry_as_documented():
    class One(BaseRewardHandler):
        reward_name = "registry-test"

    class Two(BaseRewardHandler):
        reward_name = "registry-test"

    assert RewardRegistry.register()(One) is One
    with pytest.raises(ValueError, match="allow_override=True"):
        RewardRegistry.register()(Two)
    RewardRegistry.register(allow_override=True)(Two)
    assert RewardRegistry.get_reward_class("registry-test") is Two
    with pytest.raises(ValueError, match="unknown reward 'nothing'"):
        RewardRegistry.get_reward_class("nothing")

    class Options(BaseRewardHandler):
        reward_name = "options-test"
        OPTIONS = {"size": 3}

    handler = Options(model_path="m", device="cpu", options={})
    assert (handler.model_path, handler.options) == ("m", {"size": 3})
    with pytest.raises(NotReady, match="did you mean 'size'"):
        Options(options={"sise": 4})
