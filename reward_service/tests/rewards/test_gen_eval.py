"""GenEval's rules on synthetic detections, its metadata checks, and detector and colours on small random models."""

import numpy as np
import pytest
import torch
from tiny_reward_models import randomise, save_clip
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    DetrImageProcessor,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessor,
    ResNetConfig,
    SwinConfig,
)

from cosmos_rl_reward.handler import BadInput, NotReady
from cosmos_rl_reward.rewards import gen_eval_rules as rules
from cosmos_rl_reward.rewards.gen_eval import GenEval
from cosmos_rl_reward.rewards.gen_eval_models import ColorClassifier, Detector, crop_object
from cosmos_rl_reward.rewards.gen_eval_rules import (
    COLORS,
    NAMES,
    Detection,
    find_relations,
    score_leniently,
    score_strictly,
    select_detections,
)

rng = np.random.default_rng(0)


def at(x, y, size=10, confidence=0.95):
    return Detection((x, y, x + size, y + size), confidence)


def colors(**by_class):
    """Colours of each class's detections in order."""
    return lambda name, found: list(by_class[name.replace(" ", "_")][: len(found)])


def nothing(name, found):
    raise AssertionError("no colour is asked")


def test_the_names_are_the_80_in_their_order():
    assert len(set(NAMES)) == 80
    assert (NAMES[0], NAMES[64], NAMES[79]) == ("person", "computer mouse", "toothbrush")


def test_which_detections_count():
    found = [at(0, 0, confidence=c) for c in (0.3, 0.31, 0.95, 0.9, 0.5)]
    assert [d.confidence for d in select_detections(found, "colors")] == [0.95, 0.9, 0.5, 0.31]
    assert [d.confidence for d in select_detections(found, "counting")] == [0.95]
    assert len(select_detections([at(0, 0)] * 20, "counting")) == 16


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        (at(0, 0), at(50, 0), {"left of"}),
        (at(50, 0), at(0, 0), {"right of"}),
        (at(0, 0), at(0, 50), {"above"}),
        (at(0, 50), at(0, 0), {"below"}),
        (at(0, 0), at(50, 50), {"left of", "above"}),  # both 0.68 of the distance
        (at(0, 0), at(1.9, 1.9), set()),  # within a tenth of both extents
        (at(0, 0), at(3, 0), set()),  # 1 of 3 is left after the shrinking
        (at(0, 0), at(5, 0), {"left of"}),  # 3 of 5
    ],
)
def test_relations_by_hand(a, b, found):
    assert find_relations(a, b) == found


CATS = [{"class": "cat", "count": 2}]
RED = [{"class": "cat", "count": 2, "color": "red"}]
PLACED = [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]}]


@pytest.mark.parametrize(
    ("objects", "asked", "seen", "score", "exact", "enough"),
    [
        ({"cat": [at(0, 0)] * 2}, CATS, nothing, 1.0, True, True),
        ({"cat": [at(0, 0)]}, CATS, nothing, 0.5, False, False),
        ({}, CATS, nothing, 0.0, False, False),
        ({"cat": [at(0, 0)] * 3}, CATS, nothing, 0.5, False, True),
        ({"cat": [at(0, 0)] * 7}, CATS, nothing, -1.5, False, True),
        ({"cat": [at(0, 0)] * 2}, RED, colors(cat=["red", "red"]), 1.0, True, True),
        ({"cat": [at(0, 0)] * 2}, RED, colors(cat=["red", "blue"]), 0.75, False, False),
        # wrong count: (0.5 + 0) / 2 and no colour is looked at; the lenient score looks at the first two
        ({"cat": [at(0, 0)]}, RED, nothing, 0.25, False, False),
        ({"cat": [at(0, 0)] * 3}, RED, colors(cat=["red", "red", "blue"]), 0.25, False, True),
        ({"dog": [at(50, 0)], "cat": [at(0, 0)]}, PLACED, nothing, 1.0, True, True),
        ({"dog": [at(0, 0)], "cat": [at(50, 0)]}, PLACED, nothing, 2 / 3, False, False),
        # no dog: 0, 1, and 0 for the position that cannot be judged
        ({"cat": [at(0, 0)]}, PLACED, nothing, 1 / 3, False, False),
        # no cat: 1, 0, and 0 because a position was asked
        ({"dog": [at(50, 0)]}, PLACED, nothing, 1 / 3, False, False),
    ],
)
def test_scores_by_hand(objects, asked, seen, score, exact, enough):
    assert score_strictly(objects, asked, seen) == (pytest.approx(score), exact)
    assert score_leniently(objects, asked, [], seen) is enough


