"""Memory that runs out is reported with the place, an estimate by part, and what to change."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cosmos_rl.distributed.memory import memory_phase
from cosmos_rl.errors import OutOfMemory
from cosmos_rl.launcher import worker_entry
from cosmos_rl.launcher.check import out_of_memory
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.model.diffusers.sd3_model import SD3Model
from cosmos_rl.tools.dataset.diffusers_dataset import training_pairs, validation_data

VALIDATION = '[validation]\nenable = true\nfreq = 1\nbatch_size = 2\ndataset.local_dir = "{}"'


def run_out(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.parametrize(
    ("method", "phase", "remedy"),
    [
        ("trainable_parameters", "loading", "train.train_policy.mini_batch = 1, now 2"),
        ("encode_visuals", "encoding", 'train.param_dtype = "bfloat16"'),
        ("training_sft_step", "training", 'train.optm_name = "AdamW8bit"'),
        ("sample", "validating", "validation.batch_size = 1, now 2"),
        ("save_checkpoint_hook", "saving", 'train.ckpt.save_mode = "sync"'),
    ],
)
def test_the_message_says_where_how_much_and_what_to_change(
    write_toml: Callable[..., Path],
    image_folder: Path,
    use_model: Callable[[type], type],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    phase: str,
    remedy: str,
) -> None:
    hooks = {method: run_out} if method == "save_checkpoint_hook" else {}
    if not hooks:
        use_model(type("OutOfMemory", (SD3Model,), {method: run_out}))
    config = write_toml(VALIDATION.format(image_folder))
    monkeypatch.setattr(sys, "argv", ["script.py", "--config", str(config), "--train.device=cpu"])
    with pytest.raises(SystemExit) as end:
        worker_entry.main(dataset=training_pairs, val_dataset=validation_data, hook_fns=hooks)
    assert end.value.code == 1
    trace, _, message = capsys.readouterr().err.partition("error: ")
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried" in trace
    assert f"in {run_out.__name__}" in trace
    assert message.startswith(f"out of memory on the CPU while {phase}\nestimate for each rank:\n  trained weights")
    assert "in all, while: forward and backward" in message
    assert remedy in message.partition("what needs less memory")[2]


def test_memory_that_runs_out_during_a_rollout_is_reported_as_such(
    write_nft_toml: Callable[..., Path],
    use_model: Callable[[type], type],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_model(type("OutOfMemory", (SD3Model,), {"pipeline_with_logprob": run_out}))
    options = ["--train.device=cpu", "--train.train_policy.reward_hacking_guard.enable=false"]
    monkeypatch.setattr(sys, "argv", ["script.py", "--config", str(write_nft_toml()), *options])
    with pytest.raises(SystemExit):
        worker_entry.main(dataset=["a cat", "a dog"])
    message = capsys.readouterr().err.partition("error: ")[2]
    assert message.startswith("out of memory on the CPU while sampling\n")
    assert "rollout.n_generation_mini_batch = 4; now 8 samples are made at once" in message


def test_what_is_set_already_is_not_advised(write_toml: Callable[..., Path]) -> None:
    options = ["--train.train_policy.mini_batch=1", "--train.param_dtype=bfloat16", "--train.optm_name=AdamW8bit"]
    options += ["--train.activation_offload=true", "--train.base_offload=true"]
    text = out_of_memory.explain(load_config(write_toml(), options), "training", on_cpu=False)
    for word in (
        "mini_batch",
        "param_dtype",
        "[policy.lora]",
        "gradient_checkpointing",
        "8bit",
        "ema_enable",
        "offload",
    ):
        assert word not in text
    assert "out of memory on a GPU while training" in text
    assert "enable_dataset_cache = true" in text
    assert "more GPUs: policy.parallelism.dp_shard_size, now 1" in text


def test_the_inner_phase_counts_and_other_errors_pass() -> None:
    def nested(error: Exception) -> None:
        with memory_phase("training"), memory_phase("encoding"):
            raise error

    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):
        with pytest.raises(OutOfMemory) as caught:
            nested(error)
        assert caught.value.phase == "encoding"
    with pytest.raises(RuntimeError, match="shape mismatch"):
        nested(RuntimeError("shape mismatch"))
