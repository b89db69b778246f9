"""Peak memory of a rank while it loads a pipeline and resumes, against its share of the weights and the optimiser."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

from benchmarks.images import write_images
from cosmos_rl.policy.model.quiet import quiet_libraries
from cosmos_rl.policy.model.tiny import build

WIDTH, LAYERS = 1024, 8  # 293 M weights: with both moments 3,356 MB in float32


def write_pipeline(folder: Path) -> int:
    """The tiny pipeline with a large transformer; the number of its weights."""
    build("sd3", folder, "unit", seed=0)
    with quiet_libraries():
        pipe = StableDiffusion3Pipeline.from_pretrained(folder)
        config = {**pipe.transformer.config, "num_layers": LAYERS, "num_attention_heads": WIDTH // 64}
        config |= {"attention_head_dim": 64, "caption_projection_dim": WIDTH}
        large: Any = SD3Transformer2DModel.from_config(config)
        large.save_pretrained(folder / "transformer")
    return sum(param.numel() for param in large.parameters())


def job(folder: Path, resume: str) -> None:
    """One rank: train a step and save, or resume; print this process's memory (bytes) and its share of the state."""
    import cosmos_rl.policy.trainer.diffusers_trainer.build  # noqa: F401 (the level after imports includes it)
    from cosmos_rl.checkpoint.layout import policy_dir
    from cosmos_rl.checkpoint.manager import CheckpointManager, SaveJob
    from cosmos_rl.checkpoint.state import collect, restore
    from cosmos_rl.data.local_pairs import LocalPairs
    from cosmos_rl.distributed.context import process_group
    from cosmos_rl.policy.config import Config
    from cosmos_rl.policy.trainer.diffusers_trainer.build import build_sft

    torch.set_num_threads(1)
    policy = {"model_name_or_path": str(folder / "model"), "is_diffusers": True}
    policy["diffusers"] = {"max_prompt_length": 16, "inference_size": [32, 32]}
    job_table = {"type": "sft", "dataset": {"local_dir": str(folder / "data")}}
    table = {"param_dtype": "float32", "global_batch_size": 2, "epoch": 9, "train_policy": job_table}
    config = Config.from_dict({"policy": policy, "train": table})
    with process_group("cpu") as context:
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark starts here
        trainer = build_sft(config, context, dataset=LocalPairs(folder / "data", 32, 32))
        optimizer = trainer.optimizer.torch_optimizer
        if resume == "resume":
            restore(policy_dir(folder / "c", 1), trainer.params, optimizer, {})
        else:
            trainer.start(0)
            trainer.train_step(0)
            manager = CheckpointManager(
                folder / "c", folder / "e", background=False, max_keep=1, is_main=context.is_main
            )
            manager.save(SaveJob(1, collect(trainer.params, optimizer, {}), {}, None))
            manager.close()
        peak = memory("VmHWM")
        print(json.dumps({"grown": peak - before}))


def memory(key: str) -> int:
    """A line of this process's status, bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def run_ranks(count: int, folder: Path, what: str) -> int:
    """The largest growth over the ranks, bytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(count):
        environment = {**os.environ, **{k: str(v) for k, v in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}}
        command = [sys.executable, "-m", "benchmarks.memory", str(folder), what]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
            )
        )
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank failed")
    return max(json.loads(output.splitlines()[-1])["grown"] for output in outputs)


def measure() -> list[tuple[str, str, str]]:
    """Rows (what, result, target)."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_pipeline(folder / "model")
        write_images(folder / "data", 8, 32)
        for ranks in (1, 2):
            run_ranks(ranks, folder, "train")
            share = 12 * count / ranks  # float32 weights and two moments
            grown = run_ranks(ranks, folder, "resume")
            what = f"peak memory of loading and resuming, {ranks} rank(s) of {share / 2**20:.0f} MB state, per state"
            rows.append((what, f"{grown / share:.3f}", "<= 1.3"))
    return rows


if __name__ == "__main__":
    job(Path(sys.argv[1]), sys.argv[2])
