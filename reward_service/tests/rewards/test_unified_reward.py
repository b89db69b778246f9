"""UnifiedReward against a local server that speaks the OpenAI protocol."""

import base64
import io
import json
import threading

import numpy as np
import pytest
from chat_server import ChatServer
from PIL import Image

from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.rewards.chat_endpoint import EndpointError
from cosmos_rl_reward.rewards.unified_reward import UnifiedReward

MODEL = "UnifiedReward-7b-v1.5"
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 24, 32, 3), dtype=np.uint8)


class Server(ChatServer):
    """Answers with ``reply(prompt, attempt) -> (status, text)``."""

    def __init__(self):
        super().__init__(MODEL)
        self.reply = lambda prompt, attempt: (200, "Final Score: 3")
        self.attempts = {}

    def answer(self, request):
        text = request["messages"][0]["content"][1]["text"]
        prompt = text[text.rindex("[") + 1 : text.rindex("]")]
        with self.lock:
            attempt = self.attempts[prompt] = self.attempts.get(prompt, 0) + 1
        status, answer = self.reply(prompt, attempt)
        return status, {"choices": [{"message": {"content": answer}}]} if status == 200 else answer


@pytest.fixture
def server():
    one = Server()
    yield one
    one.close()


def ready(server, **options):
    reward = UnifiedReward(endpoint_url=server.url, endpoint_api_key="sk-secret", options=options)
    reward.set_up()
    return reward


def test_the_last_number_over_five_in_the_order_of_the_samples(server):
    answers = {"a": "Final Score: 1", "b": "Good. Final Score:4.5\n", "{c}": "Final Score: 2, no: Final Score: 5"}
    server.reply = lambda prompt, attempt: (200, answers[prompt])
    result = ready(server, concurrency=3).calculate_reward(IMAGES[:3], {"prompts": list(answers)})
    assert result == {"scores": {"unified_reward": [0.2, 0.9, 1.0]}, "item_errors": {}}
    assert set(server.headers) == {"Bearer sk-secret"}
    request = next(r for r in server.requests if "[b]" in r["messages"][0]["content"][1]["text"])
    assert (request["model"], request["temperature"]) == (MODEL, 0)
    head, _, data = request["messages"][0]["content"][0]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    sent = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    resized = Image.fromarray(IMAGES[1]).resize((512, 512), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(sent, np.asarray(resized))


def test_images_are_sent_as_they_are_on_request(server):
    ready(server, size=0).calculate_reward(IMAGES[:1], {"prompts": ["a"]})
    data = server.requests[0]["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2]
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), IMAGES[0])


def test_samples_are_asked_about_at_the_same_time(server):
    together = threading.Barrier(4, timeout=20)  # every request waits for the three others
    server.reply = lambda prompt, attempt: (together.wait(), (200, "Final Score: 3"))[1]
    result = ready(server, concurrency=4).calculate_reward(IMAGES, {"prompts": ["a", "b", "c", "d"]})
    assert result["scores"]["unified_reward"] == [0.6] * 4


def test_an_answer_without_a_score_is_no_zero(server):
    server.reply = lambda prompt, attempt: (200, "Final Score: 4" if prompt == "a" else "I like it. Final Score: 9")
    result = ready(server).calculate_reward(IMAGES[:2], {"prompts": ["a", "b"]})
    assert result["scores"]["unified_reward"] == [0.8, None]
    assert "holds no score" in result["item_errors"][1]


def test_passing_failures_are_tried_again_and_refusals_are_not(server):
    replies = {"busy": lambda n: (503, "busy") if n < 3 else (200, "Final Score: 5"), "bad": lambda n: (400, "too big")}
    server.reply = lambda prompt, attempt: replies[prompt](attempt)
    result = ready(server).calculate_reward(IMAGES[:2], {"prompts": ["busy", "bad"]})
    assert result["scores"]["unified_reward"] == [1.0, None]
    assert "answered 400" in result["item_errors"][1]
    assert "too big" in result["item_errors"][1]
    assert server.attempts == {"busy": 3, "bad": 1}


