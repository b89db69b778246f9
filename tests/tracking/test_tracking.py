"""The trackers of a run: their place, their interval, and that none of them can end a training run."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.storage.run_folder import RunFolder
from cosmos_rl.tracking import loggers
from cosmos_rl.tracking.loggers import Guarded, require_installed
from cosmos_rl.tracking.metrics import MetricsFile, read_metrics
from cosmos_rl.tracking.tracked_run import TrackedRun
from tests.support import patience
from tests.support.paths import ROOT
from tests.support.trainer_runs import train

VALIDATION = '[validation]\nenable = true\nfreq = 2\ndataset.local_dir = "{}"'


def without_keys(home: Path) -> dict[str, str]:
    """An environment in which wandb finds no key."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_"))}
    return {**kept, "HOME": str(home), "NETRC": str(home / "none"), "PYTHONPATH": str(ROOT)}


def in_a_process(code: str, *arguments: object, **environment: str) -> str:
    """Run ``code`` with standard input closed; what it printed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = patience.run(["sh", "-c", 'exec "$@" <&-', "sh", *command], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


TRAIN = """
import sys
from pathlib import Path
from tests.support.trainer_runs import train
config, chosen, steps, *resume = sys.argv[1:]
options = [f"--logging.logger={chosen}", f"--train.max_num_steps={steps}", "--train.ckpt.save_freq=4"]
print("RUN", train(Path(config), *options, resume=(Path(resume[0]), int(resume[1])) if resume else None))
"""


def run_of(printed: str) -> Path:
    return Path(next(line.split()[1] for line in printed.splitlines() if line.startswith("RUN ")))


@pytest.mark.process
def test_wandb_without_a_key_goes_offline_with_one_warning_and_resumes_to_the_same_id(
    write_toml: Callable[..., Path], image_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    config, environment = write_toml(VALIDATION.format(image_folder)), without_keys(tmp_path)
    chosen = '["console","wandb"]'
    first = in_a_process(TRAIN, config, chosen, 4, **environment)
    run = run_of(first)
    assert first.count("WARNING") == 1
    assert f"wandb: no API key found; recording offline under {run / 'wandb'}" in first
    second = in_a_process(TRAIN, config, chosen, 8, run, 4, **environment)
    assert second.count("WARNING") == 1
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7, 8]
    names = [p.name for p in (run / "wandb").glob("offline-run-*")]
    assert len(names) == 2
    assert {name.rpartition("-")[2] for name in names} == {run.name}


def test_a_wandb_server_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")
    from cosmos_rl.tracking.wandb_logger import WandbLogger

    modes: list[str | None] = []

    def init(*, mode: str | None, **others: object) -> object:
        modes.append(mode)
        if mode != "offline":
            raise wandb.errors.CommError("server is away")
        return object()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    WandbLogger(TrackedRun(tmp_path, "p", None, "n", "20260101000000", {}))
    assert modes == [None, "offline"]
    assert "wandb: server is away; recording offline" in capsys.readouterr().out


def test_a_key_of_wandb_login_is_used_and_project_and_run_are_named_as_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: started.append(arguments))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    config = Config.from_dict({"logging": {"logger": ["wandb"], "project_name": "digits"}})
    run = RunFolder(tmp_path / "20250515101157")
    loggers.start_loggers(config, run, 0)
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {'x' * 40}\n")
    loggers.start_loggers(config, run, 0)
    assert [(one["project"], one["id"]) for one in started] == [("digits", "20250515101157")] * 2
    assert [one["mode"] for one in started] == ["offline", None]  # None: wandb's own choice, which is its server


@pytest.mark.slow
def test_tensorboard_holds_numbers_and_images_and_hides_what_an_interrupted_attempt_logged(
    write_toml: Callable[..., Path], image_folder: Path
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = write_toml(VALIDATION.format(image_folder))
    options = ('--logging.logger=["tensorboard"]', "--train.ckpt.save_freq=2")
    run = train(config, *options, "--train.max_num_steps=4")
    train(config, *options, "--train.max_num_steps=6", resume=(run, 2))
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0}).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss_mean")]
    lines = read_metrics(run / "metrics.jsonl")
    assert shown == [(line["step"], pytest.approx(line["train/loss_mean"])) for line in lines]
    assert [event.step for event in events.Scalars("val/loss_mean")] == [2, 4, 6]
    images = [tag for tag in events.Tags()["images"] if tag.startswith("val/images/000_a-photo")]
    assert [event.step for event in events.Images(images[0])] == [2, 4, 6]


@pytest.mark.process
def test_trackio_writes_into_the_run_folder_and_asks_no_server(
    write_toml: Callable[..., Path], image_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("trackio")
    blocked = (
        "import socket\n"
        "def refuse(*address, **others):\n"
        "    print('network:', address)\n"
        "    raise OSError('no network here')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
    )
    config = write_toml(VALIDATION.format(image_folder))
    environment = {**without_keys(tmp_path / "home"), "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
    environment |= {"TRACKIO_SPACE_ID": "someone/space", "TRACKIO_SERVER_URL": "http://127.0.0.1:9"}
    printed = in_a_process(blocked + TRAIN, config, '["trackio"]', 4, **environment)
    run = run_of(printed)
    assert "network:" not in printed
    look = (
        "import json, sys, trackio; run = trackio.Api().runs('cosmos_rl')[0];"
        "from trackio.sqlite_storage import SQLiteStorage as S;"
        "print('LOGS', json.dumps([run.name, S.get_logs('cosmos_rl', run.name)]))"
    )
    found = in_a_process(look, **{**environment, "TRACKIO_DIR": str(run / "trackio")})
    name, logs = json.loads(next(x for x in found.splitlines() if x.startswith("LOGS "))[5:])
    assert name == run.name
    losses = [line["train/loss_mean"] for line in read_metrics(run / "metrics.jsonl")]
    assert [line["train/loss_mean"] for line in logs if "train/loss_mean" in line] == losses
    assert len(list((run / "trackio/media").rglob("*.png"))) == 8  # four prompts, two validations
    others = {"onnxruntime.db"}  # of a library that diffusers imports where it is installed
    assert [path for path in (tmp_path / "home").rglob("*.db") if path.name not in others] == []


def test_a_project_name_that_trackio_reserves_is_refused(
    write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", "")  # put back at the end
    with pytest.raises(UserError, match="logging.project_name: .*registry-x"):
        train(write_toml(), '--logging.logger=["trackio"]', "--logging.project_name=registry-x")


def test_a_tracker_that_is_not_installed_is_named_with_the_command_before_training(
    write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = loggers.importlib.util.find_spec
    monkeypatch.setattr(
        loggers.importlib.util, "find_spec", lambda name: None if name in ("wandb", "trackio") else find(name)
    )
    require_installed(["console", "tensorboard"])
    config = write_toml()
    with pytest.raises(
        UserError, match=r'"wandb", "trackio", not installed here: pip install "cosmos_rl\[wandb,trackio'
    ):
        train(config, '--logging.logger=["console", "wandb", "trackio"]')
    assert list((config.parent / "out").glob("*/metrics.jsonl")) == []


class Recorder:
    """A tracker that keeps what it is shown, or fails at all of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[Any] = []
        self.error = error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._see(step)

    def log_images(self, step: int, key: str, files: Sequence[Path], captions: Sequence[str]) -> None:
        self._see((step, key, len(files), len(captions)))

    def finish(self) -> None:
        self._see("finish")

    def _see(self, what: Any) -> None:
        self.seen.append(what)
        if self.error is not None:
            raise self.error


