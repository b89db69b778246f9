"""Cosmos-Reason1, VideoReward and HPSv3 on small random Qwen models, with inputs put together by hand."""

import hashlib
import json
import sys
import types
from importlib.machinery import ModuleSpec

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from tiny_reward_models import patches, save_qwen
from transformers import AutoTokenizer

from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.rewards import special_tokens, video_frames
from cosmos_rl_reward.rewards.cosmos_reason1 import CosmosReason1
from cosmos_rl_reward.rewards.dance_grpo import DanceGRPO
from cosmos_rl_reward.rewards.hpsv3 import HPSv3, resize_to_budget
from cosmos_rl_reward.rewards.samples import SampleError

rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("frames", "video_fps", "fps", "number", "expected"),
    [
        (16, 8.0, 2.0, None, [0, 5, 10, 15]),
        (32, 16.0, 4.0, None, [0, 4, 9, 13, 18, 22, 27, 31]),  # 8 frames: linspace(0, 31, 8)
        (93, 16.0, 2.0, None, np.rint(np.linspace(0, 92, 12)).tolist()),  # 11.6 -> 12
        (8, 30.0, 2.0, None, [0, 2, 5, 7]),  # 0.5 -> at least 4
        (3, 8.0, 2.0, None, [0, 2]),  # at most what there is, even
        (10, 8.0, 2.0, 6, [0, 2, 4, 5, 7, 9]),
    ],
)
def test_even_sampling(frames, video_fps, fps, number, expected):
    assert video_frames.sample_evenly(frames, video_fps, fps, number=number).tolist() == expected


@pytest.mark.parametrize(
    ("frames", "expected", "fps"),
    [
        (16, list(range(16)), 16.0),
        (17, list(range(16)), 16.0),
        (160, list(range(160)), 16.0),
        (161, list(range(0, 160, 2)), 8.0),
    ],
)
def test_every_nth_frame(frames, expected, fps):
    indices, rate = video_frames.sample_every_nth(frames, 16.0)
    assert (indices.tolist(), rate) == (expected, fps)


def test_one_frame_is_no_video():
    with pytest.raises(SampleError, match="at least 2"):
        video_frames.sample_evenly(1, 8.0, 2.0)
    with pytest.raises(SampleError, match="at least 2"):
        video_frames.sample_every_nth(1, 8.0)


def test_sizes_are_multiples_of_28_within_bounds():
    frames = rng.integers(0, 256, (2, 3, 100, 300), dtype=np.uint8)
    result = video_frames.resize_frames(frames, 16 * 28 * 28 * 2, 200_704)
    assert result.shape == (2, 3, 112, 308)
    assert result.min() >= 0
    assert result.max() <= 255
    assert torch.equal(result, result.round())
    assert video_frames.resize_frames(frames, 128 * 28 * 28, 448 * 448).shape == (2, 3, 196, 560)
    whole = rng.integers(0, 256, (2, 3, 56, 84), dtype=np.uint8)
    np.testing.assert_array_equal(video_frames.resize_frames(whole, 0, 10_000).numpy(), whole)


# Cosmos-Reason1


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reason1")
    return folder, save_qwen(folder, "2.5")


def fitting(count, frames, height, width):
    """Videos that need no resizing."""
    return rng.integers(0, 256, (count, 3, frames, height, width), dtype=np.uint8)


def critic_logits(model, tokenizer, text, frames, fps):
    pixels, grid = patches(torch.from_numpy(frames).float())
    pads = int(grid.prod()) // 4
    ids = tokenizer(text.replace("<|video_pad|>", "<|video_pad|>" * pads), return_tensors="pt")["input_ids"]
    kinds = (ids == model.config.video_token_id).int() * 2
    with torch.inference_mode():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=kinds,
            pixel_values_videos=pixels,
            video_grid_thw=grid,
            second_per_grid_ts=torch.tensor([2 / fps]),
        ).logits[0, -1]
    return [logits[tokenizer.encode(word, add_special_tokens=False)[0]].item() for word in ("Yes", "No")]