def test_upstreams_slip_counts_a_wrong_position_twice():
    objects = {"dog": [at(0, 0)], "cat": [at(50, 0)]}
    assert score_strictly(objects, PLACED, nothing, upstream=True) == (pytest.approx(3 / 4), False)


def test_what_is_excluded_fails_the_score():
    objects = {"cat": [at(0, 0)] * 3}
    assert score_leniently(objects, CATS, [{"class": "cat", "count": 4}], nothing)
    assert not score_leniently(objects, CATS, [{"class": "cat", "count": 3}], nothing)


ONE = {"class": "cat", "count": 1}


@pytest.mark.parametrize(
    ("tag", "includes", "reason"),
    [
        ("colours", [ONE], r"geneval_tags\[3\]: 'colours' is none of"),
        ("counting", [], r"geneval_includes\[3\]: expected a list"),
        ("counting", [{"class": "catt", "count": 1}], r"includes\[3\]\[0\]\.class: 'catt'.*did you mean 'cat'"),
        ("counting", [{"count": 1}], r"includes\[3\]\[0\]\.class: None"),
        ("counting", [ONE, {"class": "dog", "count": 0}], r"includes\[3\]\[1\]\.count: 0"),
        ("counting", [{"class": "dog"}], r"count: None"),
        ("colors", [ONE], "the tag 'colors' needs a requirement with 'color'"),
        ("color_attr", [{**ONE, "color": "teal"}], r"color: 'teal' is none of"),
        ("position", [ONE, ONE], "needs a requirement with 'position'"),
        ("position", [ONE, {**ONE, "position": ["near", 0]}], "relations are"),
        ("position", [ONE, {**ONE, "position": ["above", 1]}], "1 is not the index of an earlier"),
        ("position", ["cat"], "expected an object"),
    ],
)
def test_wrong_metadata_names_its_field(tag, includes, reason):
    with pytest.raises(BadInput, match=reason):
        rules.check(tag, includes, [], 3)


def fake(objects, seen):
    reward = GenEval()
    reward._detect = lambda image: objects[int(image[0, 0, 0])]
    reward._color = lambda image, name, found: seen(name, found)
    return reward


def test_one_request_of_several_tags():
    objects = [{"cat": [at(0, 0)] * 3}, {"cat": [at(0, 0, confidence=0.4), at(0, 0)]}, {}]
    images = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones((1, 20, 20, 3), np.uint8)
    metadata = {
        "prompts": [""] * 3,
        "geneval_tags": ["counting", "colors", "single_object"],
        "geneval_includes": [CATS, [{"class": "cat", "count": 2, "color": "red"}], [ONE]],
        "geneval_excludes": [[{"class": "cat", "count": 3}], [], []],
    }
    reward = fake(objects, colors(cat=["red", "red"]))
    result = reward.calculate_reward(images, metadata)
    assert result["item_errors"] == {}
    scores = result["scores"]
    assert scores["gen_eval_score"] == [0.5, 1.0, 0.0]
    assert scores["gen_eval_strict"] == [0.0, 1.0, 0.0]
    assert scores["gen_eval_reward"] == [0.0, 1.0, 0.0]
    assert scores["gen_eval_group"] == {
        "single_object": [-10.0, -10.0, 0.0],
        "two_object": [-10.0] * 3,
        "counting": [0.0, -10.0, -10.0],
        "colors": [-10.0, 1.0, -10.0],
        "position": [-10.0] * 3,
        "color_attr": [-10.0] * 3,
    }
    lax = fake(objects, colors(cat=["red", "red"]))
    lax.options["upstream_scoring"] = True
    assert lax.calculate_reward(images, metadata)["scores"]["gen_eval_reward"] == [1.0, 1.0, 0.0]
    only = reward.calculate_reward(images, {**metadata, "geneval_only_strict": True})["scores"]
    assert only["gen_eval_reward"] == [0.0, 0.0, 0.0]
    assert only["gen_eval_strict"] == scores["gen_eval_strict"]
    with pytest.raises(BadInput, match="geneval_tags: 2 entries for 3 samples"):
        reward.calculate_reward(images, {**metadata, "geneval_tags": ["counting"] * 2})


