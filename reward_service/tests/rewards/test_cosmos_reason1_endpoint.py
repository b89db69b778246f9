"""Cosmos-Reason1 through a local server that speaks the OpenAI protocol and sees what vLLM would."""

import base64
import hashlib
import io
import json
import re
import sys

import numpy as np
import pytest
import torch
from chat_server import ChatServer
from PIL import Image
from tiny_reward_models import save_qwen

from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.rewards import video_frames
from cosmos_rl_reward.rewards.chat_endpoint import EndpointError
from cosmos_rl_reward.rewards.cosmos_reason1 import CosmosReason1
from cosmos_rl_reward.worker.scorer import Scorer

MODEL = "nvidia/Cosmos-Reason1-7B-Reward"
rng = np.random.default_rng(3)
# one even colour each, so that a server can distinguish the videos after JPEG
VIDEOS = np.broadcast_to(np.array([20, 90, 160, 230], np.uint8)[:, None, None, None, None], (4, 3, 5, 90, 120)).copy()
INFOS = [{"video_fps": 8.0}] * 4


def frames_of(request):
    head, *frames = request["messages"][1]["content"][0]["video_url"]["url"].split(",")
    assert head == "data:video/jpeg;base64"
    images = [Image.open(io.BytesIO(base64.b64decode(frame, validate=True))) for frame in frames]
    assert {image.format for image in images} == {"JPEG"}
    return [np.asarray(image) for image in images]


def completion(top, **more):
    listed = [{"token": token, "logprob": value, "bytes": None} for token, value in top.items()]
    first = {"token": "Yes", "logprob": -0.1, "top_logprobs": listed}
    return {"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [first]}}], **more}


class Server(ChatServer):
    """Answers with ``reply(request) -> completion``, or with ``status`` and an error."""

    def __init__(self):
        super().__init__(MODEL)
        self.status = 200
        self.reply = lambda request: completion({"Yes": -1.0, "No": -0.5})

    def answer(self, request):
        return (200, self.reply(request)) if self.status == 200 else (self.status, {"error": "out of memory"})


@pytest.fixture
def server():
    one = Server()
    yield one
    one.close()


def ready(server, **options):
    reward = CosmosReason1(endpoint_url=server.url, endpoint_api_key="sk-secret", options={"retries": 0, **options})
    reward.set_up()
    return reward


def result(server, count=1, **options):
    return ready(server, **options).calculate_reward(torch.from_numpy(VIDEOS[:count]), {"video_infos": INFOS[:count]})


def by_colour(pairs):
    """A reply that gives each of ``VIDEOS`` its own pair of log-probabilities."""

    def reply(request):
        colour = frames_of(request)[0].mean()
        yes, no = pairs[int(np.argmin(np.abs(VIDEOS[:, 0, 0, 0, 0] - colour)))]
        return completion({"Yes": yes, "No": no, " Yes": -0.01, "yes": -0.02, "NO": -0.03})

    return reply


def test_the_score_is_the_softmax_over_two_and_follows_its_sample(server):
    pairs = np.array([(-0.2, -1.9), (-3.0, -0.06), (-8.0, -2.5), (-0.7, -0.69)])
    server.reply = by_colour(pairs)
    reward = ready(server)
    scores = reward.calculate_reward(VIDEOS, {"video_infos": INFOS})["scores"]
    expected = np.exp(pairs[:, 1]) / np.exp(pairs).sum(1)
    np.testing.assert_allclose(scores["no_score"], expected, rtol=0, atol=1e-12)
    assert scores["prediction"] == ["Bad", "Good", "Good", "Good"]
    order = [2, 0, 3, 1]
    again = reward.calculate_reward(VIDEOS[order], {"video_infos": INFOS})["scores"]
    assert again["no_score"] == [scores["no_score"][k] for k in order]
    # log-probabilities are no logits, and no value at all would count as a failure
    assert set(scores) == {"prediction", "no_score"} == set(reward.score_keys)
    assert set(CosmosReason1.score_keys) == {"prediction", "no_score", "yes_logit", "no_logit"}


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ({"Yes": -0.001, "the": -7.5, "so": -9.0}, np.exp(-9.0) / (np.exp(-9.0) + np.exp(-0.001))),  # 1.2e-4
        ({"the": -7.5, "No": -0.001, "so": -9.0}, np.exp(-0.001) / (np.exp(-9.0) + np.exp(-0.001))),
    ],
)
def test_a_bound_stands_for_a_token_that_cannot_matter(server, top, expected):
    server.reply = lambda request: completion(top)
    answer = result(server)
    assert answer["scores"]["no_score"] == [pytest.approx(expected, abs=1e-12)]
    assert answer["scores"]["prediction"] == ["Good" if "No" in top else "Bad"]
    assert answer["item_errors"] == {}


