"""ImageReward on a small random BLIP, recomputed step by step from the published file's weight names."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_reward_models import save_tokenizer, write_json
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.rewards import clip
from cosmos_rl_reward.rewards.image_reward import ImageReward

WIDTH, TEXT, HEADS, PATCH, SIZE = 16, 12, 2, 14, 28
VISION = {"hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": HEADS}
VISION |= {"patch_size": PATCH, "image_size": SIZE}
rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (3, 41, 58, 3), dtype=np.uint8)
PROMPTS = ["a red cat", "two dogs on the moon", "blue sky"]


def checkpoint(vocabulary):
    """A state dict with the names of the published file: vision transformer, text encoder, head."""
    generator = torch.Generator().manual_seed(0)
    state = {}

    def add(name, *shape):
        noise = torch.randn(*shape, generator=generator) * 0.3
        is_scale = ("norm" in name.lower()) and name.endswith("weight")
        state[name] = noise + 1 if is_scale else noise

    def linear(name, outputs, inputs):
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs)

    def norm(name, width):
        add(f"{name}.weight", width)
        add(f"{name}.bias", width)

    v = "blip.visual_encoder."
    add(f"{v}cls_token", 1, 1, WIDTH)
    add(f"{v}pos_embed", 1, 1 + (SIZE // PATCH) ** 2, WIDTH)
    add(f"{v}patch_embed.proj.weight", WIDTH, 3, PATCH, PATCH)
    add(f"{v}patch_embed.proj.bias", WIDTH)
    for n in range(2):
        norm(f"{v}blocks.{n}.norm1", WIDTH)
        linear(f"{v}blocks.{n}.attn.qkv", 3 * WIDTH, WIDTH)
        linear(f"{v}blocks.{n}.attn.proj", WIDTH, WIDTH)
        norm(f"{v}blocks.{n}.norm2", WIDTH)
        linear(f"{v}blocks.{n}.mlp.fc1", 20, WIDTH)
        linear(f"{v}blocks.{n}.mlp.fc2", WIDTH, 20)
    norm(f"{v}norm", WIDTH)
    t = "blip.text_encoder."
    add(f"{t}embeddings.word_embeddings.weight", vocabulary, TEXT)
    add(f"{t}embeddings.position_embeddings.weight", 40, TEXT)
    norm(f"{t}embeddings.LayerNorm", TEXT)
    state[f"{t}embeddings.position_ids"] = torch.arange(40)[None]
    for n in range(2):
        layer = f"{t}encoder.layer.{n}."
        for part, inputs in (("attention", TEXT), ("crossattention", WIDTH)):
            linear(f"{layer}{part}.self.query", TEXT, TEXT)
            linear(f"{layer}{part}.self.key", TEXT, inputs)
            linear(f"{layer}{part}.self.value", TEXT, inputs)
            linear(f"{layer}{part}.output.dense", TEXT, TEXT)
            norm(f"{layer}{part}.output.LayerNorm", TEXT)
        linear(f"{layer}intermediate.dense", 18, TEXT)
        linear(f"{layer}output.dense", TEXT, 18)
        norm(f"{layer}output.LayerNorm", TEXT)
    linear("blip.vision_proj", 8, WIDTH)  # in the file, not used for the score
    linear("mlp.layers.0", 10, TEXT)
    linear("mlp.layers.2", 6, 10)
    linear("mlp.layers.4", 1, 6)
    return state


def attend(query, key, value, mask=None):
    """Attention with HEADS heads on ``[L, D]``."""
    heads = [x.reshape(len(x), HEADS, -1).transpose(0, 1)[None] for x in (query, key, value)]
    result = F.scaled_dot_product_attention(*heads, attn_mask=mask)
    return result[0].transpose(0, 1).reshape(len(query), -1)


def score_by_hand(state, image, ids, mask):
    """One image and one prompt through BLIP, step by step."""

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name, x, eps):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps)

    v, t = "blip.visual_encoder.", "blip.text_encoder."
    patches = F.conv2d(image[None], state[f"{v}patch_embed.proj.weight"], state[f"{v}patch_embed.proj.bias"], PATCH)
    x = torch.cat([state[f"{v}cls_token"][0], patches[0].flatten(1).T]) + state[f"{v}pos_embed"][0]
    for n in range(2):
        b = f"{v}blocks.{n}."
        x = x + linear(f"{b}attn.proj", attend(*linear(f"{b}attn.qkv", norm(f"{b}norm1", x, 1e-6)).chunk(3, -1)))
        x = x + linear(f"{b}mlp.fc2", F.gelu(linear(f"{b}mlp.fc1", norm(f"{b}norm2", x, 1e-6))))
    seen = norm(f"{v}norm", x, 1e-6)
    y = (
        state[f"{t}embeddings.word_embeddings.weight"][ids]
        + state[f"{t}embeddings.position_embeddings.weight"][: len(ids)]
    )
    y = norm(f"{t}embeddings.LayerNorm", y, 1e-12)
    for n in range(2):
        layer = f"{t}encoder.layer.{n}."
        for part, source, allowed in (
            ("attention", None, mask.bool()[None, None, None]),
            ("crossattention", seen, None),
        ):
            p, keys = f"{layer}{part}.", y if source is None else source
            found = attend(
                linear(f"{p}self.query", y), linear(f"{p}self.key", keys), linear(f"{p}self.value", keys), allowed
            )
            y = norm(f"{p}output.LayerNorm", linear(f"{p}output.dense", found) + y, 1e-12)
        inner = F.gelu(linear(f"{layer}intermediate.dense", y))
        y = norm(f"{layer}output.LayerNorm", linear(f"{layer}output.dense", inner) + y, 1e-12)
    raw = linear("mlp.layers.4", linear("mlp.layers.2", linear("mlp.layers.0", y[0])))
    return ((raw - 0.16717362830052426) / 1.0333394966054072).item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("image_reward")
    tokenizer = save_tokenizer(path)
    torch.save(checkpoint(len(tokenizer)), path / "ImageReward.pt")
    write_json(
        path / "med_config.json",
        {
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 40,
            "hidden_size": TEXT,
            "intermediate_size": 18,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
        },
    )
    return path


def test_scores_are_those_of_the_architecture(folder):
    reward = ImageReward(model_path=str(folder), dtype="float32", options={"tokenizer": str(folder)})
    reward._vision_config = {**reward._vision_config, **VISION}
    reward.set_up()
    state = torch.load(folder / "ImageReward.pt", weights_only=True)
    pixels = torch.from_numpy(clip.normalize(clip.resize_and_crop(IMAGES, SIZE, nearest_offset=True)))
    words = reward._tokenizer(PROMPTS, padding="max_length", max_length=35, return_tensors="pt")
    expected = [score_by_hand(state, pixels[k], words["input_ids"][k], words["attention_mask"][k]) for k in range(3)]
    result = reward.calculate_reward(IMAGES, {"prompts": PROMPTS})["scores"]["image_reward"]
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-4)
    assert np.ptp(result) > 0.05
    assert reward.provenance()["model_digest"].startswith("sha256:")


@pytest.mark.parametrize("shape", [(41, 58), (58, 41), (28, 31), (20, 23)])
def test_cropping_is_torchvisions(shape):
    image = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
    steps = [Resize(28, interpolation=InterpolationMode.BICUBIC), CenterCrop(28), ToTensor()]
    to_pixels = Compose([*steps, Normalize(clip.MEAN.tolist(), clip.STD.tolist())])
    expected = np.asarray(to_pixels(Image.fromarray(image)))
    found = clip.normalize(clip.resize_and_crop(image[None], 28, nearest_offset=True))[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_another_file_is_no_image_reward(folder, tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "ImageReward.pt")
    write_json(tmp_path / "med_config.json", {"num_attention_heads": 2})
    reward = ImageReward(model_path=str(tmp_path), options={"tokenizer": str(folder)})
    with pytest.raises(NotReady, match="no ImageReward checkpoint"):
        reward.set_up()
    empty = ImageReward(model_path=str(tmp_path / ".."), options={"tokenizer": str(folder)})
    with pytest.raises(NotReady, match=r"none of ImageReward.safetensors, ImageReward.pt"):
        empty.set_up()
