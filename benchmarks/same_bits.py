"""Small runs through the real command, and digests of what they leave: a change of structure changes none of them.

    python -m benchmarks.same_bits --out before.json      # at one commit
    python -m benchmarks.same_bits --against before.json  # at another one

Digests do not depend on the names of tensors or metrics: they are those of the sorted digests of the single tensors,
and of the sorted values of each step's metrics (without times and memory). The same machine and library versions are
assumed.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.images import write_images

STEPS = 4
STOP_AT = 2
"""Steps of the run that is resumed."""
PROMPTS = ("a red square", "a lost cat", "a dog", "four birds", "a boat", "the sea", "a lost key", "blue paint")
DEADLINE_S = 900
VARYING = ("time", "memory", "per_second", "eta")
"""Parts of the names of metrics that a busy machine changes."""

COMMON = """
[policy]
model_name_or_path = "{folder}/model"
is_diffusers = true
model_gradient_checkpointing = false
[policy.diffusers]
max_prompt_length = 12
inference_size = [32, 32]
{diffusers}
{lora}
[train]
output_dir = "{folder}/{name}"
epoch = 100
max_num_steps = {steps}
param_dtype = "float32"
optm_lr = 1e-3
optm_warmup_steps = 2
ema_enable = true
ema_decay = 0.9
{train}
[train.ckpt]
save_freq = 1
max_keep = -1
export_safetensors = false
"""
LORA = """
[policy.lora]
r = 4
lora_alpha = 8
lora_dropout = 0.1
lora_names = ["default", "old"]
init_lora_weights = "gaussian"
target_modules = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]
"""
SFT = """
[train.train_policy]
type = "sft"
mini_batch = 2
dataset.local_dir = "{folder}/data"
"""
NFT = """
[rollout]
n_generation = 4
[train.train_policy]
type = "grpo"
trainer_type = "diffusion_nft"
uncentralized_training = true
mini_batch = 4
batch_size_per_optimize = 8
kl_beta = 1e-2
dataset.local_dir = "{folder}/prompts.txt"
local_reward.reward_fns = [{{ function = "cosmos_rl.reward.examples:sharpness" }}]
reward_hacking_guard.samples = 4
"""
SAMPLER = """timesteps_fraction = 0.5
weight_copy_decay_type = 1
sample = { num_steps = 4, guidance_scale = 1.0, deterministic_sampling = true }"""


@dataclass(frozen=True)
class Run:
    """One configuration, and how it is started."""

    name: str
    rl: bool = False
    lora: bool = False
    ranks: int = 1
    extra: str = ""
    resumed: bool = False
    options: tuple[str, ...] = ()

    def toml(self, folder: Path) -> str:
        """The whole configuration."""
        job = NFT if self.rl else SFT
        diffusers = SAMPLER if self.rl else "sample = { num_steps = 3, guidance_scale = 3.0 }"
        batch = "train_batch_per_replica = 16" if self.rl else "global_batch_size = 4"
        fields = {"folder": folder, "name": self.name, "steps": STEPS, "diffusers": diffusers, "train": batch}
        job += "" if self.extra == REWIND else "reward_hacking_guard.freq = 2\n" if self.rl else ""
        text = COMMON.format(lora=LORA if self.lora else "", **fields) + job.format(folder=folder) + self.extra
        return 'mode = "colocated"\n' + text if self.rl else text


REWIND = """reward_hacking_guard.action = "rewind"
reward_hacking_guard.max_loss_ratio = 1.0001
reward_hacking_guard.min_diversity_ratio = 1.0
reward_hacking_guard.freq = 1
"""
"""The second look or a later one finds something wrong; the run rewinds until it may not rewind again, and stops."""
DATA_TERM = """data_term = {{ beta = 0.1, batch_size = 4, local_dir = "{folder}/data" }}
"""
FLOW = (
    "--train.train_policy.trainer_type=flow_grpo",
    '--policy.diffusers.sample={num_steps = 4, guidance_scale = 1.0, solver = "flow", noise_level = 0.7}',
)
DDRL = (*FLOW, "--train.train_policy.trainer_type=ddrl", "--train.train_policy.kl_beta=0.0")
PAIRS = ("--train.train_policy.trainer_type=online_dpo", "--policy.diffusers.weight_copy_decay_type=0")
RUNS = (
    Run("sft-lora", lora=True),
    Run("sft-full"),
    Run("sft-lora-2-ranks", lora=True, ranks=2),
    Run("sft-full-caches", extra="enable_dataset_cache = true\n"),
    Run("sft-full-resumed", resumed=True),
    Run("nft-lora", rl=True, lora=True),
    Run("nft-full", rl=True),
    Run("nft-full-2-ranks", rl=True, ranks=2),
    Run("nft-lora-data-term", rl=True, lora=True, extra=DATA_TERM),
    Run("nft-full-rewind", rl=True, extra=REWIND),
    Run("flow-grpo-lora-2-ranks", rl=True, lora=True, ranks=2, options=FLOW),
    Run("flow-grpo-full", rl=True, options=FLOW),
    Run("ddrl-full", rl=True, extra=DATA_TERM, options=DDRL),
    Run("online-dpo-full", rl=True, options=PAIRS),
)


def main() -> None:
    """Run, print, and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the digests to this JSON file")
    parser.add_argument("--against", type=Path, help="compare with the digests in this JSON file")
    parser.add_argument("--only", nargs="*", default=[run.name for run in RUNS], help="names of runs")
    given = parser.parse_args()
    digests: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for run in RUNS:
            if run.name in given.only:
                digests[run.name] = measure(run, folder)
                print(f"{run.name:22} {json.dumps(digests[run.name])}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(digests, indent=1), encoding="utf-8")
    if given.against is not None:
        before = json.loads(given.against.read_text(encoding="utf-8"))
        changed = [run for run in digests if digests[run] != before.get(run)]
        print(f"{len(digests) - len(changed)} of {len(digests)} equal; changed: {', '.join(changed) or 'none'}")
        sys.exit(1 if changed else 0)


def prepare(folder: Path) -> None:
    """A tiny model, images and prompts."""
    from cosmos_rl.policy.model.tiny import build

    build("sd3", folder / "model", "unit", seed=0)
    write_images(folder / "data", 12, 40)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")


def measure(run: Run, folder: Path) -> dict[str, str]:
    """Train to the end, and the digests of the last checkpoint and of all metrics."""
    config = folder / f"{run.name}.toml"
    text = run.toml(folder).replace("{folder}", str(folder)).replace("{{", "{").replace("}}", "}")
    config.write_text(text, encoding="utf-8")
    if run.resumed:
        train(config, run, f"--train.max_num_steps={STOP_AT}")
    train(config, run, f"--train.resume={json.dumps(run.resumed)}")
    (root,) = (entry for entry in (folder / run.name).iterdir() if entry.is_dir() and entry.name.isdigit())
    return {**digest_checkpoint(newest_checkpoint(root)), "metrics": digest_metrics(root / "metrics.jsonl")}


def train(config: Path, run: Run, *overrides: str) -> None:
    """The real command; a run that its guard stops ends with an error, which is what is wanted of it."""
    script = "cosmos_rl.tools.dataset." + ("diffusion_nft" if run.rl else "diffusers_dataset")
    command = [sys.executable, "-m", "cosmos_rl.launcher.cli", "--config", str(config)]
    command += ["--nproc-per-node", str(run.ranks), *run.options, *overrides, script]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", timeout=DEADLINE_S)
    if done.returncode not in ((0, 1) if run.extra == REWIND else (0,)):
        sys.exit(f"{run.name} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    if run.extra == REWIND and "Rewinding to step" not in done.stdout:
        sys.exit(f"{run.name} was not rewound:\n{done.stdout[-3000:]}")


def newest_checkpoint(root: Path) -> Path:
    """The ``policy`` folder of the last step."""
    steps = (root / "checkpoints").glob("step_*")
    return max(steps, key=lambda path: int(path.name.removeprefix("step_"))) / "policy"


def digest_checkpoint(policy: Path) -> dict[str, str]:
    """Digests of the trained weights, the optimiser's state, and all else that is saved."""
    parts: dict[str, list[str]] = {"weights": [], "moments": [], "copies": []}
    for name, tensor in load_tensors(policy).items():
        part = {"model": "weights", "optim": "moments"}.get(name.split(".", 1)[0], "copies")
        raw = tensor.contiguous().view(-1).numpy().tobytes()
        parts[part].append(hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + raw).hexdigest())
    return {part: shorten(digests) for part, digests in parts.items()}


def load_tensors(policy: Path) -> Mapping[str, Any]:
    """All tensors of a checkpoint, whatever their names."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(policy).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=policy, no_dist=True)
    return state


def digest_metrics(path: Path) -> str:
    """Digest of the values of every step, without those that a busy machine changes."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kept = (value for name, value in row.items() if not any(part in name for part in VARYING))
        lines.append(json.dumps(sorted(map(repr, kept))))
    return shorten(lines, ordered=True)


def shorten(texts: Iterable[str], *, ordered: bool = False) -> str:
    """One short digest of many texts."""
    listed = list(texts) if ordered else sorted(texts)
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
