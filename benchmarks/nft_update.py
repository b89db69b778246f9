"""CPU time of the DiffusionNFT update against a plain transcription of the paper's loop over the same pairs.

The plain loop runs three forward passes and a backward pass for every micro-batch: the old policy, the reference and
the trained policy. With LoRA it switches adapters as PEFT does; with all weights trained the old policy and the
reference are modules of their own. Ours leaves out what is not needed. Both must give the same gradient.
"""

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import median_ratio, take_turns
from cosmos_rl.data.given import text_of
from cosmos_rl.distributed import randomness
from cosmos_rl.policy.config import DiffusersConfig, LoraConfig
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.diffusers.pipeline_model import PipelineModel
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.policy.model.policies import Policies
from cosmos_rl.policy.model.quiet import quiet_libraries
from cosmos_rl.policy.model.tiny.sd3 import Preset, sd3_pipeline
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import StepConditions
from cosmos_rl.policy.trainer.rl.algorithm import Rows
from cosmos_rl.policy.trainer.rl.nft import DiffusionNft
from cosmos_rl.policy.trainer.rl.update import accumulate_gradient

SIZE, SAMPLES, LEVELS, MICRO, ROUNDS = 64, 16, 4, 16, 7
BETA, HIGH = 1.0, 5.0
KEY = (0, "nft/noise/0", 0)
LORA = LoraConfig(
    r=8, lora_alpha=16, lora_names=("default", "old"), target_modules=("to_q", "to_k", "to_v", "to_out.0")
)


@dataclass(frozen=True)
class Setting:
    """What a comparison runs."""

    label: str
    target: str
    lora: bool
    old_is_current: bool
    kl_beta: float


SETTINGS = [
    Setting("recipe: LoRA, old policy and reference", "<= 1.0", lora=True, old_is_current=False, kl_beta=1e-4),
    Setting("LoRA, no reference", "<= 0.85", lora=True, old_is_current=False, kl_beta=0.0),
    Setting("LoRA, old policy is current", "<= 0.85", lora=True, old_is_current=True, kl_beta=1e-4),
    Setting("LoRA, both left out", "<= 0.65", lora=True, old_is_current=True, kl_beta=0.0),
    Setting("all weights, old policy and reference", "<= 1.05", lora=False, old_is_current=False, kl_beta=1e-4),
    Setting("all weights, old policy is current", "<= 0.85", lora=False, old_is_current=True, kl_beta=1e-4),
    Setting("all weights, both left out", "<= 0.65", lora=False, old_is_current=True, kl_beta=0.0),
]


class Counter:
    """Rows that went through modules."""

    def __init__(self, *modules: nn.Module) -> None:
        self.rows = 0
        for module in modules:
            module.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _module: nn.Module, _args: object, keywords: Mapping[str, Tensor]) -> None:
        self.rows += len(keywords["hidden_states"])


def pairs_of(model: PipelineModel) -> tuple[Rows, Cond, Tensor]:
    """All pairs of a step, the conditions of its four prompts, and each row's place in them."""
    prompts = [f"a photo of the digit {i}" for i in range(4)]
    count = SAMPLES * LEVELS
    generator = torch.Generator().manual_seed(0)
    rows = Rows(
        data={"clean": torch.randn(count, *model.latent_shape(SIZE, SIZE), generator=generator)},
        prompts=[prompts[i % 4] for i in range(count)],
        level=model.training_level(torch.rand(count, generator=generator) * 0.9 + 0.05),
        value=torch.rand(count, generator=generator),
        weight=torch.ones(count),
        noise_ids=list(range(count)),
        noise_key=KEY,
    )
    return rows, model.encode_prompts(prompts), torch.arange(count) % 4


