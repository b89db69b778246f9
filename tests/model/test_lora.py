"""Adapters: what they touch, how they start, which errors are refused."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from safetensors.torch import load_file, save_file

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.acceptance.selection import select
from cosmos_rl.launcher.pipeline_files import PipelineFiles
from cosmos_rl.policy.config import Config, DiffusersConfig, LoraConfig, PolicyConfig
from cosmos_rl.policy.model import lora
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.quiet import load_adapter

ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")


def build(tiny_sd3: Path, *, param_dtype: str = "float32", checkpointing: bool = False, **options: object) -> SD3Model:
    torch.manual_seed(0)
    table = LoraConfig(**{"r": 4, "lora_alpha": 8.0, "target_modules": ATTENTION, **options})  # type: ignore[arg-type]
    return SD3Model(
        DiffusersConfig(max_prompt_length=16, inference_size=(32, 32)),
        model_str=str(tiny_sd3),
        lora_config=table,
        param_dtype=param_dtype,
        gradient_checkpointing=checkpointing,
    )


def velocity(model: SD3Model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 8, 8, generator=generator)
    level = model.training_level(torch.tensor([0.3, 0.8]))
    return model.velocity(latents, level, model.encode_prompts(["a cat", "a dog"]))


def test_a_fresh_adapter_changes_no_bit(tiny_sd3: Path) -> None:
    base = SD3Model(DiffusersConfig(max_prompt_length=16), model_str=str(tiny_sd3))
    assert torch.equal(velocity(base), velocity(build(tiny_sd3, init_lora_weights=True)))
    assert torch.equal(velocity(base), velocity(build(tiny_sd3, init_lora_weights="gaussian")))


def test_only_the_adapter_is_trained_and_in_float32(tiny_sd3: Path) -> None:
    model = build(tiny_sd3, param_dtype="bfloat16")
    names = list(model.trainable_parameters())
    assert len(names) == 2 * 2 * len(ATTENTION)
    assert all(".lora_A.default." in n or ".lora_B.default." in n for n in names)
    assert {p.dtype for p in model.trainable_parameters().values()} == {torch.float32}
    assert model.transformer.transformer_blocks[0].attn.to_q.base_layer.weight.dtype == torch.bfloat16
    assert model.vae.dtype == torch.float32


def test_bf16_compute_is_close_to_float32(tiny_sd3: Path) -> None:
    exact, rounded = velocity(build(tiny_sd3)), velocity(build(tiny_sd3, param_dtype="bfloat16"))
    assert rounded.dtype == torch.float32
    # bf16 keeps 8 bits: two layers stay within a few of its steps
    assert float((exact - rounded).norm() / exact.norm()) < 0.05
    assert not torch.equal(exact, rounded)


def test_all_linear_adapts_every_linear_layer(tiny_sd3: Path) -> None:
    base = SD3Model(DiffusersConfig(max_prompt_length=16), model_str=str(tiny_sd3))
    model = build(tiny_sd3, target_modules="all-linear")
    assert len(model.trainable_parameters()) == 2 * len(lora.list_linear_names(base.transformer))


def test_the_scale_is_alpha_over_r_and_with_rslora_over_its_root(tiny_sd3: Path) -> None:
    layer = "transformer_blocks.0.attn.to_q"
    plain = build(tiny_sd3, r=4, lora_alpha=6.0).transformer.get_submodule(layer)
    rooted = build(tiny_sd3, r=4, lora_alpha=6.0, use_rslora=True).transformer.get_submodule(layer)
    assert (plain.scaling["default"], rooted.scaling["default"]) == (1.5, 3.0)


def test_targets_that_match_nothing_are_all_listed_with_the_nearest_name(tiny_sd3: Path) -> None:
    with pytest.raises(UserError) as error:
        build(tiny_sd3, target_modules=("attn.to_q", "attn.to_qq", "attn1.to_k"))
    assert "'attn.to_qq' matches no layer of the transformer; did you mean 'attn.to_q'?" in str(error.value)
    assert "'attn1.to_k' matches no layer of the transformer" in str(error.value)
    assert "'attn.to_q' matches" not in str(error.value)


def test_a_target_that_is_a_layer_in_some_blocks_and_a_list_in_others_is_refused_by_launch_and_check() -> None:
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 4, 4)}
    model = Flux2Transformer2DModel(num_layers=1, num_single_layers=2, joint_attention_dim=8, **heads)
    config = LoraConfig(target_modules=("attn.to_q", "attn.to_out"))
    with pytest.raises(UserError) as error:
        lora.add_adapters(model, config)
    line = (
        "policy.lora.target_modules: 'attn.to_out' matches layers of the transformer, but also "
        "transformer_blocks.0.attn.to_out, which cannot have an adapter; choose among 'attn.to_out.0', and "
        "'single_transformer_blocks.0.attn.to_out', 'single_transformer_blocks.1.attn.to_out'"
    )
    assert str(error.value) == line
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    files = PipelineFiles(Path("flux2"), "Flux2KleinPipeline", {"transformer": shapes}, {})
    job = Config(policy=PolicyConfig(lora=LoraConfig(target_modules=("attn.to_out",))))
    assert list(select(job, files).problems) == [line]
    choices = ("attn.to_out.0", *(f"single_transformer_blocks.{block}.attn.to_out" for block in range(2)))
    lora.add_adapters(model, config.model_copy(update={"target_modules": choices}))
    assert sum(name.endswith(".lora_A.default.weight") for name, _ in model.named_parameters()) == 3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_adapter_learns_with_and_without_checkpointing(tiny_sd3: Path, checkpointing: bool) -> None:
    model = build(tiny_sd3, checkpointing=checkpointing, init_lora_weights="gaussian")
    model.transformer.train()
    velocity(model).square().mean().backward()
    grads = {name: p.grad for name, p in model.trainable_parameters().items()}
    ups = [g for name, g in grads.items() if "lora_B" in name]
    assert all(g is not None for g in grads.values())
    assert all(float(g.abs().max()) > 0 for g in ups if g is not None)
    reference = build(tiny_sd3, init_lora_weights="gaussian")
    reference.transformer.train()
    velocity(reference).square().mean().backward()
    for name, p in reference.trainable_parameters().items():
        torch.testing.assert_close(grads[name], p.grad)


def export_by_hand(model: SD3Model, path: Path, prefix: str = "transformer.") -> Path:
    state = {
        f"{prefix}{k}": torch.full_like(v, 0.5) for k, v in lora.adapter_state(model.transformer, "default").items()
    }
    save_file(state, path)
    return path


@pytest.mark.parametrize("prefix", ["transformer.", "base_model.model.", ""])
def test_a_warm_start_reads_diffusers_and_peft_keys(tiny_sd3: Path, tmp_path: Path, prefix: str) -> None:
    file = export_by_hand(build(tiny_sd3), tmp_path / "model.safetensors", prefix)
    model = build(tiny_sd3, lora_path=str(file))
    factors = set(lora.scales(model.transformer, "default").values())
    assert len(factors) == 1
    ups = 0.5 / factors.pop()  # a file without an alpha acts with the factor 1
    for name, value in model.trainable_parameters().items():
        assert float(value.min()) == float(value.max()) == (ups if "lora_B" in name else 0.5)
    assert lora.adapter_file(str(tmp_path)) == file


def test_a_warm_start_that_does_not_fit_is_refused(tiny_sd3: Path, tmp_path: Path) -> None:
    file = export_by_hand(build(tiny_sd3), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"\(4, 64\) in the file, \(2, 64\) in the adapter"):
        build(tiny_sd3, r=2, lora_path=str(file))
    with pytest.raises(UserError, match="not in the file"):
        build(tiny_sd3, target_modules="all-linear", lora_path=str(file))
    with pytest.raises(UserError, match="no adapter there"):
        build(tiny_sd3, lora_path=str(tmp_path / "nowhere"))
    metadata = {lora.METADATA_KEY: '{"transformer.r": 4, "transformer.lora_alpha": 64}'}
    save_file(load_file(file), file, metadata=metadata)
    with pytest.raises(UserError, match="trained with lora_alpha = 64"):
        build(tiny_sd3, lora_path=str(file))
    save_file(load_file(file), file)
    (tmp_path / "adapter_config.json").write_text('{"r": ')
    with pytest.raises(UserError, match=r"adapter_config\.json: cannot be read as JSON"):
        build(tiny_sd3, lora_path=str(file))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.safetensors: is not a complete \.safetensors file"):
        build(tiny_sd3, lora_path=str(file))
    with pytest.raises(UserError, match=r"model\.safetensors: is not a complete \.safetensors file"):
        load_adapter(build(tiny_sd3).pipeline, tmp_path)  # as cosmos-rl sample does


def test_an_image_pipeline_is_refused_for_videos(tiny_sd3: Path) -> None:
    with pytest.raises(UserError, match="is_video = true, but StableDiffusion3Pipeline makes images"):
        SD3Model(DiffusersConfig(is_video=True), model_str=str(tiny_sd3))


def test_the_output_process_is_the_pipelines_processor(tiny_sd3: Path) -> None:
    model = build(tiny_sd3)
    assert model.output_process is model.pipeline.image_processor
    model.pipeline = SimpleNamespace(video_processor="frames")
    with pytest.raises(UserError, match="is_video = false, but SimpleNamespace makes videos"):
        model.init_output_process()
    assert model.output_process == "frames"
    model.pipeline = SimpleNamespace()
    with pytest.raises(UserError, match="neither an image_processor nor a video_processor"):
        model.init_output_process()


def test_latents_are_shifted_and_scaled_and_decode_undoes_it(tiny_sd3: Path) -> None:
    model = build(tiny_sd3)
    image = torch.linspace(-1, 1, 3 * 32 * 32).reshape(3, 32, 32)
    latents = model.encode_visuals([image], 32, 32)
    mean = model.vae.encode(image[None]).latent_dist.mean
    shift, scale = model.vae.config.shift_factor, model.vae.config.scaling_factor
    assert (shift, scale) != (0.0, 1.0)
    torch.testing.assert_close(latents, (mean - shift) * scale, rtol=0, atol=1e-6)
    raw = model.vae.decode(mean).sample.detach()
    torch.testing.assert_close(model.decode(latents), (raw / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-5)


def test_text_is_cast_to_the_compute_dtype_whatever_the_encoders_have(tiny_sd3: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        config = DiffusersConfig(max_prompt_length=16, inference_size=(32, 32), dtype=dtype)
        model = SD3Model(config, model_str=str(tiny_sd3))
        assert model.text_encoder.dtype == torch.bfloat16 if dtype == "bfloat16" else torch.float16
        assert {p.dtype for p in model.trainable_parameters().values()} == {torch.float32}
        assert torch.isfinite(velocity(model)).all()


def test_sizes_that_the_patches_do_not_divide_are_refused(tiny_sd3: Path) -> None:
    with pytest.raises(UserError, match="needs multiples of 8"):
        SD3Model(DiffusersConfig(inference_size=(36, 32)), model_str=str(tiny_sd3))


def test_a_base_with_a_renamed_layer_is_refused(tiny_sd3: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_sd3, tmp_path / "base")
    file = tmp_path / "base/transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["transformer_blocks.0.attn.to_x.weight"] = weights.pop("transformer_blocks.0.attn.to_q.weight")
    save_file(weights, file)
    with pytest.raises(UserError) as error:
        build(tmp_path / "base")
    assert "missing: transformer_blocks.0.attn.to_q.weight" in str(error.value)
    assert "unexpected: transformer_blocks.0.attn.to_x.weight" in str(error.value)


def test_the_scale_of_a_peft_folder_is_checked_too(tiny_sd3: Path, tmp_path: Path) -> None:
    export_by_hand(build(tiny_sd3), tmp_path / "adapter_model.safetensors", "base_model.model.")
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 99, "rank_pattern": {}}')
    with pytest.raises(UserError, match="trained with lora_alpha = 99"):
        build(tiny_sd3, lora_path=str(tmp_path))


def test_the_count_of_fused_optimisers_lives_with_the_parameter() -> None:
    from cosmos_rl.checkpoint.state import _create_empty_moments

    param = torch.nn.Parameter(torch.zeros(2, device="meta"))
    for fused, device in ((True, "meta"), (False, "cpu")):
        optimizer = torch.optim.AdamW([param])
        optimizer.param_groups[0]["fused"] = fused
        about = SimpleNamespace(size=torch.Size(()), properties=SimpleNamespace(dtype=torch.float32))
        assert _create_empty_moments({"step": about}, param, optimizer)["step"].device.type == device
