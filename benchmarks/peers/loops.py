"""The three training loops, each as something that runs one epoch when asked, in one process."""

import contextlib
import gc
import importlib
import importlib.util
import os
import random
import sys
import tempfile
import time
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers import changes
from benchmarks.peers.patch import copy_with_changes
from benchmarks.peers.recipe import Recipe
from cosmos_rl.policy.model.quiet import load_adapter, quiet_libraries, quiet_warnings

Reward = Callable[[np.ndarray, Sequence[str]], np.ndarray]
"""(images uint8 `[B, H, W, 3]`, prompts) -> scores `[B]`."""


@dataclass(frozen=True)
class Bench:
    """What all loops start from."""

    base: Path
    """The fine-tuned pipeline."""
    data: Path
    """The quickstart's folder `data`."""
    reward: Reward
    seed: int


@dataclass(frozen=True)
class Spent:
    """CPU seconds of an epoch."""

    rollout: float
    """With rewards and advantages."""
    update: float


class Loop(Protocol):
    """A training loop under way."""

    counter: "Counter"

    def epoch(self) -> Spent:
        """Sample and learn once."""
        ...

    def result(self) -> contextlib.AbstractContextManager[Any]:
        """The stock pipeline with the averaged weights, where the loop keeps an average."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Counter:
    """Rows of the forward and backward passes of a network, counted by hooks."""

    def __init__(self, network: nn.Module) -> None:
        self.forwards = self.backwards = self.text_tokens = 0
        network.register_forward_hook(self._note, with_kwargs=True)

    @property
    def evaluations(self) -> int:
        """A backward pass counts as two."""
        return self.forwards + 2 * self.backwards

    def _note(self, module: nn.Module, args: object, given: Mapping[str, Any], output: Any) -> None:
        first: Tensor = output[0]
        rows, self.text_tokens = len(first), given["encoder_hidden_states"].shape[1]
        self.forwards += rows
        if first.requires_grad:
            first.register_hook(lambda grad: self._note_backward(rows))

    def _note_backward(self, rows: int) -> None:
        self.backwards += rows


class RandomState:
    """The global random states of one of several loops that take turns: each draws as if it were alone."""

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._numpy = np.random.RandomState(seed).get_state()
        self._python = random.Random(seed).getstate()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block it is the process's."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        try:
            yield
        finally:
            self._torch, self._numpy = torch.get_rng_state(), np.random.get_state()
            self._python = random.getstate()


# ---- ours ----------------------------------------------------------------------------------------------------------

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class Ours:
    """The task of a real run, on the quickstart's nft.toml with an adapter; without the watch over the run."""

    def __init__(self, bench: Bench, recipe: Recipe) -> None:
        from cosmos_rl.distributed.context import Context
        from cosmos_rl.policy.config import load_config
        from cosmos_rl.policy.trainer.rl.build import build_online
        from cosmos_rl.reward import batch_reward
        from cosmos_rl.tools.dataset.diffusion_nft import training_prompts

        self._bench, self._step, self._learning = bench, 0, 0.0
        config = load_config(Path("examples/quickstart/nft.toml"), _overrides(bench, recipe))

        @batch_reward
        def reward(media: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
            return bench.reward(media, prompts)

        self._random = RandomState(bench.seed)
        with self._random.in_use():
            device = Context(torch.device("cpu"))
            self._task = build_online(config, device, dataset=training_prompts, reward_fns=[reward])
            self._task.start(0)
        self.counter = Counter(self._task.model.transformer)
        learn = self._task._learn

        def timed(*args: Any) -> Any:
            began = time.process_time()
            try:
                return learn(*args)
            finally:
                self._learning = time.process_time() - began

        self._task._learn = timed  # type: ignore[method-assign]

    def epoch(self) -> Spent:
        """One training step."""
        with self._random.in_use():
            began = time.process_time()
            self._task.train_step(self._step)
            spent = time.process_time() - began
        self._step += 1
        return Spent(spent - self._learning, self._learning)

    @contextlib.contextmanager
    def result(self) -> Iterator[Any]:
        """The export, loaded by plain diffusers."""
        import quickstart

        with tempfile.TemporaryDirectory() as name:
            self._task.prepare_export()(Path(name))
            pipe = quickstart.sampler(self._bench.base)
            load_adapter(pipe, Path(name) / "lora")
            yield pipe

    def close(self) -> None:
        """End what scores samples."""
        self._task.close()


def _overrides(bench: Bench, recipe: Recipe) -> list[str]:
    job, diffusers, lora = "train.train_policy", "policy.diffusers", "policy.lora"
    targets = ", ".join(f'"attn.{name}"' for name in TARGETS)
    return [
        f"policy.model_name_or_path={bench.base}",
        f"{lora}.r=32",
        f"{lora}.lora_alpha=64",
        f'{lora}.lora_names=["default", "old"]',
        f'{lora}.init_lora_weights="gaussian"',
        f"{lora}.target_modules=[{targets}]",
        f"{diffusers}.timesteps_fraction={recipe.levels / recipe.sampling_steps}",
        f"{diffusers}.sample.num_steps={recipe.sampling_steps}",
        f"{diffusers}.nft_beta={recipe.beta}",
        f"{diffusers}.weight_copy_decay_type={recipe.decay}",
        f"rollout.n_generation={recipe.group}",
        f"rollout.batch_size={recipe.prompts}",
        f"train.global_batch_size={recipe.samples}",
        f"train.seed={bench.seed}",
        f"train.optm_lr={recipe.lr}",
        'train.device="cpu"',
        "train.max_num_steps=10000",
        "train.epoch=100000",
        f"{job}.mini_batch={recipe.micro_batch}",
        f"{job}.batch_size_per_optimize={recipe.update_size}",
        f"{job}.learnt_share={recipe.share}",
        f"{diffusers}.even_levels={str(recipe.even_levels).lower()}",
        f"{job}.mu_iterations={recipe.passes}",
        f"{job}.kl_beta={recipe.kl}",
        f"{job}.dataset.local_dir={bench.data / 'prompts.txt'}",
        f"{job}.use_remote_reward=false",
        f"{job}.reward_hacking_guard.enable=false",
        "validation.enable=false",
        "logging.multi_modal_log_interval=100000",
    ]


# ---- the peers -----------------------------------------------------------------------------------------------------


class _Table(types.SimpleNamespace):
    """Stands in for ml_collections.ConfigDict."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class _OneProcess(nn.Module):
    """Stands in for DistributedDataParallel: no bookkeeping at all, in the peer's favour."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _module(name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


def _stand_ins(reward: Reward) -> dict[str, types.ModuleType]:
    """Modules that the peers import and that are not installed, or that are the benchmark's own."""
    flags = _module("absl.flags", FLAGS=_Table(config=None))
    app = _module("absl.app")
    config_flags = _module("ml_collections.config_flags", DEFINE_config_file=_nothing)

    def multi_score(device: object, weights: Mapping[str, float]) -> Callable[..., Any]:
        def score(images: Tensor, prompts: Sequence[str], metadata: object, only_strict: bool = True) -> Any:
            pixels = (images.float() * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
            return {"avg": reward(pixels.cpu().numpy(), prompts)}, {}

        return score

    return {
        "absl": _module("absl", app=app, flags=flags),
        "absl.app": app,
        "absl.flags": flags,
        "ml_collections": _module("ml_collections", ConfigDict=_Table, config_flags=config_flags),
        "ml_collections.config_flags": config_flags,
        "wandb": _module("wandb", init=_nothing, log=_nothing, finish=_nothing, Image=_nothing),
        "flow_grpo.rewards": _module("flow_grpo.rewards", multi_score=multi_score),
        "flow_grpo.prompts": _module("flow_grpo.prompts"),
    }


def _import_libraries() -> None:
    """Those that look for others when they are imported; they must not find a stand-in."""
    import cosmos_rl.policy.model.diffusers  # noqa: F401, I001 - before diffusers
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    from diffusers import StableDiffusion3Pipeline  # noqa: F401


def _load(copy: Path, file: str, stand_ins: Mapping[str, types.ModuleType]) -> types.ModuleType:
    """A module of a changed copy; its neighbours are found, and are forgotten afterwards: both peers call theirs
    flow_grpo."""
    spec = importlib.util.spec_from_file_location("peer_" + Path(file).stem, copy / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    _import_libraries()
    with mock.patch.dict(sys.modules, stand_ins), mock.patch.object(sys, "path", [str(copy), *sys.path]):
        importlib.invalidate_caches()
        spec.loader.exec_module(module)
        mine = {name: one for name, one in sys.modules.items() if name.split(".")[0] == "flow_grpo"}
        added = {name: one for name, one in sys.modules.items() if name not in before}
        if "flow_grpo" in mine:  # an import that finds a stand-in does not bind it in its package
            mine["flow_grpo"].rewards = stand_ins["flow_grpo.rewards"]  # type: ignore[attr-defined]
    # patch.dict took out all that was added: the libraries among it stay, for others hold them
    sys.modules.update({name: one for name, one in added.items() if name not in mine and name not in stand_ins})
    return module


class Peer:
    """A peer's ``main`` as a generator."""

    kind = ""
    changes: tuple[Any, ...] = ()

    def __init__(self, checkout: Path, bench: Bench, recipe: Recipe) -> None:
        self._folder = tempfile.TemporaryDirectory()
        copy = Path(self._folder.name)
        copy_with_changes(checkout, copy, changes.FOLDERS, self.changes)
        prompts = (bench.data / "prompts.txt").read_text(encoding="utf-8")
        for part in ("train", "test"):
            (copy / f"{part}.txt").write_text(prompts, encoding="utf-8")
        stand_ins = _stand_ins(bench.reward)
        self.module: Any = _load(copy, changes.SCRIPTS[self.kind], stand_ins)
        config = _load(copy, "config/base.py", stand_ins).get_config()
        _set_common(config, copy, bench, recipe)
        self.configure(config, recipe)
        self.module.FLAGS = _Table(config=config)
        self.module.tqdm = lambda items, **options: items
        self._random = RandomState(bench.seed)
        self._main: Generator[tuple[str, dict[str, Any]]] = self.module.main(None)
        environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} if self.kind == "nft" else {}
        with mock.patch.dict(os.environ, environment), self._random.in_use(), quiet_libraries(), quiet_warnings():
            self.seen = self._advance("sampling")
        self.seen["pipeline"].set_progress_bar_config(disable=True)
        self.counter = Counter(self.network())

    def configure(self, config: Any, recipe: Recipe) -> None:
        """Set what only this peer has."""

    def network(self) -> nn.Module:
        """The transformer."""
        return self.seen["transformer"].get_base_model()

    def _advance(self, phase: str) -> dict[str, Any]:
        found, seen = next(self._main)
        if found != phase:
            raise RuntimeError(f"{self.kind}: the loop waits before {found} in place of {phase}")
        return seen

    def epoch(self) -> Spent:
        """Sample and learn once."""
        with self._random.in_use():
            began = time.process_time()
            self._advance("learning")
            sampled = time.process_time()
            self.seen = self._advance("sampling")
            return Spent(sampled - began, time.process_time() - sampled)

    @contextlib.contextmanager
    def result(self) -> Iterator[Any]:
        """Its pipeline, with the averaged weights where it keeps an average."""
        pipe, ema, params = self.seen["pipeline"], self.seen["ema"], self.seen["transformer_trainable_parameters"]
        pipe.transformer.eval()
        averaged = self.module.FLAGS.config.train.ema
        if averaged:
            kept = [param.detach().clone() for param in params]
            ema.copy_ema_to(params, store_temp=False)
        yield pipe
        if averaged:
            with torch.no_grad():
                for param, value in zip(params, kept, strict=True):
                    param.copy_(value)

    def close(self) -> None:
        """Forget the loop, and delete the copy."""
        self._main.close()
        self._folder.cleanup()
        gc.collect()


def _set_common(config: Any, folder: Path, bench: Bench, recipe: Recipe) -> None:
    config.seed, config.dataset, config.logdir = bench.seed, str(folder), str(folder / "logs")
    config.pretrained.model, config.resolution = str(bench.base), 32
    config.mixed_precision, config.allow_tf32, config.prompt_fn = "no", False, "general_ocr"
    config.save_freq = config.eval_freq = 10**9
    sample, train = config.sample, config.train
    sample.num_steps = sample.eval_num_steps = recipe.sampling_steps
    sample.guidance_scale, sample.num_batches_per_epoch = 1.0, 1
    sample.train_batch_size = sample.test_batch_size = recipe.samples
    sample.num_image_per_prompt = recipe.group
    train.learning_rate, train.adam_beta2, train.adam_weight_decay = recipe.lr, 0.99, 0.0
    train.batch_size, train.num_inner_epochs = recipe.micro_batch, recipe.passes
    train.gradient_accumulation_steps = recipe.samples // recipe.updates // recipe.micro_batch
    train.timestep_fraction = (recipe.levels + 0.01) / recipe.sampling_steps
    train.beta = recipe.kl


class Nft(Peer):
    """DiffusionNFT's."""

    kind = "nft"
    changes = changes.NFT

    def configure(self, config: Any, recipe: Recipe) -> None:
        """The sampler of its recipes; one process."""
        config.sample.deterministic, config.sample.solver = True, "dpm2"
        config.decay_type, config.beta, config.debug = recipe.decay, recipe.beta, True
        config.num_epochs = 10**6
        self.module.DDP = _OneProcess
        self.module.setup_distributed = self.module.cleanup_distributed = _nothing
        self.module.dist = _Table(
            all_gather=lambda into, value: into[0].copy_(value), all_reduce=_nothing, ReduceOp=_Table(AVG=None)
        )


class Grpo(Peer):
    """flow_grpo's."""

    kind = "grpo"
    changes = changes.GRPO

    def configure(self, config: Any, recipe: Recipe) -> None:
        """Its noise and clip; no average, which it would update at every eighth step; no evaluation."""
        from accelerate import Accelerator

        config.sample.noise_level, config.train.clip_range = 0.7, recipe.clip
        config.train.cfg, config.train.ema = False, False
        # here an epoch is one sampling batch, which it cuts into as many pieces as it sampled
        config.sample.train_batch_size = recipe.samples // recipe.updates
        config.sample.num_batches_per_epoch = recipe.updates
        self.module.Accelerator = partial(Accelerator, cpu=True)
        self.module.eval = _nothing
        self.module.print = _nothing
