"""`[profiler]`: a trace of the chosen steps, and nothing at all when it is off."""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import ProfilerConfig
from tests.support.trainer_runs import train

ON = "--profiler.enable_profiler=true"
WINDOW = "--profiler.sub_profiler_config."


@pytest.mark.slow
def test_the_steps_of_the_window_are_recorded(write_toml: Callable[..., Path]) -> None:
    run = train(write_toml(), ON, f"{WINDOW}wait_steps=1", f"{WINDOW}active_steps=2", f"{WINDOW}record_shape=true")
    assert sorted(p.name for p in (run / "profile").iterdir()) == ["step_3-4_rank_0.json", "step_3-4_rank_0.txt"]
    trace = json.loads((run / "profile/step_3-4_rank_0.json").read_text())
    names = [event["name"] for event in trace["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2  # one a step
    assert any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])
    table = (run / "profile/step_3-4_rank_0.txt").read_text()
    assert "aten::addmm" in table
    assert "Self CPU" in table


@pytest.mark.slow
def test_a_window_of_which_every_part_is_asked_for_is_recorded_after_a_resume_too(
    write_toml: Callable[..., Path],
) -> None:
    flags = [f"{WINDOW}{name}=true" for name in ("profile_memory", "with_stack", "with_modules")]
    config = write_toml()
    run = train(config, "--train.ckpt.save_freq=3")
    train(config, ON, *flags, f"{WINDOW}wait_steps=0", "--train.max_num_steps=6", resume=(run, 3))
    assert (run / "profile/step_5-5_rank_0.json").is_file()
    assert "CPU Mem" in (run / "profile/step_5-5_rank_0.txt").read_text()


@pytest.mark.slow
def test_a_hundred_waiting_threads_do_not_end_the_run(write_toml: Callable[..., Path]) -> None:
    """torch nests the frames of all threads and then walks them by recursion: a thousand are too deep for Python."""
    end = threading.Event()

    def wait(depth: int) -> None:
        if depth:
            wait(depth - 1)
        else:
            end.wait()

    threads = [threading.Thread(target=wait, args=(20,)) for _ in range(100)]
    for thread in threads:
        thread.start()
    limit = sys.getrecursionlimit()
    try:
        run = train(write_toml(), ON, f"{WINDOW}with_stack=true", f"{WINDOW}wait_steps=0", "--train.max_num_steps=3")
    finally:
        end.set()
    assert "Self CPU" in (run / "profile/step_2-2_rank_0.txt").read_text()
    assert sys.getrecursionlimit() == limit
    for thread in threads:
        thread.join()


def test_a_run_that_ends_before_the_window_says_so(
    write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(write_toml(), ON, f"{WINDOW}wait_steps=6", "--train.max_num_steps=2")
    assert "nothing recorded, the run ended before step 8" in capsys.readouterr().out
    assert not (run / "profile").exists()


def test_only_the_ranks_of_the_filter_record(tmp_path: Path) -> None:
    from cosmos_rl.policy.trainer.profiling import record_profile

    for ranks, recording in (((), {0}), ((1, 2), {1, 2})):
        config = ProfilerConfig.model_validate({"sub_profiler_config": {"rank_filter": ranks}})
        folder = tmp_path / str(len(ranks))
        for rank in range(4):
            with record_profile(config, folder, Context(torch.device("cpu"), rank, 4), 0) as end_of_step:
                for _ in range(3):
                    end_of_step()
        assert {int(p.stem.rpartition("_")[2]) for p in folder.glob("*.json")} == recording


def test_nothing_is_imported_or_written_when_it_is_off(write_toml: Callable[..., Path]) -> None:
    name = "cosmos_rl.policy.trainer.profiling"
    with patch.dict(sys.modules):
        sys.modules.pop(name, None)
        run = train(write_toml(), "--train.max_num_steps=1")
        assert name not in sys.modules
    assert not (run / "profile").exists()
