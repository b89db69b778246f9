"""Reading text: targets, engine answers, the formula in both normalisations, and the real recogniser."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.rewards.ocr import OcrReward
from cosmos_rl_reward.rewards.ocr_scoring import diagnostics, find_first_quoted, find_quoted_text, ocr_score

NOTHING = SimpleNamespace(txts=None, scores=None)


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('sign "Hello"', "Hello"),
        ("sign “Hello World”", "Hello World"),
        ("sign \u2018Don\u2019t stop\u2019 now", "Don\u2019t stop"),
        ("a man's sign 'Don't stop' here", "Don't stop"),
        ('shop "A" beside "B C"', "A B C"),
        ("it's \"Joe's bar\"", "Joe's bar"),
        ("Schild „Guten Tag“", "Guten Tag"),
        ('ratio 5\'10" man with "HI"', "HI"),
        ('a 12" vinyl of "The Band"', "The Band"),
        ('12" and 7" records', None),
        ("a man of 5'10\" and one of 6'2\"", None),
        ('a shirt with "5\'10" on it', "5'10"),
        ('he says "I am 6\'2" tall" aloud', "I am 6'2\" tall"),
        ('Route "66" and "No.5"', "66 No.5"),
        ('写着"你好"的牌子', "你好"),
        ("a sign 'Rock 'n' Roll'", "Rock 'n' Roll"),
        ("a sign 'Rock 'n Roll' here", "Rock 'n Roll"),
        ("signs \u2018Rock \u2018n\u2019 Roll\u2019 and \u2018Bar\u2019", "Rock \u2018n\u2019 Roll Bar"),
        ("'A', 'B' and 'C'", "A B C"),
        ("a 6' man under 'HI'", "HI"),
        ("牌子上写着「営業中」", "営業中"),
        ("看板「ラーメン『一番』」と「OPEN」", "ラーメン『一番』 OPEN"),
        ("本の題は『雪国』", "雪国"),
        ('a board “He said "no" today”', 'He said "no" today'),
        ("« Chez Paul »", "Chez Paul"),
        ("a dog's bone", None),
        ('sign "Hello', None),
        ('sign ""', None),
    ],
)
def test_what_the_prompt_asks_for(prompt, target):
    assert find_quoted_text(prompt) == target


def test_upstream_takes_the_first_ascii_span_only():
    assert find_first_quoted('a "B" and "C"') == "B"
    assert find_first_quoted("a 'B'") is None


@pytest.mark.parametrize(
    ("target", "text", "score", "upstream"),
    [
        ("Hello", "he LLo", 1.0, 1.0),
        ("Hello", "xxhelloxx", 1.0, 1.0),
        ("Hello", "", 0.0, 0.0),
        ("Hello", "helo", 0.8, 0.8),
        ("Hello", "a completely different text", 0.0, 0.0),  # the distance is capped: never negative
        ("Hello World", "", 0.0, 1 - 10 / 11),
        ("Hello World", "hello", 0.5, 1 - 5 / 11),
    ],
)
def test_the_formula(target, text, score, upstream):
    assert ocr_score(target, text) == pytest.approx(score)
    assert ocr_score(target, text, upstream=True) == pytest.approx(upstream)


def test_diagnostics_by_hand():
    # "ab" against "abb": distance 1 of 3; shared characters 2 of 3
    assert diagnostics("A b", "abb") == {
        "edit_similarity": pytest.approx(2 / 3),
        "exact_match": 0.0,
        "substring_match": 1.0,
        "char_iou": pytest.approx(2 / 3),
    }


def with_engine(engine, **options):
    reward = OcrReward(options=options)
    reward._engines = {False: engine}
    return reward


def test_fake_engine_answers_become_scores():
    answers = [NOTHING, SimpleNamespace(txts=("HEL", "l o"), scores=(0.1, 0.99))]
    reward = with_engine(lambda image: answers[image[0, 0, 0]])
    images = np.arange(2, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    result = reward.calculate_reward(images, {"prompts": ['sign "Hello"'] * 2})
    assert result["scores"]["ocr_reward"] == [0.0, 1.0]
    assert result["scores"]["ocr_text"] == ["", "HELl o"]
    assert not result["item_errors"]
    doubted = with_engine(lambda image: answers[1], min_confidence=0.5)
    assert doubted.calculate_reward(images[:1], {"prompts": ['sign "Hello"']})["scores"]["ocr_reward"] == [0.4]


def test_the_engine_gets_bgr():
    seen = []
    image = np.zeros((1, 2, 2, 3), np.uint8)
    image[..., 0] = 200  # red
    with_engine(lambda p: seen.append(p) or NOTHING).calculate_reward(image, {"prompts": ['"a"']})
    assert seen[0][0, 0].tolist() == [0, 0, 200]


def test_failures_are_never_numbers():
    def engine(image):
        if image[0, 0, 0] == 1:
            raise RuntimeError("session lost")
        return NOTHING

    images = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    result = with_engine(engine).calculate_reward(images, {"prompts": ['"a"', '"a"', "no quotes"]})
    assert result["scores"]["ocr_reward"] == [0.0, None, None]
    assert result["item_errors"] == {1: "RuntimeError: session lost", 2: "no quoted text in the prompt 'no quotes'"}
    with pytest.raises(RuntimeError, match="session lost"):
        with_engine(engine).calculate_reward(images[1:2], {"prompts": ['"a"']})


def test_a_wrong_normalisation_is_named():
    with pytest.raises(NotReady, match=r"options\.normalisation"):
        OcrReward(options={"normalisation": "none"}).set_up()


@pytest.fixture(scope="module")
def reward():
    handler = OcrReward(options={"threads": 1})
    handler.set_up()
    return handler


def image_of(text, size=(512, 256), blur=0.0):
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).multiline_text((40, 60), text, fill="black", font=ImageFont.load_default(size=48))
    return np.asarray(image.filter(ImageFilter.GaussianBlur(blur)))


@pytest.mark.parametrize("text", ["GRAND OPENING", "Hello World", "SALE 50%", "Cafe 1987"])
def test_the_recogniser_reads(reward, text):
    result = reward.calculate_reward(image_of(text)[None], {"prompts": [f'a poster "{text}"']})["scores"]
    assert result["ocr_reward"] == [1.0]
    assert result["substring_match"] == [1.0]


def test_lines_are_read_in_order_and_blur_costs_the_score(reward):
    images = np.stack([image_of("OPEN\nALL DAY"), image_of("OPEN ALL DAY", blur=12), image_of("CLOSED")])
    result = reward.calculate_reward(images, {"prompts": ['"open" and "all day"'] * 3})["scores"]["ocr_reward"]
    assert result[0] == 1.0
    assert result[1] == 0.0
    assert 0.0 <= result[2] < 0.5


def test_the_upstream_floor(reward):
    upstream = OcrReward(options={"normalisation": "upstream"})
    upstream._engines = reward._engines
    blank = np.full((1, 64, 64, 3), 255, np.uint8)
    result = upstream.calculate_reward(blank, {"prompts": ['a sign "Hello World"']})
    assert result["scores"]["ocr_reward"] == [pytest.approx(0.0909, abs=1e-4)]


def test_provenance_names_engine_and_weights(reward):
    record = reward.provenance()
    assert record["engine"].startswith("rapidocr 3.")
    assert record["model_digest"].startswith("sha256:")
    assert record["normalisation"] == "floor0"


def test_a_gpu_that_is_not_there_is_a_warning(reward):
    """Clients of old send ``ocr_use_gpu`` whatever the service runs on."""
    result = reward.calculate_reward(image_of("A B")[None], {"prompts": ['"A B"'], "ocr_use_gpu": True})
    assert result["scores"]["ocr_reward"] == [1.0]
    assert result["warning"].startswith("metadata.ocr_use_gpu: ocr runs on the CPU here")
    assert "warning" not in reward.calculate_reward(image_of("A")[None], {"prompts": ['"A"']})


def test_a_gpu_in_the_configuration_has_to_be_there():
    with pytest.raises(NotReady, match="onnxruntime-gpu"):
        OcrReward(device="cuda").set_up()
