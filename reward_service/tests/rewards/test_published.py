"""What is downloaded, by whom, and what is said while it is not there: weights and the published questions."""

import importlib
import json

import huggingface_hub
import numpy as np
import pytest
from chat_server import ChatServer

from cosmos_rl_reward.decode import LatentDecoder
from cosmos_rl_reward.handler import NotReady, RewardRegistry
from cosmos_rl_reward.rewards import MODULES
from cosmos_rl_reward.rewards.cosmos_reason1 import CosmosReason1
from cosmos_rl_reward.rewards.unified_reward import UnifiedReward
from cosmos_rl_reward.spool import Spool
from cosmos_rl_reward.worker.scorer import Scorer
from tests.service import body
from tests.test_pool import ident, spooled

WITH_WEIGHTS = ("pickscore", "hpsv2", "hpsv3", "image_reward", "gen_eval", "cosmos_reason1", "dance_grpo")
# a file like the published ones, not their words
UNIFIED = """prompt = ""
question = f"<image>\\nHow well is {{this}} drawn? End with \\'Final Score:\\'.\\nText: [{prompt}]"
"""
REASON = 'SYSTEM_PROMPT = """Look closely.\nSay Yes or No."""\nUSER_PROMPT = "Is anything odd?"\n'


@pytest.mark.parametrize("name", [*WITH_WEIGHTS, "latent decoder"])
def test_a_start_never_downloads(name, monkeypatch, tmp_path):
    """A typing error in model_path used to ask the hub, and a first start loaded 16 GB within start_timeout_s."""

    def snapshot(repository, local_files_only=False, **_):
        assert local_files_only, f"{repository} would be downloaded"
        raise FileNotFoundError("not in the cache")

    def file(repository, name, **_):
        raise AssertionError(f"{repository}/{name} would be downloaded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", file)
    monkeypatch.setattr("cosmos_rl_reward.rewards.weights.find_spec", lambda name: True)
    if name == "latent decoder":
        one = LatentDecoder("no/such-vae", "", "float32", "cpu", 1 << 20)
    else:
        importlib.import_module(f"cosmos_rl_reward.rewards.{MODULES[name]}")
        one = RewardRegistry.get_reward_class(name)(download_path=str(tmp_path), model_path="no/such-model")
    with pytest.raises(NotReady, match="run cosmos-rl-reward-prepare, which downloads it"):
        one.set_up()


@pytest.fixture
def server():
    class Five(ChatServer):
        def answer(self, request):
            return 200, {"choices": [{"message": {"content": "Final Score: 5"}}]}

    one = Five("UnifiedReward-7b-v1.5")
    yield one
    one.close()


def test_prepare_fetches_the_published_question(server, tmp_path, monkeypatch):
    published = tmp_path / "published.py"
    published.write_text(UNIFIED)
    monkeypatch.setattr("cosmos_rl_reward.rewards.unified_reward._PUBLISHED_URL", published.as_uri())

    def reward(**options):
        one = UnifiedReward(endpoint_url=server.url, download_path=str(tmp_path / "d"), options=options)
        one.set_up()
        return one

    assert "own words" in reward().warning
    missing = UnifiedReward(download_path=str(tmp_path / "d")).fetch(offline=True)
    assert missing
    assert "own words" in missing
    mine = tmp_path / "mine.txt"
    mine.write_text("[{prompt}]")
    assert reward(template=str(mine)).warning == ""
    UnifiedReward(download_path=str(tmp_path / "d")).fetch(offline=False)
    fetched = reward()
    assert fetched.warning == ""
    fetched.calculate_reward(np.zeros((1, 8, 8, 3), np.uint8), {"prompts": ["a cat"]})
    text = server.requests[-1]["messages"][0]["content"][1]["text"]
    assert text == "How well is {this} drawn? End with 'Final Score:'.\nText: [a cat]"
    published.unlink()
    with pytest.raises(NotReady, match="cannot be fetched from"):
        UnifiedReward(download_path=str(tmp_path / "other")).fetch(offline=False)
    assert not list((tmp_path / "other").rglob("*.py*"))


def test_prepare_fetches_the_words_of_cosmos_reason1(server, tmp_path, monkeypatch):
    published = tmp_path / "published.py"
    published.write_text(REASON)
    monkeypatch.setattr("cosmos_rl_reward.rewards.cosmos_reason1._PUBLISHED_URL", published.as_uri())

    def fetched(offline, **options):
        one = CosmosReason1(endpoint_url=server.url, download_path=str(tmp_path / "d"), options=options)
        one.fetch(offline)
        return one

    (tmp_path / "s.txt").write_text("mine")
    assert "own words" in fetched(True).warning
    assert "own words" in fetched(True, question="q").warning
    assert fetched(True, question="q", system_prompt=str(tmp_path / "s.txt")).warning == ""
    one = fetched(False)
    assert (one._system, one._question, one.warning) == ("Look closely.\nSay Yes or No.", "Is anything odd?", "")
    assert fetched(True, question="q")._system == one._system


def test_a_warning_is_shown_with_the_reward_and_in_each_result(server, tmp_path):
    kwargs = {"device": "cpu", "endpoint_url": server.url, "download_path": str(tmp_path), "options": {}}
    start = {"op": "score", "name": "unified_reward", "reward_class": "", "function": "", "self_test": False}
    scorer = Scorer({**start, "kwargs": kwargs})
    spool = Spool(tmp_path)
    job = spooled(spool, body(np.zeros((1, 8, 8, 3), np.uint8), "unified_reward"), ident(1))
    (reply,) = scorer.score([{"id": job.id, "path": str(spool.job_path(job.id)), "decoded": ""}])
    result = json.loads(reply["body"])
    assert result["scores"] == {"unified_reward": [1.0]}
    assert result["warning"] == scorer.describe()["warning"]
    assert "own words" in result["warning"]
    assert {"python", "torch", "transformers"} <= set(scorer.describe()["versions"])
    assert "dtype" not in result["provenance"]  # no model runs here