def test_cosmos_reason1_is_the_softmax_over_yes_and_no(critic, tmp_path):
    folder, model = critic
    (tmp_path / "system.txt").write_text("the moon on a sign\n")
    options = {"system_prompt": str(tmp_path / "system.txt"), "question": "are there two dogs"}
    reward = CosmosReason1(model_path=str(folder), dtype="float32", options=options)
    reward.set_up()
    videos = fitting(3, 5, 168, 168)  # 28 224 pixels; the fifth frame is dropped
    infos = [{"video_fps": 8.0}, {"video_fps": 2.0}, {}]
    result = reward.calculate_reward(torch.from_numpy(videos), {"prompts": ["a cat"] * 3, "video_infos": infos})
    scores, tokenizer = result["scores"], AutoTokenizer.from_pretrained(folder)
    text = (
        "<|im_start|>system\nthe moon on a sign<|im_end|>\n<|im_start|>user\n<|vision_start|><|video_pad|>"
        "<|vision_end|>are there two dogs<|im_end|>\n<|im_start|>assistant\n"
    )
    for k in range(2):
        frames = videos[k, :, :4].transpose(1, 0, 2, 3)
        yes, no = critic_logits(model, tokenizer, text, frames, infos[k]["video_fps"])
        assert scores["yes_logit"][k] == pytest.approx(yes, abs=1e-4)
        assert scores["no_logit"][k] == pytest.approx(no, abs=1e-4)
        assert scores["no_score"][k] == pytest.approx(np.exp(no) / (np.exp(yes) + np.exp(no)), abs=1e-4)
        assert scores["prediction"][k] == ("Bad" if yes > no else "Good")
    assert scores["no_score"][0] != scores["no_score"][1]
    assert [scores[key][2] for key in reward.score_keys] == [None] * 4  # never -1
    assert result["item_errors"] == {2: "metadata.video_infos[2].video_fps is missing"}
    asked = CosmosReason1(model_path=str(folder), dtype="float32", options={**options, "ask_prompts": True})
    asked.set_up()
    two = {"prompts": ["are there two dogs", "a red cat"], "video_infos": infos[:2]}
    other = asked.calculate_reward(videos[:2], two)["scores"]
    assert other["yes_logit"][0] == pytest.approx(scores["yes_logit"][0], abs=1e-5)
    assert other["yes_logit"][1] != pytest.approx(scores["yes_logit"][1], abs=1e-5)


def test_the_shipped_questions_are_used_by_default(critic):
    folder, _ = critic
    reward = CosmosReason1(model_path=str(folder), dtype="float32")
    reward.set_up()
    for video, metadata in reward.probes():
        score = reward.calculate_reward(video, metadata)["scores"]["no_score"][0]
        assert 0 < score < 1
    record = reward.provenance()
    assert record["dtype"] == "float32"
    assert record["system_prompt_digest"].startswith("sha256:")


# VideoReward

TEMPLATE = "rating <|VQ_reward|> and <|MQ_reward|> of {text_prompt} <|TA_reward|> sign"
CONFIG = {
    "data_config": {"fps": 2.0, "num_frames": None, "max_frame_pixels": 200_704, "sample_type": "uniform"},
    "model_config": {"model_name_or_path": "BASE", "output_dim": 3},
    "peft_lora_config": {"lora_enable": True, "lora_r": 4, "lora_alpha": 6, "use_rslora": False},
    "inference_config": {"VQ_mean": 3.0, "VQ_std": 2.0, "MQ_mean": 1.0, "MQ_std": 0.5, "TA_mean": 2.5, "TA_std": 4.0},
}


def old_name(name):
    """transformers 4's name of an entry, as the published file has it."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base model, its LoRA-trained descendant in peft's own hands, and the latter's state under the old names."""
    base = tmp_path_factory.mktemp("base")
    model = save_qwen(base)
    targets = r".*(q_proj|v_proj|down_proj|attn\.qkv)"
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets))
    torch.manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2)
    head = torch.randn(3, 32)
    state = {old_name(k): v.detach().clone() for k, v in tuned.state_dict().items() if "lm_head" not in k}
    return base, tuned.eval(), head, {**state, "base_model.model.rm_head.weight": head}


def folder_with(tmp_path, base, state=None, **changes):
    config = json.loads(json.dumps(CONFIG))
    config["model_config"]["model_name_or_path"] = str(base)
    for table, values in changes.items():
        config[table] = values if values is None else {**config[table], **values}
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    (tmp_path / "prompt_template.py").write_text(
        f'DETAILED_PROMPT_WITH_SPECIAL_TOKEN = """{TEMPLATE}"""\nraise SystemExit\n'
    )
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-10").mkdir()
    torch.save(state or {"x": torch.zeros(1)}, tmp_path / "checkpoint-10" / "model.pth")
    return tmp_path


