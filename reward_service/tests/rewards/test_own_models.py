"""A user's own function and a user's own classifier as rewards."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from reward_examples.classifier import ClassifierReward, label_in_prompt

from cosmos_rl_reward.handler import NotReady, RewardRegistry
from cosmos_rl_reward.rewards.function_reward import function_handler

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)


def redness(to_be_evaluated, reference=None, **kw):
    """Mean of the red channel, when the prompt asks for red."""
    return float(to_be_evaluated[..., 0].mean() / 255) if "red" in kw["prompt"] else None


def made(function, name="own"):
    reward = function_handler(function, name)()
    reward.set_up()
    return reward


def test_a_function_scores_each_sample_and_none_is_no_score():
    handler = function_handler(redness, "redness")
    assert (handler.reward_name, handler.score_keys) == ("redness", ("redness",))
    with pytest.raises(ValueError, match="unknown reward"):
        RewardRegistry.get_reward_class("redness")
    reward = made(redness, "redness")
    result = reward.calculate_reward(IMAGES[:2], {"prompts": ["red", "blue"]})
    assert result["scores"]["redness"] == [pytest.approx(IMAGES[0, ..., 0].mean() / 255), None]
    assert result["item_errors"] == {1: "the function returned None"}
    assert reward.provenance()["function"].endswith("test_own_models:redness")
    assert reward.provenance()["model_digest"].startswith("sha256:")


def test_a_function_gets_only_the_keywords_it_takes():
    reward = made(lambda to_be_evaluated, prompt: to_be_evaluated.shape[0] + len(prompt))
    assert reward.calculate_reward(IMAGES, {"prompts": ["", "a", "bc"]})["scores"] == {"own": [8.0, 9.0, 10.0]}


def test_a_function_of_images_and_metadata_gets_the_whole_request():
    def ranks(images, metadata):
        return images.mean((1, 2, 3)).argsort().argsort().tolist()

    ranks.reward_version = "7"
    reward = made(ranks)
    means = IMAGES.mean((1, 2, 3))
    assert reward.calculate_reward(IMAGES, {"prompts": [""] * 3})["scores"] == {
        "own": [int((means < mean).sum()) for mean in means]
    }
    assert reward.provenance()["reward_version"] == "7"


def test_a_function_sees_its_own_samples_metadata_and_frames():
    seen = []

    def look(to_be_evaluated, reference=None, **kw):
        seen.append((to_be_evaluated.shape, reference, kw["fps"], kw["metadata"]["difficulty"], kw["metadata"]["tag"]))
        return 0.0

    reward = made(look)
    video = np.zeros((2, 3, 4, 5, 6), np.uint8)
    metadata = {"prompts": ["", ""], "references": ["x", "y"], "difficulty": [1, 2], "tag": "all"}
    reward.calculate_reward(video, {**metadata, "video_infos": [{"video_fps": 8.0}, {"video_fps": 16.0}]})
    assert seen == [((4, 5, 6, 3), "x", 8.0, 1, "all"), ((4, 5, 6, 3), "y", 16.0, 2, "all")]


def dense(tmp_path, sizes):
    arrays = {}
    for index, (n, m) in enumerate(pairwise(sizes)):
        arrays[f"W{index}"], arrays[f"b{index}"] = rng.normal(size=(n, m)) / n**0.5, rng.normal(size=m)
    np.savez(tmp_path / "net.npz", **arrays)
    return arrays, str(tmp_path / "net.npz")


def by_hand(arrays, x):
    for index in range(len(arrays) // 2):
        x = x @ arrays[f"W{index}"] + arrays[f"b{index}"]
        if index < len(arrays) // 2 - 1:
            x = x.clip(0)
    raised = np.exp(x)
    return raised / raised.sum(-1, keepdims=True)


def test_dense_layers_give_the_softmax_of_the_wanted_class(tmp_path):
    arrays, path = dense(tmp_path, [64, 16, 10])
    reward = ClassifierReward(model_path=path, options={"labels": [str(n) for n in range(10)], "std": 1 / 16})
    reward.set_up()
    grey = np.stack([np.asarray(Image.fromarray(p).convert("L")) for p in IMAGES])
    expected = by_hand(arrays, grey.reshape(3, 64) / 255 * 16)
    result = reward.calculate_reward(IMAGES, {"prompts": ["", "", ""], "labels": [3, "7", 0]})["scores"]
    assert result["classifier"] == pytest.approx([expected[0, 3], expected[1, 7], expected[2, 0]], rel=1e-4)
    assert result["classifier_label"] == [str(n) for n in expected.argmax(-1)]
    assert result["classifier_correct"] == [float(expected[i].argmax() == w) for i, w in enumerate((3, 7, 0))]


def test_the_prompt_names_the_class_and_failures_stay_with_their_sample(tmp_path):
    arrays, path = dense(tmp_path, [64, 3])
    reward = ClassifierReward(model_path=path, options={"labels": ["cat", "cat food", "dog"]})
    reward.set_up()
    result = reward.calculate_reward(IMAGES, {"prompts": ["A Cat food tin", "a catalogue", "dog."]})
    grey = np.stack([np.asarray(Image.fromarray(p).convert("L")) for p in IMAGES])
    expected = by_hand(arrays, grey.reshape(3, 64) / 255)
    assert result["scores"]["classifier"] == [
        pytest.approx(expected[0, 1], rel=1e-4),
        None,
        pytest.approx(expected[2, 2], rel=1e-4),
    ]
    assert "none of the labels" in result["item_errors"][1]
    some = reward.calculate_reward(IMAGES, {"prompts": ["a dog", "a cat", "a dog"], "labels": ["cat", None, 2]})
    assert some["scores"]["classifier"] == pytest.approx([expected[0, 0], expected[1, 0], expected[2, 2]], rel=1e-4)
    wrong = reward.calculate_reward(IMAGES, {"prompts": [""] * 3, "labels": [3, "mouse", True]})
    assert wrong["scores"]["classifier"] == [None, None, None]
    assert "index below 3" in wrong["item_errors"][0]


def test_longest_label_wins():
    assert label_in_prompt("a red fire truck", ["truck", "fire truck"]) == 1
    assert label_in_prompt("trucks", ["truck"]) is None


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_an_onnx_file(tmp_path, order):
    """Global mean of each colour times a matrix: the layout matters, and the numbers are known."""
    weight = rng.normal(size=(3, 4)).astype(np.float32)
    shape = ["N", 3, 6, 6] if order == "NCHW" else ["N", 6, 6, 3]
    axes = [2, 3] if order == "NCHW" else [1, 2]
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array(axes), "axes")],
    )
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    reward = ClassifierReward(model_path=str(path), options={"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]})
    reward.set_up()
    colours = np.array([[255, 0, 0], [0, 128, 255]], np.uint8)
    flat = np.broadcast_to(colours[:, None, None], (2, 9, 9, 3))
    logits = (colours / 255 - [0.5, 0.4, 0.3]) / [0.2, 0.3, 0.4] @ weight
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    result = reward.calculate_reward(flat, {"prompts": ["", ""], "labels": [2, 1]})["scores"]["classifier"]
    assert result == pytest.approx([expected[0, 2], expected[1, 1]], rel=1e-4)


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(NotReady, match=r"not an \.onnx or .npz"):
        ClassifierReward(model_path=str(tmp_path / "none.onnx")).set_up()
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(NotReady, match="onnxruntime cannot load"):
        ClassifierReward(model_path=str(tmp_path / "bad.onnx")).set_up()
    np.savez(tmp_path / "odd.npz", weights=np.ones(3))
    with pytest.raises(NotReady, match="expected W0, b0"):
        ClassifierReward(model_path=str(tmp_path / "odd.npz")).set_up()
    _, path = dense(tmp_path, [60, 10])
    with pytest.raises(NotReady, match="60 values is not 8 x 8 x 1"):
        ClassifierReward(model_path=path).set_up()
    np.savez(tmp_path / "pickled.npz", W0=np.array([{}], dtype=object), b0=np.ones(1))
    with pytest.raises(NotReady, match="allow_pickle"):  # never loads what could run code
        ClassifierReward(model_path=str(tmp_path / "pickled.npz")).set_up()