def test_a_failing_detector_is_no_score():
    def detect(image):
        if image[0, 0, 0]:
            raise RuntimeError("out of memory")
        return {"cat": [at(0, 0)]}

    reward = fake([], nothing)
    reward._detect = detect
    images = np.stack([np.zeros((9, 9, 3)), np.ones((9, 9, 3))]).astype(np.uint8)
    metadata = {"geneval_tags": ["single_object"] * 2, "geneval_includes": [[ONE]] * 2}
    result = reward.calculate_reward(images, metadata)
    assert result["scores"]["gen_eval_reward"] == [1.0, None]
    assert result["scores"]["gen_eval_group"]["single_object"] == [1.0, None]
    assert result["item_errors"] == {1: "RuntimeError: out of memory"}


def test_cut_out_is_grey_around_the_object():
    image = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    mask = np.zeros((20, 30), bool)
    mask[5:9, 10:20] = True
    mask[6, 12] = False
    cut = crop_object(image, Detection((10.0, 5.0, 20.0, 9.0), 1.0, mask))
    assert cut.shape == (4, 10, 3)
    assert cut[1, 2].tolist() == [0x99] * 3
    np.testing.assert_array_equal(cut[0], image[5, 10:20])
    assert crop_object(image, Detection((29.9, 19.9, 31.0, 21.0), 1.0)).shape == (1, 1, 3)


COCO = {
    i: {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}.get(n, n)
    for i, n in enumerate(NAMES)
}


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mask2former")
    swin = SwinConfig(embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=4, image_size=64)
    swin.out_features = ["stage1", "stage2", "stage3", "stage4"]
    config = Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=12,
        id2label=COCO,
    )
    torch.manual_seed(0)
    model = Mask2FormerForUniversalSegmentation(config).eval()
    model.class_predictor.weight.data.normal_(0, 3)  # so that some queries are certain
    model.save_pretrained(folder)
    Mask2FormerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder, model


def area(detection):
    assert detection.mask is not None
    return int(detection.mask.sum())


