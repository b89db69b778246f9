"""A user's own class whose transformer takes more of a text than the usual three keywords."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl.algorithms.flow_matching import flow_matching_loss
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, DiffusersConfig
from cosmos_rl.policy.model.base import ModelRegistry
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.family_runs import TrainedFamily, family_toml, folder_of
from tests.support.nft_runs import nft_train_task
from tests.support.trainer_runs import train

PROMPTS = ["a red square", "the sea", "a red square", "two birds & a boat"]
CACHE = "--train.train_policy.cache.text=true"


class CogView(DiffuserModel):
    """The four methods of the documents, over a transformer that takes three sizes besides the text."""

    @staticmethod
    def supported_model_types() -> list[str]:
        return ["CogView4Pipeline"]

    def __init__(self, config: DiffusersConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.set_scheduler_timestep(self.train_sampling_steps)
        self.text_encoders, self.tokenizers = [self.text_encoder], [self.tokenizer]

    def text_embedding(self, prompt_list: list[str], device: torch.device) -> dict[str, Any]:
        return {"encoder_hidden_states": embed(self, prompt_list), **self.sizes(prompt_list)}

    def sizes(self, prompts: list[str]) -> dict[str, Any]:
        return sizes_of(prompts)

    def visual_embedding(self, visual_list: list[Tensor], height: int, width: int, device: torch.device) -> Tensor:
        mean = self.vae.encode(torch.stack(visual_list).to(device)).latent_dist.mode()
        return (mean * self.vae.config.scaling_factor).float()


class SharingCogView(CogView):
    """One size for all, without a batch axis, and a constant."""

    def sizes(self, prompts: list[str]) -> dict[str, Any]:
        return {**sizes_of(["four"]), "attention_kwargs": {"scale": 1.0}}


class SamplingCogView(CogView):
    """With a sampler of its own, which takes the keywords too."""

    def pipeline_with_logprob(
        self,
        *,
        prompt_embeds,
        original_size,
        target_size,
        crop_coords,
        height,
        width,
        latents,
        num_inference_steps,
        **_,
    ) -> Any:
        sizes = {"original_size": original_size, "target_size": target_size, "crop_coords": crop_coords}
        self.scheduler.set_timesteps(num_inference_steps)
        sigmas, states = self.scheduler.sigmas, [latents]
        for index, timestep in enumerate(self.scheduler.timesteps):
            inputs = self.nft_prepare_transformer_input(
                states[-1], prompt_embeds, None, None, timestep.expand(len(latents)), 1, height, width
            )
            velocity = self.transformer(**inputs, **sizes)[0]
            states.append(states[-1] + (sigmas[index + 1] - sigmas[index]) * velocity)
        return self.decode(states[-1]), states, None


def sizes_of(prompts: list[str]) -> dict[str, Tensor]:
    """Another original size for each length of a text ``[B, 2]``, so that a wrong row is seen."""
    original = torch.tensor([[32.0 + len(prompt), 32.0] for prompt in prompts])
    return {
        "original_size": original,
        "target_size": torch.full_like(original, 32.0),
        "crop_coords": torch.zeros_like(original),
    }


def embed(model: DiffuserModel, prompts: list[str]) -> Tensor:
    made = model.pipeline.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=48)[0]
    return torch.nn.functional.pad(made, (0, 0, 48 - made.shape[1], 0))  # one length, whatever else is in the batch


def call_transformer(model: DiffuserModel, latents: Tensor, timestep: Tensor, prompts: list[str]) -> Tensor:
    """The transformer with each sample by itself, as its forward is documented."""
    shares, made = isinstance(model, SharingCogView), []
    for row, prompt in enumerate(prompts):
        sizes = sizes_of(["four" if shares else prompt])
        made.append(
            model.transformer(
                hidden_states=latents[row : row + 1],
                encoder_hidden_states=embed(model, prompts)[row : row + 1],
                timestep=timestep[row : row + 1],
                return_dict=False,
                **sizes,
            )[0]
        )
    return torch.cat(made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny CogView4 with noise levels that need no size of the image."""
    made = tmp_path_factory.mktemp("cogview") / "pipe"
    shutil.copytree(folder_of("cogview4"), made)
    path = made / "scheduler/scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dynamic_shifting": False}))
    return made


def build(kind: type[CogView], folder: Path) -> CogView:
    return kind(DiffusersConfig(inference_size=(32, 32), max_prompt_length=48), model_str=str(folder))


