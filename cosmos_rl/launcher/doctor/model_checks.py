"""Does a configuration's model do what a run relies on: load, adapt, learn, decode, export. One rank, one batch."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.data.folders import load_training_pairs
from cosmos_rl.data.given import PromptKey, choose_own, join_key
from cosmos_rl.data.items import Item
from cosmos_rl.data.preferences import PreferencePairs
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context, pick_device
from cosmos_rl.errors import UserError
from cosmos_rl.launcher import machine
from cosmos_rl.launcher.acceptance.accept import unsupported_parts
from cosmos_rl.launcher.doctor.finding import FAIL, INFO, OK, WARN, Finding, choose_mark
from cosmos_rl.launcher.doctor.measures import check_gradients, relative_distance
from cosmos_rl.policy.config import Config, DpoPolicyConfig, load_config
from cosmos_rl.policy.config.jobs import job_kind
from cosmos_rl.policy.config.ranks import with_world_size
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.driver.loading import read_pipeline
from cosmos_rl.policy.model.quantised import restore
from cosmos_rl.policy.model.quiet import load_adapter_weights, quiet_libraries
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_model, prepare_export
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding, add_media
from cosmos_rl.policy.trainer.diffusers_trainer.noising import NoisedSamples
from cosmos_rl.policy.trainer.diffusers_trainer.preferences import NoisedPreferences

_LEAST_PSNR = 20.0
"""dB; less, and not much better than one colour for the whole image, and the VAE is not to be trusted."""
_ABOVE_FLAT = 3.0
_STEPS = 2


def examine(config_file: str, overrides: Sequence[str]) -> Iterator[Finding]:
    """One line for each promise, with the number that was measured. What depends on a failed line is left out."""
    config = load_config(config_file, overrides, fit=lambda config: with_world_size(config, 1))
    problems = unsupported_parts(config, own_script=True)
    if problems:
        raise UserError("\n".join(problems))
    device = pick_device(config.train.device)
    data: Sequence[Item] | None = None
    try:
        model: PipelineModel = _load(config, device)
        if not job_kind(config).online:
            data = _pairs(config)
    except UserError as error:
        yield Finding(FAIL, "model and data", str(error))
        return
    except (OSError, ValueError, RuntimeError) as error:  # what the libraries raise for files that are not whole
        yield Finding(FAIL, "model and data", f"{type(error).__name__}: {error}")
        return
    count = sum(p.numel() for p in model.trainable_parameters().values())
    yield Finding(OK, "model loads", f"{type(model.pipeline).__name__} on {device}, {count:,} trained weights")
    yield from _targets(model)
    finite = _finite_weights(model)
    yield finite
    if finite.mark == FAIL:
        return
    if data is None:
        yield from _examine_rl(config, model)
    else:
        yield from _examine_sft(config, model, data)


def _examine_sft(config: Config, model: PipelineModel, data: Sequence[Item]) -> Iterator[Finding]:
    items = [data[i] for i in range(min(config.train.train_policy.mini_batch, len(data)))]
    height, width = items[0].visual.shape[-2:]
    with model.at_size((height, width)):  # of buckets the first one's
        yield from _try_samples(config, model, [item for item in items if item.visual.shape[-2:] == (height, width)])


def _try_samples(config: Config, model: PipelineModel, items: Sequence[Item]) -> Iterator[Finding]:
    """Encoding, a step and an export with samples of the size that the model works on."""
    latents = model.encode_visuals([item.visual for item in items], *model.media_size)
    cond = _encode_items(config, model, items)
    yield _reconstruction(items[0], model.decode_conditioned(latents[:1], cond.rows(slice(0, 1)))[0])
    yield from _fresh_adapter(model, latents, cond)
    noised = _noise(model, latents, cond, config.train.seed)
    job = config.train.train_policy
    if isinstance(job, DpoPolicyConfig):
        noised = _pair_up(model, noised, items, Encoding(model, config), job.dpo_beta)
    step = list(_one_step(config, model, noised))
    yield from step
    if all(finding.mark != FAIL for finding in step):
        yield _export(model, config, items[0].prompt)


def _encode_items(config: Config, model: PipelineModel, items: Sequence[Item]) -> Cond:
    """The conditions of captions, with the first frames of their own videos where the model takes any."""
    _, most = model.conditional_frames
    prompts: list[PromptKey] = [item.prompt for item in items]
    if most > 0:
        count = model.count_given(most)
        prompts = [join_key(item.prompt, choose_own(item, item.name, most, count)) for item in items]
    cond = model.encode_prompts([item.prompt for item in items])
    return add_media(model, cond, prompts, model.media_size)


def _examine_rl(config: Config, model: PipelineModel) -> Iterator[Finding]:
    from cosmos_rl.launcher.doctor.rl_checks import examine_rl

    shape = model.latent_shape(*config.policy.diffusers.inference_size)
    latents = randomness.normal(shape, config.train.seed, "doctor/latents", 0, [0]).to(model.device)
    yield from _fresh_adapter(model, latents, model.encode_prompts(["a photo"]))
    findings = list(examine_rl(config, model))
    yield from findings
    if any(finding.subject == "backward" and finding.mark == OK for finding in findings):
        yield _export(model, config, "a photo")


def _load(config: Config, device: torch.device) -> Any:
    """The model as the trainer builds it."""
    return build_model(config, Context(device), rest_on_cpu=False)


def _pairs(config: Config) -> Sequence[Item]:
    dataset = config.train.train_policy.dataset
    if not dataset.listed:
        raise UserError("train.train_policy.dataset.local_dir: missing; one batch of it is tried")
    if job_kind(config).data == "preferences":
        return PreferencePairs.of_config(dataset, config)
    return load_training_pairs(config)


# ---- adapters and weights ----------------------------------------------------------------------------------------


def _targets(model: PipelineModel) -> Iterator[Finding]:
    """How many layers each target found. Targets that find none do not get this far: loading refuses them."""
    if model.lora_config is None:
        return
    marked = f".lora_A.{model.primary_adapter}.weight"
    names = [name.removesuffix(marked) for name in model.trainable_parameters() if name.endswith(marked)]
    if model.lora_config.target_modules == "all-linear":
        yield Finding(OK, "adapter targets", f"all-linear: {len(names)} layers")
        return
    for target in model.lora_config.target_modules:
        count = sum(name == target or name.endswith(f".{target}") for name in names)
        yield Finding(choose_mark(count > 0), "adapter target", f"{target}: {count} layers")


def _finite_weights(model: PipelineModel) -> Finding:
    """Every weight of every part is a number."""
    parts = {name: p for name, p in model.pipeline.components.items() if isinstance(p, torch.nn.Module)}
    wrong = [
        f"{part}.{name}".replace(".base_layer.", ".")
        for part, module in parts.items()
        for name, value in module.state_dict().items()
        if value.is_floating_point() and not bool(restore(value).isfinite().all())
    ]
    if not wrong:
        return Finding(OK, "base weights", f"all finite, in {len(parts)} parts")
    shown = ", ".join(wrong[:3])
    if len(wrong) > 3:
        shown += f" and {len(wrong) - 3} more"
    return Finding(FAIL, "base weights", f"NaN or infinity in {shown}", "fetch the model again, or take another one")


def _fresh_adapter(model: PipelineModel, latents: Tensor, cond: Cond) -> Iterator[Finding]:
    lora = model.lora_config
    if lora is None:
        return
    if lora.lora_path or lora.init_lora_weights is False:
        yield Finding(INFO, "fresh adapter", "starts with an effect, as the configuration sets it")
        return
    level = model.training_level(torch.full((len(latents),), 0.5))
    with torch.no_grad(), model.eval_mode():
        adapted = model.velocity(latents, level, cond)
        for module in model.denoisers.values():
            module.disable_adapters()
        try:
            plain = model.velocity(latents, level, cond)
        finally:
            for module in model.denoisers.values():
                module.enable_adapters()
    change = relative_distance(adapted, plain)
    mark = choose_mark(change <= 1e-5)
    yield Finding(mark, "fresh adapter", f"changes the model's output by {change:.1e} (relative)")


# ---- one image, one step ---------------------------------------------------------------------------------------


def _reconstruction(item: Item, again: Tensor) -> Finding:
    """An image or a video after the VAE, ``[(T,) 3, H, W]``, against itself and against its mean colours."""
    image = (item.visual.to(again.device).float() + 1) / 2
    if image.ndim == 4:
        image = image.movedim(0, 1)
    reached = _psnr(again, image)
    flat = _psnr(image.mean(dim=(-2, -1), keepdim=True).expand_as(image), image)
    bad = not math.isfinite(reached) or reached < min(_LEAST_PSNR, flat + _ABOVE_FLAT)
    text = f"{item.name}: PSNR {reached:.1f} dB after encode and decode; one flat colour gives {flat:.1f} dB"
    if bad:
        return Finding(WARN, "VAE", text, "the VAE destroys images: is it a trained one?")
    return Finding(OK, "VAE", text)


def _psnr(image: Tensor, target: Tensor) -> float:
    return -10 * math.log10(max(float((image - target).square().mean()), 1e-10))


def _noise(model: PipelineModel, latents: Tensor, cond: Cond, seed: int) -> NoisedSamples:
    ids = range(len(latents))
    noise = randomness.normal(latents.shape[1:], seed, "doctor/noise", 0, list(ids)).to(latents.device)
    index = torch.tensor([(2 * i + 1) * model.train_sampling_steps // (2 * len(ids)) for i in ids])
    return NoisedSamples(latents, cond, noise, index)


def _pair_up(
    model: PipelineModel, chosen: NoisedSamples, items: Sequence[Item], encoding: Encoding, beta: float
) -> NoisedPreferences:
    policies = model.policies(keep_old=False, keep_reference=True)
    return NoisedPreferences.of_samples(chosen, items, encoding, beta).with_reference(model, policies, len(items))


def _one_step(config: Config, model: PipelineModel, noised: NoisedSamples) -> Iterator[Finding]:
    """Loss and gradients of one micro-batch."""
    model.transformer.train()
    count = len(noised.clean)
    if isinstance(noised, NoisedPreferences):
        total, weight, _ = noised.dpo_loss(model)
        about = f"{count} preferences; at the reference it is ln 2 = {math.log(2):.4g}"
    else:
        total, weight = noised.loss(model)
        about = f"{count} samples"
    value = float(total.detach() / weight)
    yield Finding(choose_mark(math.isfinite(value)), "forward", f"loss {value:.4g} on {about}")
    if not math.isfinite(value):
        return
    total.backward()
    yield from check_gradients(model, float(weight))


# ---- export ------------------------------------------------------------------------------------------------------


def _export(model: PipelineModel, config: Config, prompt: str) -> Finding:
    """The exported policy, loaded by plain diffusers, samples what the trainer samples, and not what the base does."""
    guidance = config.policy.diffusers.sample.guidance_scale
    shape, seed = model.latent_shape(*config.policy.diffusers.inference_size), config.train.seed
    noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed))
    cond = model.encode_prompts([prompt], "" if guidance > 1.0 else None, each=True)

    def sample() -> Tensor:
        with torch.no_grad(), model.eval_mode():
            return model.sample_latents(cond, noise, num_steps=_STEPS, guidance=guidance, solver="stock").cpu()

    before = sample()
    _follow_gradients(model)
    ours = sample()
    with tempfile.TemporaryDirectory(prefix="cosmos-rl-doctor-") as place:
        needed = 4 * sum(p.numel() for p in model.transformer.parameters())
        if model.lora_config is None and machine.free_disk(Path(place)) < 2 * needed:
            return Finding(WARN, "export", f"not tried: too little room in {place}", "set TMPDIR to a larger disk")
        prepare_export(model)(Path(place) / "step_0")
        plain = _load_plain(model, Path(place) / "step_0")
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            theirs = model.sample_stock(plain, prompt, generator, num_steps=_STEPS, guidance=guidance).float().cpu()
    apart, change = relative_distance(theirs, ours), relative_distance(before, ours)
    text = f"plain diffusers differs by {apart:.1e} after {_STEPS} steps; one training step made {change:.1e}"
    if config.policy.lora is not None and config.policy.lora.quantize_base != "none":
        return Finding(INFO, "export", f"{text} (its base is not quantised)")
    exact = config.train.param_dtype == "float32" and config.policy.diffusers.dtype == "float32"
    same = apart <= min(1e-3, change / 2) if exact else apart <= 5e-2
    return Finding(choose_mark(same), "export", text)


def _follow_gradients(model: PipelineModel) -> None:
    """Move the trained weights a little: a fresh adapter would prove nothing."""
    with torch.no_grad():
        for param in model.trainable_parameters().values():
            if param.grad is not None:
                largest = param.grad.abs().max().clamp_min(1e-12)
                param.sub_(param.grad * (0.01 / largest))
                param.grad = None


def _load_plain(model: PipelineModel, folder: Path) -> Any:
    """The exported policy as diffusers loads it."""
    is_adapter = model.lora_config is not None
    source = model.base_folder if is_adapter else folder
    with quiet_libraries():
        pipe: Any = read_pipeline(source, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if is_adapter:
        load_adapter_weights(pipe, folder / "lora")
    return pipe.to(model.device)
