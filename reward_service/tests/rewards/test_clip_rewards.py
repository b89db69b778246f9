"""PickScore and HPS v2 on small random models: each number is recomputed from the library's own forward pass."""

import numpy as np
import pytest
import torch
from tiny_reward_models import save_clip
from transformers import AutoTokenizer, CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from cosmos_rl_reward.handler import BadInput, NotReady
from cosmos_rl_reward.rewards import clip
from cosmos_rl_reward.rewards.hpsv2 import HPSv2
from cosmos_rl_reward.rewards.pickscore import PickScore
from cosmos_rl_reward.worker.frames import score_frames

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (3, 40, 57, 3), dtype=np.uint8)
PROMPTS = ["a red cat", "two dogs on the moon " * 9, "blue sky"]  # the second is longer than the context


@pytest.mark.parametrize("shape", [(40, 57), (57, 40), (28, 28), (20, 25)])
def test_cropping_is_that_of_the_library(shape):
    images = rng.integers(0, 256, (2, *shape, 3), dtype=np.uint8)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    expected = processor(images=list(images), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(clip.normalize(clip.resize_and_crop(images, 28)), expected, atol=1e-5)


def test_padding_centres_and_never_skips_it():
    wide = np.full((1, 10, 28, 3), 200, np.uint8)  # the longer side already has the target size
    result = clip.resize_and_pad(wide, 28)[0]
    assert result.shape == (28, 28, 3)
    assert (result[9:19] == 200).all()
    assert result[:9].max() == result[19:].max() == 0
    assert (
        clip.resize_and_pad(np.full((1, 100, 40, 3), 9, np.uint8), 28)[0, 14].tolist()
        == [[0] * 3] * 8 + [[9] * 3] * 11 + [[0] * 3] * 9
    )


def by_hand(model, tokenizer, pixels, prompts):
    """Cosine of each pair, from the two towers, one pair at a time."""
    values = []
    for image, prompt in zip(pixels, prompts, strict=True):
        ids = tokenizer(prompt, truncation=True, max_length=16, return_tensors="pt")
        text = model.text_projection(model.text_model(**ids).pooler_output)[0]
        image = model.visual_projection(model.vision_model(torch.from_numpy(image[None])).pooler_output)[0]
        values.append(torch.nn.functional.cosine_similarity(text, image, dim=0).item())
    return np.array(values)


def test_pickscore_is_the_scaled_cosine_over_26(tmp_path):
    model = save_clip(tmp_path)
    reward = PickScore(model_path=str(tmp_path), device="cpu", dtype="float16")
    reward.set_up()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = by_hand(model, tokenizer, clip.normalize(clip.resize_and_crop(IMAGES, 28)), PROMPTS)
    with torch.inference_mode():
        expected = expected * model.logit_scale.exp().item() / 26
    result = reward.calculate_reward(torch.from_numpy(IMAGES), {"prompts": PROMPTS})["scores"]["pickscore"]
    np.testing.assert_allclose(result, expected, atol=2e-6)
    assert np.ptp(result) > 0.01
    # a permutation of the samples permutes the scores
    order = [2, 0, 1]
    shuffled = reward.calculate_reward(IMAGES[order], {"prompts": [PROMPTS[i] for i in order]})["scores"]
    np.testing.assert_allclose(shuffled["pickscore"], np.array(result)[order], atol=2e-6)
    assert reward.provenance()["model_digest"].startswith("sha256:")
    with pytest.raises(BadInput, match="1 entries for 3"):
        reward.calculate_reward(IMAGES, {"prompts": ["a"]})


def test_a_video_has_the_mean_of_its_frames_scores(tmp_path):
    save_clip(tmp_path)
    reward = PickScore(model_path=str(tmp_path), dtype="float32", device="cpu")
    reward.set_up()
    videos = rng.integers(0, 256, (2, 3, 5, 40, 57), dtype=np.uint8)
    frames = videos.transpose(0, 2, 3, 4, 1)
    found = score_frames(videos, {"prompts": PROMPTS[:2]}, np.array([0, 2, 4]), 4, reward.calculate_reward)
    for video, prompt, value in zip(frames, PROMPTS[:2], found["scores"]["pickscore"], strict=True):
        single = reward.calculate_reward(video[[0, 2, 4]], {"prompts": [prompt] * 3})["scores"]["pickscore"]
        assert value == pytest.approx(np.mean(single), abs=1e-6)
        assert np.ptp(single) > 1e-4


def test_weights_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotReady, match="nowhere/to-be-found.*not a local folder"):
        PickScore(model_path="nowhere/to-be-found").fetch(offline=True)
    save_clip(tmp_path)
    with pytest.raises(NotReady, match=r"hpsv2/ckpts/HPS_v2.1_compressed.pt are missing"):
        HPSv2(download_path=str(tmp_path / "none"), options={"tokenizer": str(tmp_path)}).fetch(offline=True)
    with pytest.raises(NotReady, match="dtype: 'int8'"):
        PickScore(model_path=str(tmp_path), dtype="int8").set_up()