def test_masks_boxes_and_names_of_a_segmenting_detector(mask2former):
    folder, model = mask2former
    image = rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)
    objects = Detector(str(folder), "cpu", torch.float32)(image)
    # the same, from the model's raw outputs
    inputs = Mask2FormerImageProcessor.from_pretrained(folder)(images=[image], return_tensors="pt")
    with torch.inference_mode():
        outputs = model(**inputs)
    probabilities = outputs.class_queries_logits[0].softmax(-1)[:, :-1]
    masks = torch.nn.functional.interpolate(outputs.masks_queries_logits, (384, 384), mode="bilinear")[0]
    expected = []
    best = probabilities.flatten().topk(12).indices
    for query, label in zip(best // 80, best % 80, strict=True):
        inside = masks[query] > 0
        certainty = (probabilities[query, label] * masks[query].sigmoid()[inside].mean()).item()
        if inside.any() and certainty >= 0.3:
            small = torch.nn.functional.interpolate(inside[None, None].float(), (40, 60), mode="nearest")[0, 0] > 0
            if small.any():
                y, x = torch.nonzero(small, as_tuple=True)
                box = (x.min().item(), y.min().item(), x.max().item() + 1, y.max().item() + 1)
                expected.append((NAMES[label], round(certainty, 4), box, int(small.sum())))
    found = [(name, round(d.confidence, 4), d.box, area(d)) for name, ds in objects.items() for d in ds]
    assert len(expected) >= 2
    assert sorted(found) == sorted(expected)


def test_a_box_detector_works_without_masks(tmp_path):
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])
    backbone.out_features = ["stage4"]
    config = DetrConfig(
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=7,
        id2label=COCO,
    )
    torch.manual_seed(0)
    model = DetrForObjectDetection(config).eval()
    model.class_labels_classifier.weight.data.normal_(0, 3)
    model.save_pretrained(tmp_path)
    DetrImageProcessor(size={"height": 64, "width": 64}).save_pretrained(tmp_path)
    image = rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)
    objects = Detector(str(tmp_path), "cpu", torch.float32)(image)
    inputs = DetrImageProcessor.from_pretrained(tmp_path)(images=[image], return_tensors="pt")
    with torch.inference_mode():
        outputs = model(**inputs)
    certainty, label = outputs.logits[0].softmax(-1)[:, :-1].max(-1)
    x, y, w, h = (outputs.pred_boxes[0] * torch.tensor([60, 40, 60, 40])).T
    boxes = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1)
    expected = sorted((NAMES[label[i]], certainty[i].item(), boxes[i].tolist()) for i in range(7) if certainty[i] > 0.3)
    found = sorted((name, d.confidence, list(d.box)) for name, ds in objects.items() for d in ds)
    assert len(expected) >= 2
    for one, other in zip(found, expected, strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose([one[1], *one[2]], [other[1], *other[2]], rtol=1e-4, atol=1e-3)


def test_a_detector_of_other_classes_is_refused(mask2former, tmp_path):
    _, model = mask2former
    model.config.id2label = {i: f"LABEL_{i}" for i in range(80)}
    try:
        model.save_pretrained(tmp_path)
    finally:
        model.config.id2label = COCO
    Mask2FormerImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(NotReady, match=r"does not know \['person'.*80 of 80"):
        Detector(str(tmp_path), "cpu", torch.float32)


def first_row(output):
    assert output.pooler_output is not None
    return output.pooler_output[0]


def test_colours_are_the_nearest_of_three_sentences(tmp_path):
    model = save_clip(tmp_path, seed=3)
    randomise(model, 0.5)
    model.save_pretrained(tmp_path)
    classifier = ColorClassifier(str(tmp_path), "cpu", torch.float32)
    image = rng.integers(0, 256, (60, 60, 3), dtype=np.uint8)
    found = [at(x, y, 28) for x, y in ((0, 0), (30, 0), (0, 30), (31, 31))]
    tokenizer = classifier._tokenizer
    with torch.inference_mode():
        directions = []
        for color in COLORS:
            texts = [f"a photo of a {color} cat", f"a photo of a {color}-colored cat", f"a photo of a {color} object"]
            rows = []
            for text in texts:
                ids = tokenizer(text, truncation=True, max_length=16, return_tensors="pt")
                rows.append(torch.nn.functional.normalize(first_row(model.get_text_features(**ids)), dim=0))
            directions.append(torch.nn.functional.normalize(torch.stack(rows).mean(0), dim=0))
        expected = []
        for detection in found:
            left, top = (int(v) for v in detection.box[:2])
            crop = image[top : top + 28, left : left + 28] / np.float32(255)  # the encoder's size: no resizing
            pixels = (crop - classifier_mean()) / classifier_std()
            tensor = torch.from_numpy(pixels.transpose(2, 0, 1)[None].astype(np.float32))
            feature = first_row(model.get_image_features(pixel_values=tensor))
            expected.append(COLORS[int((torch.stack(directions) @ feature).argmax())])
    assert classifier(image, "cat", found) == expected
    assert classifier(image, "cat", []) == []


def classifier_mean():
    return np.array([0.48145466, 0.4578275, 0.40821073])


def classifier_std():
    return np.array([0.26862954, 0.26130258, 0.27577711])


def test_end_to_end_on_small_models(mask2former, tmp_path):
    folder, _ = mask2former
    save_clip(tmp_path)
    reward = GenEval(model_path=str(folder), dtype="float32", options={"clip_model": str(tmp_path)})
    reward.set_up()
    for image, metadata in reward.probes():
        scores = reward.calculate_reward(torch.from_numpy(image), metadata)["scores"]
        assert scores["gen_eval_group"]["single_object"] == scores["gen_eval_reward"]
        assert scores["gen_eval_reward"][0] in (0.0, 1.0)
    assert reward.provenance()["detector"] == str(folder)