@pytest.mark.parametrize("kind", [CogView, SharingCogView])
def test_losses_and_velocities_are_those_of_the_transformer_called_directly(kind: type[CogView], folder: Path) -> None:
    model, draw = build(kind, folder), torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(4, 4, 4, 4, generator=draw) for _ in range(2))
    cond, indices = model.encode_prompts(PROMPTS, "no text"), torch.tensor([1, 5, 9, 3])
    timesteps = model.timestep_map[indices]
    with torch.no_grad(), model.eval_mode():
        sums = [
            model.training_sft_step(clean[rows], cond.rows(rows), timestep=indices[rows], noise=noise[rows])
            for rows in (slice(0, 2), torch.tensor([2]), slice(3, 4))
        ]
        sigma = (timesteps / 1000).view(-1, 1, 1, 1)
        noised = (1 - sigma) * clean + sigma * noise
        direct = call_transformer(model, noised, timesteps, PROMPTS)
        expected = flow_matching_loss(direct, clean, noise)
        torch.testing.assert_close(sum(loss for loss, _ in sums), expected[0], rtol=1e-5, atol=1e-6)
        assert sum(weight for _, weight in sums) == expected[1]
        level = Level(timesteps, timesteps / 1000)
        away = call_transformer(model, noised, timesteps, ["no text"] * 4)
        both = cond.rows(slice(0, 3)).concat(cond.rows(slice(3, 4)))
        torch.testing.assert_close(model.velocity(noised, level, cond), direct, rtol=1e-4, atol=1e-5)
        guided = model.velocity(noised, level, both, guidance=3.0)
        torch.testing.assert_close(guided, away + 3 * (direct - away), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [CogView, SharingCogView])
def test_conditions_come_back_from_the_cache(kind: type[CogView], folder: Path, tmp_path: Path) -> None:
    model, prompts = build(kind, folder), PROMPTS[:2]
    plain, config = (
        Config.from_dict(
            {
                "policy": {"model_name_or_path": str(folder), "is_diffusers": True},
                "train": {"train_policy": {"type": "sft", "cache": {"text": cached, "dir": str(tmp_path)}}},
            }
        )
        for cached in (False, True)
    )
    made = Encoding(model, config).conditions(prompts, ["no", "text"])
    plain = Encoding(model, plain).conditions(prompts, ["no", "text"])

    def fail(*args: Any, **kwargs: Any) -> dict[str, Any]:
        raise AssertionError("encoded again")

    model.text_embedding = fail
    again = Encoding(model, config).conditions(prompts, ["no", "text"])
    assert again.shared.keys() == made.shared.keys() == plain.shared.keys()
    for a, b in zip(leaves(again), leaves(made), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(leaves(made), leaves(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def leaves(cond: Cond) -> list[Tensor]:
    values = [value for table in (cond.text, cond.negative or {}, cond.shared) for _, value in sorted(table.items())]
    return [value if isinstance(value, Tensor) else torch.tensor(value["scale"]) for value in values]


def test_a_shared_tensor_as_long_as_the_batch_is_not_taken_for_rows(folder: Path) -> None:
    class Positions(CogView):
        def sizes(self, prompts: list[str]) -> dict[str, Any]:
            return {"txt_ids": torch.zeros(3, 2)}

    cond = build(Positions, folder).encode_prompts(["a", "b", "c"])
    assert list(cond.text) == ["encoder_hidden_states"]
    assert cond.rows(slice(0, 1)).shared["txt_ids"].shape == (3, 2)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda n: {"a": torch.zeros(n)}, "CogView.text_embedding: sizes is dict, neither a tensor nor a constant"),
        (lambda n: torch.zeros(2, n), "CogView.text_embedding: sizes changes its shape with the number of prompts"),
    ],
)
def test_what_cannot_be_split_into_rows_is_refused(folder: Path, value: Callable[[int], Any], said: str) -> None:
    model = build(CogView, folder)
    model.sizes = lambda prompts: {"sizes": value(len(prompts))}
    with pytest.raises(UserError, match=said):
        model.encode_prompts(["a", "b", "c"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CogView, SharingCogView])
@pytest.mark.parametrize("job", ["sft", "nft"])
def test_a_class_with_further_keywords_trains_with_the_cache_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, image_folder: Path, job: str, kind: type[CogView]
) -> None:
    monkeypatch.setattr(ModelRegistry, "_models", {"CogView4Pipeline": kind})
    config = family_toml(tmp_path, TrainedFamily("cogview4"), job=job, images=image_folder)
    config.write_text(config.read_text().replace(str(folder_of("cogview4")), str(folder)))
    runs = []
    for options in ([], [CACHE, f"--train.train_policy.cache.dir={tmp_path / 'cache'}"]):
        if job == "sft":
            run = train(config, "--train.max_num_steps=2", *options)
        else:
            run, task = nft_train_task(
                config, "--train.max_num_steps=2", "--policy.diffusers.sample.guidance_scale=3.0", *options
            )
            assert type(task.model) is kind
        runs.append(read_metrics(run / "metrics.jsonl"))
    assert [line["step"] for line in runs[0]] == [line["step"] for line in runs[1]] == [1, 2]
    for a, b in zip(*runs, strict=True):
        assert a["train/loss_mean"] == pytest.approx(b["train/loss_mean"], rel=1e-4)
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-3)
        assert a["optim/grad_norm"] > 0


@pytest.mark.slow
def test_a_sampler_of_ones_own_is_given_the_further_keywords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    config, lines = family_toml(tmp_path, TrainedFamily("cogview4"), job="nft"), []
    config.write_text(config.read_text().replace(str(folder_of("cogview4")), str(folder)))
    for kind in (SamplingCogView, CogView):
        monkeypatch.setattr(ModelRegistry, "_models", {"CogView4Pipeline": kind})
        run, task = nft_train_task(config, "--train.max_num_steps=2")
        assert type(task.model) is kind
        lines.append(read_metrics(run / "metrics.jsonl"))
    for a, b in zip(*lines, strict=True):
        for key in ("train/loss_mean", "reward/mean", "optim/grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-3), key