def raw_ratings(tuned, head, tokenizer, prompt, frames):
    """d-th head output on the hidden state of the d-th special token."""
    pixels, grid = patches(frames)
    text = (
        f"<|im_start|>user\n<|vision_start|>{'<|video_pad|>' * (int(grid.prod()) // 4)}<|vision_end|>"
        f"{TEMPLATE.format(text_prompt=prompt)}<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = special_tokens.add_tokens(tokenizer, ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"])
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        hidden = tuned(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(ids.shape[1]).expand(3, 1, -1),  # as in its training: running positions
            pixel_values_videos=pixels,
            video_grid_thw=grid,
            output_hidden_states=True,
        ).hidden_states[-1][0]
    return [float(head[d] @ hidden[ids[0].tolist().index(token)]) for d, token in enumerate(tokens)]


def expected_scores(trained, videos, prompts, indices):
    base, tuned, head, _ = trained
    norm, rows = CONFIG["inference_config"], []
    for video, prompt in zip(videos, prompts, strict=True):
        frames = torch.from_numpy(video[:, indices].transpose(1, 0, 2, 3)).float()
        raw = raw_ratings(tuned, head, AutoTokenizer.from_pretrained(base), prompt, frames)
        rows.append([(x - norm[f"{d}_mean"]) / norm[f"{d}_std"] for x, d in zip(raw, ("VQ", "MQ", "TA"), strict=True)])
    return np.array(rows)


def test_dance_grpo_standardises_what_its_head_reads_at_the_tokens(trained, tmp_path):
    folder = folder_with(tmp_path, trained[0], trained[3])
    reward = DanceGRPO(model_path=str(folder), dtype="float32")
    reward.set_up()
    videos = fitting(2, 16, 336, 308)
    prompts = ["a red {cat}", "two dogs on the moon"]
    metadata = {"prompts": prompts, "video_infos": [{"video_fps": 8.0}, {"video_fps": 8}]}
    result = reward.calculate_reward(torch.from_numpy(videos), metadata)
    assert not result["item_errors"]
    expected = expected_scores(trained, videos, prompts, [0, 5, 10, 15])
    for d, key in enumerate(("vq_reward", "mq_reward", "ta_reward")):
        np.testing.assert_allclose(result["scores"][key], expected[:, d], atol=2e-4)
    np.testing.assert_allclose(result["scores"]["overall_reward"], expected.sum(1), atol=4e-4)
    assert np.ptp(result["scores"]["overall_reward"]) > 1e-3
    record = reward.provenance()
    assert record["checkpoint_config"] == CONFIG["inference_config"]
    assert record["model_digest"].startswith("sha256:")
    # failures stay with their sample and are no numbers
    one = {"prompts": ["a", "a <|VQ_reward|>"], "video_infos": [{}, {"video_fps": 8.0}]}
    failed = reward.calculate_reward(videos, one)
    assert failed["scores"]["overall_reward"] == [None, None]
    assert "video_fps is missing" in failed["item_errors"][0]
    assert "special tokens" in failed["item_errors"][1]


def test_dance_grpo_from_adapter_files_over_the_base(trained, tmp_path):
    base, _, _, state = trained
    folder = folder_with(tmp_path, base)
    (folder / "checkpoint-10" / "model.pth").unlink()
    lora = {k.replace(".default.", "."): v for k, v in state.items() if "lora_" in k}
    save_file(lora, folder / "checkpoint-10" / "adapter_model.safetensors")
    rest = {k: v for k, v in state.items() if "rm_head" in k or "merger" in k}
    torch.save(rest, folder / "checkpoint-10" / "non_lora_state_dict.pth")
    reward = DanceGRPO(model_path=str(folder), dtype="float32")
    reward.set_up()
    videos = fitting(1, 4, 336, 308)
    result = reward.calculate_reward(videos, {"prompts": ["blue sky"], "video_infos": [{"video_fps": 8.0}]})
    expected = expected_scores(trained, videos, ["blue sky"], [0, 1, 2, 3])
    np.testing.assert_allclose(result["scores"]["overall_reward"], expected.sum(1), atol=4e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"inference_config": None}, "inference_config has no VQ_mean, VQ_std, MQ_mean"),
        ({"inference_config": {"TA_std": None}}, "inference_config has no TA_std"),
        ({"data_config": {"sample_type": "multi_pts"}}, "sample_type = 'multi_pts' is not supported"),
        ({"data_config": {"prompt_template_type": "simple"}}, "prompt_template_type = 'simple'"),
    ],
)
def test_constants_come_from_the_checkpoint_or_not_at_all(tmp_path, changes, reason):
    folder = folder_with(tmp_path, "BASE", **changes)
    with pytest.raises(NotReady, match=reason):
        DanceGRPO(model_path=str(folder)).fetch(offline=True)