@pytest.mark.parametrize(
    ("top", "reason"),
    [
        ({"Yes": -0.5, "the": -1.5, "so": -6.5}, "No is not among the 3 likeliest tokens.*up to 0.00247"),
        ({"No": -0.5, "the": -1.5}, "Yes is not among the 2 likeliest tokens.*up to 0.269"),
        ({" Yes": -0.5, "no": -1.5, "YES": -2}, "neither Yes nor No is among the 3 likeliest tokens: ' Yes', 'no', "),
        ({}, "neither Yes nor No is among the 0 likeliest"),
        ({"Yes": float("nan"), "No": -1.0}, "not finite"),
    ],
)
def test_a_number_is_never_made_up(server, top, reason):
    server.reply = lambda request: completion(top)
    answer = result(server, 2)
    assert answer["scores"] == {"prediction": [None] * 2, "no_score": [None] * 2}
    assert all(re.search(reason, answer["item_errors"][index]) for index in range(2))


def test_what_is_sent(server, tmp_path):
    (tmp_path / "system.txt").write_text("look well\n")
    reward = ready(server, system_prompt=str(tmp_path / "system.txt"), question="is it odd?")
    video = rng.integers(0, 256, (1, 3, 161, 168, 196), dtype=np.uint8)  # 161 frames: every second one
    reward.calculate_reward(torch.from_numpy(video), {"prompts": ["a cat"], "video_infos": [{"video_fps": 24.0}]})
    (request,) = server.requests
    assert server.headers == ["Bearer sk-secret"]
    system, user = request.pop("messages")
    assert system == {"role": "system", "content": [{"type": "text", "text": "look well"}]}
    assert user["role"] == "user"
    assert [part["type"] for part in user["content"]] == ["video_url", "text"]
    assert user["content"][1]["text"] == "is it odd?"
    assert request == {
        "model": MODEL,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 20,
        "mm_processor_kwargs": {"fps": 12.0, "do_resize": False, "do_sample_frames": False},
        "media_io_kwargs": {"video": {"num_frames": 80, "fps": 12.0}},
    }
    request["messages"] = [system, user]
    frames = frames_of(request)
    assert [frame.shape for frame in frames] == [(168, 196, 3)] * 80
    sent = video[0, :, :160:2].transpose(1, 2, 3, 0).astype(int)
    assert np.abs(np.stack(frames) - sent).mean() < 4  # noise, the hardest case for JPEG
    other = ready(server, ask_prompts=True)
    other.calculate_reward(VIDEOS[:1], {"prompts": ["is the cat real?"], "video_infos": INFOS[:1]})
    assert server.requests[-1]["messages"][1]["content"][1]["text"] == "is the cat real?"
    # 90 x 120 is below the least size: the same frames as for the model in the process
    local = video_frames.resize_frames(VIDEOS[0, :, :4].transpose(1, 0, 2, 3), 25_088, 10**7)
    assert [frame.shape for frame in frames_of(server.requests[-1])] == [(*local.shape[2:], 3)] * 4


def test_frames_that_the_server_left_out_are_noticed(server):
    reward = ready(server, question="is it odd?")
    system = server_words(reward, server)
    least = 2 * 5 * 7 + 3 + system  # 4 frames of 140 x 196, and at least one token for each word
    for counted, expected in ((least, 0.5), (None, 0.5), (least - 1, None)):
        server.reply = lambda request, n=counted: completion({"Yes": -1, "No": -1}, usage={"prompt_tokens": n})
        answer = reward.calculate_reward(VIDEOS[:1], {"video_infos": INFOS[:1]})
        assert answer["scores"]["no_score"] == [expected]
    reason = answer["item_errors"][0]
    assert f"read {least - 1} tokens where 4 frames of 196 x 140 and the text make at least {least}" in reason
    assert '--media-io-kwargs \'{"video": {"num_frames": -1}}\'' in reason


def server_words(reward, server):
    """How many words the system prompt has that the server received."""
    reward.calculate_reward(VIDEOS[:1], {"video_infos": INFOS[:1]})
    return len(server.requests[-1]["messages"][0]["content"][0]["text"].split())


def test_samples_that_cannot_be_asked_about(server):
    reward = ready(server)
    infos = [{"video_fps": 8.0}, {}]
    answer = reward.calculate_reward(VIDEOS[:2], {"video_infos": infos})
    assert answer["item_errors"] == {1: "metadata.video_infos[1].video_fps is missing"}
    assert answer["scores"]["no_score"][1] is None
    assert answer["scores"]["no_score"][0] == pytest.approx(1 / (1 + np.exp(-0.5)))
    assert len(server.requests) == 1