def open_clip_state(model: CLIPModel) -> dict[str, torch.Tensor]:
    """The weights of a transformers model in open_clip's layout, written down from open_clip's module tree."""
    state: dict[str, torch.Tensor] = {"logit_scale": model.logit_scale}
    state["visual.proj"] = model.visual_projection.weight.T
    state["text_projection"] = model.text_projection.weight.T
    for prefix, tower in (("visual.", model.vision_model), ("", model.text_model)):
        for index, layer in enumerate(tower.encoder.layers):
            assert isinstance(layer, CLIPEncoderLayer)
            block, attention = f"{prefix}transformer.resblocks.{index}.", layer.self_attn
            for kind in ("weight", "bias"):
                fused = [getattr(getattr(attention, f"{p}_proj"), kind) for p in "qkv"]
                state[f"{block}attn.in_proj_{kind}"] = torch.cat(fused)
                state[f"{block}attn.out_proj.{kind}"] = getattr(attention.out_proj, kind)
                state[f"{block}ln_1.{kind}"] = getattr(layer.layer_norm1, kind)
                state[f"{block}ln_2.{kind}"] = getattr(layer.layer_norm2, kind)
                state[f"{block}mlp.c_fc.{kind}"] = getattr(layer.mlp.fc1, kind)
                state[f"{block}mlp.c_proj.{kind}"] = getattr(layer.mlp.fc2, kind)
    vision, text = model.vision_model, model.text_model
    for kind in ("weight", "bias"):
        state[f"visual.ln_pre.{kind}"] = getattr(vision.pre_layrnorm, kind)
        state[f"visual.ln_post.{kind}"] = getattr(vision.post_layernorm, kind)
        state[f"ln_final.{kind}"] = getattr(text.final_layer_norm, kind)
    state["visual.class_embedding"] = vision.embeddings.class_embedding
    state["visual.positional_embedding"] = vision.embeddings.position_embedding.weight
    state["visual.conv1.weight"] = vision.embeddings.patch_embedding.weight
    state["token_embedding.weight"] = text.embeddings.token_embedding.weight
    state["positional_embedding"] = text.embeddings.position_embedding.weight
    return {name: value.detach().clone() for name, value in state.items()}


def test_hpsv2_is_the_cosine_of_an_open_clip_checkpoint(tmp_path):
    model = save_clip(tmp_path, seed=1)
    path = tmp_path / "hpsv2" / "ckpts" / "HPS_v2.1_compressed.pt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": {**open_clip_state(model), "attn_mask": torch.zeros(2, 2)}, "epoch": 3}, path)
    reward = HPSv2(download_path=str(tmp_path), dtype="float32", options={"tokenizer": str(tmp_path)})
    reward._config = model.config.to_dict()
    reward.set_up()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    expected = by_hand(model, tokenizer, clip.normalize(clip.resize_and_pad(IMAGES, 28)), PROMPTS)
    result = reward.calculate_reward(IMAGES, {"prompts": PROMPTS})["scores"]["hpsv2"]
    np.testing.assert_allclose(result, expected, atol=2e-6)
    assert np.ptp(result) > 0.01


def test_another_models_file_is_refused(tmp_path):
    model = save_clip(tmp_path)
    state = open_clip_state(model)
    others = {
        "unexpected, such as head.weight": {**state, "head.weight": torch.zeros(1)},
        "missing, such as text_model.final_layer_norm.bias": {k: v for k, v in state.items() if k != "ln_final.bias"},
        "mismatched, such as .*final_layer_norm.bias": {**state, "ln_final.bias": torch.zeros(7)},
    }
    for reason, other in others.items():
        torch.save(other, tmp_path / "other.pt")
        reward = HPSv2(model_path=str(tmp_path / "other.pt"), options={"tokenizer": str(tmp_path)})
        reward._config = model.config.to_dict()
        with pytest.raises(NotReady, match=reason):
            reward.set_up()


class Trap:
    """Would run code when unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("code from a weight file was run",))


def test_a_weight_file_cannot_run_code(tmp_path):
    save_clip(tmp_path)
    torch.save({"state_dict": Trap()}, tmp_path / "trap.pt")
    reward = HPSv2(model_path=str(tmp_path / "trap.pt"), options={"tokenizer": str(tmp_path)})
    with pytest.raises(Exception, match="[Ww]eights.only"):
        reward.set_up()