def test_the_question_must_be_the_models_own(tmp_path):
    folder = folder_with(tmp_path, "BASE")
    (folder / "prompt_template.py").unlink()
    with pytest.raises(NotReady, match=r"prompt_template\.py of the VideoAlign repository"):
        DanceGRPO(model_path=str(folder)).fetch(offline=True)
    (folder / "prompt_template.py").write_text("OTHER = 1\n")
    with pytest.raises(NotReady, match="no text constant DETAILED_PROMPT_WITH_SPECIAL_TOKEN"):
        DanceGRPO(model_path=str(folder)).fetch(offline=True)
    (folder / "mine.txt").write_text("{text_prompt} <|VQ_reward|>")
    with pytest.raises(NotReady, match="once each"):
        DanceGRPO(model_path=str(folder), options={"template": str(folder / "mine.txt")}).fetch(offline=True)


# HPSv3

COLLATOR = 'INSTRUCTION = """rate {text_prompt} of ten\n"""\nprompt_with_special_token = "rating <|Reward|> END"\n'
IMAGES = rng.integers(0, 256, (3, 40, 40, 3), dtype=np.uint8)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of a package ``hpsv3`` that cannot be imported, as it is without its pinned dependencies."""
    folder = tmp_path / "site" / "hpsv3"
    (folder / "dataset").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('no trl')\n")
    (folder / "dataset" / "data_collator_qwen.py").write_text(COLLATOR)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "hpsv3", raising=False)
    return folder


def test_hpsv3_is_the_first_output_of_its_head(package, tmp_path):
    base = tmp_path / "base"
    model = save_qwen(base)
    torch.manual_seed(2)
    layers = {"0": (16, 32), "3": (8, 16), "5": (2, 8)}
    head = {}
    for depth, (outputs, inputs) in layers.items():
        head[f"rm_head.{depth}.weight"] = torch.randn(outputs, inputs) * 0.3
        head[f"rm_head.{depth}.bias"] = torch.randn(outputs) * 0.3
    weights = tmp_path / "hpsv3" / "HPSv3.safetensors"
    weights.parent.mkdir()
    state = {old_name(k): v.detach().clone() for k, v in model.state_dict().items()}
    save_file({**state, **head}, weights)
    options = {"base_model": str(base), "batch": 2}
    reward = HPSv3(download_path=str(tmp_path), dtype="float32", options=options)
    reward.set_up()
    prompts = ["a red cat", "two dogs on the moon and a large sign", "blue sky"]
    result = reward.calculate_reward(IMAGES, {"prompts": prompts})["scores"]["hpsv3"]

    tokenizer = AutoTokenizer.from_pretrained(base)
    (token,) = special_tokens.add_tokens(tokenizer, ["<|Reward|>"])
    for image, prompt, score in zip(IMAGES, prompts, result, strict=True):
        image = resize_to_budget(image)
        assert image.size == (448, 448)  # 256 * 28 * 28 pixels
        still = torch.from_numpy(np.asarray(image).transpose(2, 0, 1).astype(np.float32))
        pixels, grid = patches(torch.stack([still, still]))  # an image is two equal frames
        ids = tokenizer(
            f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * (int(grid.prod()) // 4)}<|vision_end|>"
            f"rate {prompt} of ten\nrating <|Reward|> END<|im_end|>\n<|im_start|>assistant\n",
            return_tensors="pt",
        )["input_ids"]
        with torch.inference_mode():
            hidden = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=torch.arange(ids.shape[1]).expand(3, 1, -1),  # as in its training: running positions
                pixel_values=pixels,
                image_grid_thw=grid,
                output_hidden_states=True,
            ).hidden_states[-1][0]
        x = hidden[ids[0].tolist().index(token)]
        for depth in ("0", "3", "5"):
            x = torch.nn.functional.linear(x, head[f"rm_head.{depth}.weight"], head[f"rm_head.{depth}.bias"])
            x = x if depth == "5" else x.relu()
        assert score == pytest.approx(x[0].item(), abs=2e-4)
    assert np.ptp(result) > 1e-3


def hashed(prompt, image):
    return int(hashlib.sha256(prompt.encode() + np.asarray(image).tobytes()).hexdigest()[:6], 16) / 1e6


class ImagesFirst:
    def __init__(self, checkpoint_path=None, device="cuda"):
        pass

    def reward(self, image_paths, prompts):
        return torch.tensor(
            [[hashed(t, p), 9.0] for t, p in zip(prompts, image_paths, strict=True)], dtype=torch.float64
        )


class PromptsFirst(ImagesFirst):
    def reward(self, prompts, image_paths):
        return ImagesFirst.reward(self, image_paths, prompts)


class Renamed(ImagesFirst):
    def reward(self, images, texts):
        raise AssertionError("must not be called")


def by_package(monkeypatch, tmp_path, inferencer):
    module = types.ModuleType("hpsv3")
    vars(module)["HPSv3RewardInferencer"] = inferencer
    module.__spec__ = ModuleSpec("hpsv3", None)
    monkeypatch.setitem(sys.modules, "hpsv3", module)
    (tmp_path / "HPSv3.safetensors").write_bytes(b"weights")
    reward = HPSv3(model_path=str(tmp_path / "HPSv3.safetensors"), options={"engine": "package", "batch": 2})
    reward.set_up()
    return reward


@pytest.mark.parametrize("inferencer", [ImagesFirst, PromptsFirst])
def test_the_package_is_called_by_keyword(monkeypatch, tmp_path, inferencer):
    reward = by_package(monkeypatch, tmp_path, inferencer)
    prompts = ["a", "b", "c"]
    result = reward.calculate_reward(IMAGES, {"prompts": prompts})["scores"]["hpsv3"]
    assert result == [hashed(t, p) for t, p in zip(prompts, IMAGES, strict=True)]


def test_another_version_of_the_package_is_named(monkeypatch, tmp_path):
    with pytest.raises(NotReady, match=r"reward\(\) takes images, texts, not prompts, image_paths.*version 1\.0\.0"):
        by_package(monkeypatch, tmp_path, Renamed)


def test_what_hpsv3_lacks_is_said(package, tmp_path):
    with pytest.raises(NotReady, match=r"HPSv3\.safetensors are missing"):
        HPSv3(download_path=str(tmp_path)).fetch(offline=True)
    with pytest.raises(NotReady, match="options.engine: 'fast'"):
        HPSv3(options={"engine": "fast"}).fetch(offline=True)
    (tmp_path / "HPSv3.safetensors").write_bytes(b"")
    broken = HPSv3(model_path=str(tmp_path / "HPSv3.safetensors"), options={"engine": "package"})
    with pytest.raises(NotReady, match="package hpsv3 cannot be imported: no trl"):
        broken.set_up()


def test_prepare_fetches_the_question(tmp_path, monkeypatch):
    folder = folder_with(tmp_path, tmp_path)
    published = (folder / "prompt_template.py").rename(tmp_path / "published.py")
    monkeypatch.setattr("cosmos_rl_reward.rewards.dance_grpo._TEMPLATE_URL", published.as_uri())
    reward = DanceGRPO(model_path=str(folder), download_path=str(tmp_path / "downloads"))
    with pytest.raises(NotReady, match="no file"):
        reward.fetch(offline=True)
    assert reward.fetch(offline=False) == f"dance_grpo: {folder / 'checkpoint-10'}"
    assert (tmp_path / "downloads" / "dance_grpo" / "prompt_template.py").read_text() == published.read_text()
    published.unlink()
    assert reward.fetch(offline=True)
    with pytest.raises(NotReady, match="no folder /no/such/VideoReward"):
        DanceGRPO(model_path="/no/such/VideoReward").fetch(offline=True)