def plain_update(
    model: SD3Model, rows: Rows, cond: Cond, row_cond: Tensor, others: Mapping[str, nn.Module]
) -> Callable[[float], None]:
    """Algorithm 1 of the paper, lines 8 to 12, in the fewest lines; ``others``: modules, or none (LoRA)."""
    transformer: Any = model.transformer

    def velocity(module: Any, noised: Tensor, sigma: Tensor, text: Mapping[str, Tensor]) -> Tensor:
        return module(hidden_states=noised, timestep=sigma * 1000, **text, return_dict=False)[0]

    def run(kl_beta: float) -> None:
        for first in range(0, len(rows.prompts), MICRO):
            which = slice(first, first + MICRO)
            clean, sigma, r = rows.data["clean"][which], rows.level.sigma[which], rows.value[which]
            noise = randomness.normal(clean.shape[1:], *KEY, rows.noise_ids[which])
            s = sigma[:, None, None, None]
            noised = (1 - s) * clean + s * noise
            text = {name: value[row_cond[which]] for name, value in cond.text.items()}
            with torch.no_grad():
                if others:
                    old = velocity(others["old"], noised, sigma, text)
                    reference = velocity(others["reference"], noised, sigma, text)
                else:
                    transformer.set_adapter("old")
                    old = velocity(transformer, noised, sigma, text)
                    transformer.disable_adapters()
                    reference = velocity(transformer, noised, sigma, text)
                    transformer.enable_adapters()
                    transformer.set_adapter("default")
            new = velocity(transformer, noised, sigma, text)
            dims = (1, 2, 3)
            fits = []
            for direction in (1, -1):
                error = noised - s * (old + direction * BETA * (new - old)) - clean
                weight = error.detach().double().abs().mean(dims, keepdim=True).clamp(min=1e-5)
                fits.append((error**2 / weight).mean(dims))
            loss = (HIGH / BETA * (r * fits[0] + (1 - r) * fits[1])).sum()
            loss = loss + kl_beta * ((new - reference) ** 2).mean(dims).sum()
            loss.backward()

    return run


@torch.no_grad()
def drift_apart(model: SD3Model, policies: Policies, others: Mapping[str, nn.Module], *, old_too: bool) -> None:
    """Change the trained policy, and the old one to another or to the same; both loops see the same weights."""
    for param in model.trainable_parameters().values():
        param.add_(0.02 * torch.randn_like(param))
    policies.update_old(0.0)
    for value in policies.old_state().values() if old_too else ():
        value.add_(0.02 * torch.randn_like(value))
    policies.old_equals_current = not old_too
    if others:
        others["old"].load_state_dict({**model.transformer.state_dict(), **policies.old_state()})


def gradients(model: PipelineModel) -> Tensor:
    """All gradients in one vector; they are cleared."""
    found = [p.grad.flatten() for p in model.trainable_parameters().values() if p.grad is not None]
    for param in model.trainable_parameters().values():
        param.grad = None
    return torch.cat(found)


def compared(folder: Path, setting: Setting) -> tuple[str, str, str]:
    """One row of the table."""
    config = DiffusersConfig(max_prompt_length=16, inference_size=(SIZE, SIZE))
    model = SD3Model(config, model_str=str(folder), lora_config=LORA if setting.lora else None)
    model.transformer.train()
    policies = model.policies(keep_old=not setting.old_is_current, keep_reference=setting.kl_beta > 0)
    names = () if setting.lora else ("old", "reference")
    others = {name: copy.deepcopy(model.transformer).requires_grad_(False).eval() for name in names}
    drift_apart(model, policies, others, old_too=not setting.old_is_current)
    rows, cond, row_cond = pairs_of(model)
    algorithm = DiffusionNft(BETA, -HIGH, HIGH, 0, num_sigmas=LEVELS)
    conditions = StepConditions(lambda prompts, _: model.encode_prompts([text_of(prompt) for prompt in prompts]))
    conditions.encode_all(rows.prompts)
    counter = Counter(model.transformer, *others.values())
    plain = plain_update(model, rows, cond, row_cond, others)

    def ours() -> None:
        accumulate_gradient(
            model,
            policies,
            algorithm,
            rows,
            conditions,
            micro_batch=MICRO,
            frozen=algorithm.frozen(old_is_current=setting.old_is_current, kl_beta=setting.kl_beta),
            kl_beta=setting.kl_beta,
        )

    loops: dict[str, Callable[[], None]] = {"ours": ours, "plain": lambda: plain(setting.kl_beta)}
    seen, found = {}, {}

    def note(key: str) -> None:
        seen[key], found[key] = (counter.rows // len(rows.prompts), model.num_evaluations), gradients(model)
        model.num_evaluations, counter.rows = 0, 0

    model.num_evaluations, counter.rows = 0, 0
    times = take_turns(loops, ROUNDS, after=note)
    ratio = median_ratio(times["ours"], times["plain"])
    apart = float((found["ours"] - found["plain"]).norm() / found["plain"].norm())
    wanted = 1 + (not setting.old_is_current) + (setting.kl_beta > 0)
    if seen["ours"] != (wanted, (wanted + 2) * len(rows.prompts)) or seen["plain"][0] != 3 or apart > 1e-4:
        raise RuntimeError(f"{setting.label}: not the same work or result: {seen}, {apart}")
    text = f"{ratio:.3f} ({wanted} forwards against 3)"
    return f"NFT update, {setting.label}", text, setting.target


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    with tempfile.TemporaryDirectory() as name, quiet_libraries():
        torch.manual_seed(0)
        sd3_pipeline(Preset(layers=4, heads=4, head_dim=32)).save_pretrained(name)
        return [compared(Path(name), setting) for setting in SETTINGS]