def test_a_server_error_is_the_samples_error_and_an_outage_the_jobs(server):
    usual = server.reply

    def reply(request):
        return {"choices": []} if frames_of(request)[0].mean() < 50 else usual(request)

    server.reply = reply
    answer = result(server, 2)
    assert answer["scores"]["no_score"][0] is None
    assert answer["scores"]["no_score"][1] == pytest.approx(1 / (1 + np.exp(-0.5)))
    assert "no chat completion" in answer["item_errors"][0]
    server.reply = lambda request: {"choices": [{"message": {"content": "Yes"}, "logprobs": None}]}
    with pytest.raises(EndpointError, match="no choices.0..logprobs"):
        result(server)
    server.status = 500
    with pytest.raises(EndpointError, match="answered 500.*out of memory"):
        result(server, 2)


def test_why_it_is_not_ready(server, tmp_path):
    server.models_status = 401
    with pytest.raises(NotReady, match="endpoint_api_key.*401") as refused:
        ready(server)
    assert "sk-secret" not in str(refused.value)
    server.models_status, server.models = 200, ["other"]
    with pytest.raises(NotReady, match=f"does not serve '{MODEL}'; it serves other"):
        ready(server)
    assert ready(server, model="other").options["model"] == "other"
    with pytest.raises(NotReady, match="system_prompt: no file"):
        ready(server, system_prompt="/no/such/file")
    (tmp_path / "system.txt").write_bytes(b"caf\xe9")
    with pytest.raises(NotReady, match=r"system\.txt: is not UTF-8 text \(byte 0xe9 at position 3\); save it as UTF-8"):
        ready(server, system_prompt=str(tmp_path / "system.txt"))


def test_nothing_is_fetched_and_the_record_names_the_server(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import would fail
    url = server.url.replace("//", "//me:hidden-word@")
    reward = CosmosReason1(endpoint_url=url, endpoint_api_key="sk-secret", device="cuda")
    assert reward.fetch(offline=True) is None
    reward.set_up()
    record = reward.provenance()
    assert (record["endpoint"], record["model"]) == (server.url, MODEL)
    assert record["frames"] == "JPEG, quality 95"
    assert record["system_prompt_digest"].startswith("sha256:")
    assert not {"model_digest", "dtype", "device"} & set(record)
    assert not [secret for secret in ("hidden-word", "sk-secret") if secret in json.dumps(record)]


def test_the_worker_starts_it_and_tests_it(server):
    def reply(request):
        seen = hashlib.sha256(b"".join(frame.tobytes() for frame in frames_of(request))).digest()[0]
        return completion({"Yes": -1 - seen / 100, "No": -1})

    server.reply = reply
    kwargs = {"device": "cpu", "endpoint_url": server.url, "endpoint_api_key": "", "options": {"retries": 0}}
    start = {"op": "score", "name": "cosmos_reason1", "reward_class": "", "function": "", "self_test": True}
    scorer = Scorer({**start, "kwargs": kwargs})
    assert scorer.warning.startswith("system prompt or question are in our own words")
    assert len(server.requests) == 2
    about = scorer.describe()
    assert about["score_keys"] == ["prediction", "no_score"]
    assert about["provenance"]["endpoint"] == server.url
    server.reply = lambda request: completion({"Yes": -1, "No": -1})
    assert "same scores" in Scorer({**start, "kwargs": kwargs}).warning
    fetched = Scorer({**start, "op": "fetch", "offline": True, "kwargs": kwargs})
    assert fetched.fetched == {"fetched": None, "needs_latent_decoder": True}


def test_both_ways_agree(server, tmp_path):
    save_qwen(tmp_path, "2.5")
    local = CosmosReason1(model_path=str(tmp_path), dtype="float32")
    local.set_up()
    videos = rng.integers(0, 256, (3, 3, 4, 168, 168), dtype=np.uint8)
    here = local.calculate_reward(videos, {"video_infos": INFOS[:3]})["scores"]
    assert "model" not in local.provenance()  # an option of the other way
    asked = iter(range(3))

    def reply(request):
        k = next(asked)  # one request at a time
        others = np.linspace(-3, 2, 50)
        logits = np.concatenate([[here["yes_logit"][k], here["no_logit"][k]], others])
        listed = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        names = ["Yes", "No", *(f"t{n}" for n in range(50))]
        return completion(dict(sorted(zip(names, listed.tolist(), strict=True), key=lambda e: -e[1])))

    server.reply = reply
    there = ready(server, concurrency=1).calculate_reward(videos, {"video_infos": INFOS[:3]})["scores"]
    np.testing.assert_allclose(there["no_score"], here["no_score"], rtol=0, atol=1e-6)
    assert there["prediction"] == here["prediction"]
    assert np.ptp(here["no_score"]) > 1e-4