def test_an_outage_is_raised_so_that_the_job_is_tried_again(server):
    server.reply = lambda prompt, attempt: (500, "down")
    with pytest.raises(EndpointError, match="answered 500"):
        ready(server, retries=1).calculate_reward(IMAGES[:2], {"prompts": ["a", "b"]})
    assert server.attempts == {"a": 2, "b": 2}


def test_another_wording_and_scale(server, tmp_path):
    template = tmp_path / "question.txt"
    template.write_text("Rate [{prompt}] of ten.")
    server.reply = lambda prompt, attempt: (200, "Rating=7")
    reward = ready(server, template=str(template), pattern=r"Rating=(\d+)", divisor=10)
    assert reward.calculate_reward(IMAGES[:1], {"prompts": ["a {b}"]})["scores"]["unified_reward"] == [0.7]
    assert server.requests[0]["messages"][0]["content"][1]["text"] == "Rate [a {b}] of ten."
    record = reward.provenance()
    assert record["template_digest"] != ready(server).provenance()["template_digest"]
    assert "sk-secret" not in json.dumps(record)


def test_a_password_in_the_address_is_shown_nowhere(server):
    reward = UnifiedReward(endpoint_url=server.url.replace("//", "//me:hidden-word@"), options={"retries": 0})
    reward.set_up()
    assert reward.provenance()["endpoint"] == server.url
    server.reply = lambda prompt, attempt: (500, "down")
    with pytest.raises(EndpointError, match="answered 500") as failure:
        reward.calculate_reward(IMAGES[:1], {"prompts": ["a"]})
    server.models_status = 500
    with pytest.raises(NotReady, match="answered 500") as refusal:
        reward.set_up()
    assert "hidden-word" not in f"{failure.value} {refusal.value}"
    assert server.headers[0].startswith("Basic ")  # and was sent


@pytest.mark.parametrize(
    ("name", "text", "encoding", "words"),
    [
        ("t.txt", "Rate caf\xe9 [{prompt}]", "latin-1", r"byte 0xe9 at position 8\); save it as UTF-8"),
        ("t.py", 'question = "Rate [{prompt}]"', "utf-16", "is not UTF-8 text but UTF-16"),
        ("t.py", "\nquestion is: Rate [{prompt}]", "utf-8", "line 2: not Python"),
    ],
)
def test_a_template_that_cannot_be_read_is_named(server, tmp_path, name, text, encoding, words):
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(NotReady, match=words) as refused:
        ready(server, template=str(tmp_path / name))
    assert str(refused.value).startswith(f"{tmp_path / name}")


@pytest.mark.parametrize(("name", "form"), [("t.txt", "Rate [{prompt}]"), ("t.py", 'question = "Rate [{prompt}]"')])
def test_a_template_may_begin_with_a_byte_order_mark(server, tmp_path, name, form):
    (tmp_path / name).write_text(form, encoding="utf-8-sig")
    ready(server, template=str(tmp_path / name)).calculate_reward(IMAGES[:1], {"prompts": ["a"]})
    assert server.requests[0]["messages"][0]["content"][1]["text"] == "Rate [a]"


def test_why_it_is_not_ready(server, tmp_path):
    with pytest.raises(NotReady, match="endpoint_url: unified_reward needs the address"):
        UnifiedReward().set_up()
    with pytest.raises(NotReady, match=r"options.template: no file"):
        ready(server, template="/no/such/file")
    (tmp_path / "t.txt").write_text("no place")
    with pytest.raises(NotReady, match=r"has no \{prompt\}"):
        ready(server, template=str(tmp_path / "t.txt"))
    with pytest.raises(NotReady, match=r"options.pattern: needs a group"):
        ready(server, pattern="Score")
    server.models = ["other"]
    with pytest.raises(NotReady, match="does not serve 'UnifiedReward-7b-v1.5'; it serves other"):
        ready(server)
    server.models_status = 401
    with pytest.raises(NotReady, match="endpoint_api_key") as refused:
        ready(server)
    assert "sk-secret" not in str(refused.value)
    server.models_status = 404
    ready(server)  # a server without a list of models may still answer
    server.models_status = 500
    with pytest.raises(NotReady, match="/models answered 500"):
        ready(server)
    with pytest.raises(NotReady, match="does not answer"):
        UnifiedReward(endpoint_url="http://127.0.0.1:9/v1").set_up()