def test_a_tracker_that_fails_warns_once_and_is_still_called(
    write_toml: Callable[..., Path],
    image_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing, healthy = Recorder(ConnectionError("the server is away")), Recorder()
    monkeypatch.setattr(
        "cosmos_rl.policy.trainer.loop.start_loggers", lambda *args: [Guarded("remote", failing), healthy]
    )
    run = train(write_toml(VALIDATION.format(image_folder)), "--train.max_num_steps=3")
    images = [(step, "val/images", 4, 4) for step in (2, 3)]
    assert healthy.seen == failing.seen == [1, images[0], 2, images[1], 3, "finish"]
    printed = capsys.readouterr().out
    assert printed.count("WARNING") == 1
    assert "remote failed at step 1: ConnectionError('the server is away')" in printed
    assert len(read_metrics(run / "metrics.jsonl")) == 3


def test_an_error_of_the_metrics_file_ends_the_run_and_the_trackers(
    write_toml: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blocking(Recorder):
        """Puts a folder in the place of the metrics file after the first step."""

        def log(self, step: int, metrics: Mapping[str, Any]) -> None:
            super().log(step, metrics)
            (file,) = (tmp_path / "out").glob("2*/metrics.jsonl")
            file.unlink()
            file.mkdir()

    tracker = Blocking()
    monkeypatch.setattr("cosmos_rl.policy.trainer.loop.start_loggers", lambda *args: [tracker])
    with pytest.raises(IsADirectoryError):
        train(write_toml())
    assert tracker.seen == [1, "finish"]


def test_the_console_shows_the_first_the_last_and_every_nth_step_and_the_file_all(
    write_toml: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(*options: str) -> list[str]:
        capsys.readouterr()
        run = train(write_toml(), "--train.max_num_steps=8", *options)
        assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(range(1, 9))
        shown = [x for x in capsys.readouterr().out.splitlines() if "Step: " in x and "Loss: " in x]
        return [x.partition("Step: ")[2].partition(",")[0] for x in shown]

    assert lines("--logging.log_interval=3") == ["1/8", "3/8", "6/8", "8/8"]
    assert lines("--logging.log_interval=3", "--logging.logger=[]") == []


def test_a_rewind_of_a_long_file_reads_from_its_end_and_keeps_what_a_reader_of_all_lines_would(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "note": "x" * (step % 977)}) for step in range(400)]  # several blocks
    for step, end in ((-1, "\n"), (0, "\n"), (250, "\n"), (398, '\n{"step": 400, "lo'), (399, "")):
        path.write_text("\n".join(lines) + end)
        MetricsFile(path).rewind(step)
        assert path.read_text() == "".join(f"{line}\n" for line in lines[: step + 1])
    path.write_text('{"step": 1, "los')
    MetricsFile(path).rewind(5)
    assert path.read_text() == ""
