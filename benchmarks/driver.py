"""CPU time that a driven velocity costs over the bare call of the transformer, and steps of training by the driver over
those of the class written by hand; the two always taken in turn."""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import nft_update as nft
from benchmarks.timing import cpu_seconds, median_ratio, take_turns
from cosmos_rl.data.given import text_of
from cosmos_rl.policy.config import DiffusersConfig
from cosmos_rl.policy.model.diffusers.pipeline_model import PipelineModel
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.loading import load_pipeline
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.policy.model.driver.probe import prove
from cosmos_rl.policy.model.quiet import quiet_libraries
from cosmos_rl.policy.model.tiny import build
from cosmos_rl.policy.model.tiny.sd3 import Preset, sd3_pipeline
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import StepConditions
from cosmos_rl.policy.trainer.rl.nft import DiffusionNft
from cosmos_rl.policy.trainer.rl.update import accumulate_gradient

ROUNDS = 100
STEPS, BATCH = 11, 32


def measure() -> list[tuple[str, str, str]]:
    """One row per kind of call."""
    with tempfile.TemporaryDirectory() as folder:
        path = build("sd3", Path(folder) / "sd3", "unit", seed=0)
        driver = Driver(load_pipeline(str(path)), call={"max_sequence_length": 16})
        probe = cpu_seconds(lambda: prove(driver))
        rows = [_overhead(driver, 1.0), _overhead(driver, 4.0), *compare_steps(Path(folder) / "steps")]
        return [*rows, ("driver: all checks on tiny SD3", f"{probe:.1f} s CPU", "<= 10 s")]


def _overhead(driver: Driver, guidance: float) -> tuple[str, str, str]:
    cond = driver.encode(["a", "b"], guidance=guidance)
    x, level = torch.randn(2, 4, 8, 8), driver.training_level(torch.tensor(0.5))
    scalar = (float(level.t), float(level.sigma))
    leaves = driver.first_inputs(x, scalar, cond, guidance, driver.size).leaves
    inputs = {key.split("'")[1]: value for key, value in leaves.items()}
    transformer = driver.denoisers["transformer"]

    def bare() -> None:
        transformer(**inputs)

    def driven() -> None:
        driver.velocity(x, level, cond, guidance)

    with torch.no_grad():
        times = take_turns({"driven": driven, "bare": bare}, ROUNDS)
    more = statistics.median(a - b for a, b in zip(times["driven"], times["bare"], strict=True))
    return f"driver: velocity over bare call, guidance {guidance:g}", f"{1000 * more:.2f} ms CPU", "<= 2 ms"


def compare_steps(folder: Path) -> list[tuple[str, str, str]]:
    """Loss and gradient of one step of SFT and of NFT on the same tiny SD3."""
    torch.manual_seed(0)
    with quiet_libraries():
        sd3_pipeline(Preset(layers=4, heads=4, head_dim=32)).save_pretrained(folder)
    config = DiffusersConfig(max_prompt_length=16, inference_size=(nft.SIZE, nft.SIZE))
    kinds: tuple[type[PipelineModel], ...] = (SD3Model, DrivenModel)
    models = [kind(config, model_str=str(folder), lora_config=nft.LORA) for kind in kinds]
    found = []
    for name, make in (("SFT", _sft_step), ("NFT", _nft_step)):
        by_hand, driven = (make(model) for model in models)
        times = take_turns({"driven": driven, "by hand": by_hand}, STEPS)
        ours, theirs = (nft.gradients(model) for model in reversed(models))
        apart = float((ours - theirs).norm() / theirs.norm())
        if apart > 1e-4:
            raise RuntimeError(f"{name}: gradients differ by {apart}")
        ratio = median_ratio(times["driven"], times["by hand"])
        found.append((f"driver: {name} step over the class written by hand", f"{ratio:.3f}", "<= 1.05"))
    return found


def _sft_step(model: PipelineModel) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(BATCH, *model.latent_shape(nft.SIZE, nft.SIZE), generator=generator)
    noise = torch.randn(clean.shape, generator=generator)
    index = torch.randint(0, 1000, (BATCH,), generator=generator)
    cond = model.encode_prompts([f"a photo of the digit {row % 10}" for row in range(BATCH)])

    def step() -> None:
        total, weight = model.training_sft_step(clean, cond, timestep=index, noise=noise)
        (total / weight).backward()

    return step


def _nft_step(model: PipelineModel) -> Callable[[], None]:
    policies = model.policies(keep_old=True, keep_reference=True)
    rows, _, _ = nft.pairs_of(model)
    algorithm = DiffusionNft(nft.BETA, -nft.HIGH, nft.HIGH, 0, num_sigmas=nft.LEVELS)
    conditions = StepConditions(lambda prompts, _: model.encode_prompts([text_of(prompt) for prompt in prompts]))
    conditions.encode_all(rows.prompts)
    frozen = algorithm.frozen(old_is_current=False, kl_beta=1e-4)

    def step() -> None:
        accumulate_gradient(
            model, policies, algorithm, rows, conditions, micro_batch=nft.MICRO, frozen=frozen, kl_beta=1e-4
        )

    return step
