"""Disks that lack operations or are full, run folders that were copied, and clocks that were set back."""

import datetime
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import cosmos_rl.storage.run_folder as run_folder
from cosmos_rl.checkpoint.layout import COMMIT_MARKER, build_marker_text, list_whole_steps, policy_dir
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.cli import main
from cosmos_rl.launcher.prepare import prepare_run
from cosmos_rl.launcher.resume import plan_resume
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.storage.disk import DiskFullError, explain_full_disk, find_missing_abilities, report_full_disk
from cosmos_rl.storage.run_folder import RunFolder, begin_run, check_links, create_run, find_newest_run
from cosmos_rl.tracking.metrics import read_metrics
from tests.support.trainer_runs import train

Toml = Callable[..., Path]


@pytest.fixture
def bare_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders can be made, read, renamed to new names and removed. Everything else is refused."""

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), name)

        return refused

    replace, fsync = os.replace, os.fsync

    def to_a_new_name(source: Any, target: Any, **given: Any) -> None:
        if os.path.lexists(target):
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        replace(source, target, **given)

    def of_files(opened: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(opened)

    for name in ("symlink", "link", "chmod"):
        monkeypatch.setattr(os, name, refuse(name))
    monkeypatch.setattr(os, "replace", to_a_new_name)
    monkeypatch.setattr(os, "fsync", of_files)
    monkeypatch.setattr(fcntl, "flock", refuse("flock"))


@pytest.mark.slow
@pytest.mark.usefixtures("bare_disk")
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_run_on_a_bare_disk_trains_saves_and_resumes(write_toml: Toml, lora: bool) -> None:
    config = write_toml("[validation]\nenable = true\nfreq = 2\n", lora=lora)
    options = ["--train.ckpt.save_freq=2", "--train.ckpt.max_keep=1", "--train.train_policy.dataset.test_size=4"]
    run = train(config, *options, "--train.max_num_steps=4")
    assert find_newest_run(run.parent) == RunFolder(run)
    again = train(config, *options, "--train.max_num_steps=6", resume=(run, 4))
    assert again == run
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    validated = [line for line in read_metrics(run / "metrics.jsonl") if "val/loss_mean" in line]
    best = min(validated, key=lambda line: line["val/loss_mean"])["step"]
    assert list_whole_steps(run / "checkpoints") == sorted({best, 6})  # known without a link
    assert not [path for path in run.rglob("*") if path.is_symlink()]


@pytest.mark.usefixtures("bare_disk")
def test_what_a_disk_lacks_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config.from_dict({"train": {"output_dir": str(tmp_path / "out")}})
    with caplog.at_level("WARNING", logger="cosmos"), prepare_run(config, ["cosmos-rl"], own_data=False) as run:
        begin_run(run)
    (warning,) = caplog.messages
    for text in ("no symbolic links", "no hard links", "no locks", "no fsync of folders"):
        assert text in warning
    assert run.config.is_file()


def test_a_usual_disk_lacks_nothing(tmp_path: Path) -> None:
    assert find_missing_abilities(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rename", "mkdir"])
def test_a_disk_that_cannot_hold_a_run_is_refused_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write_toml: Toml, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = getattr(os, name)

    def refused(path: Any, *rest: Any, **given: Any) -> None:
        if ".cosmos-rl-" in str(path) or (name == "mkdir" and str(path).startswith(str(tmp_path / "out"))):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(path))
        usual(path, *rest, **given)

    monkeypatch.setattr(os, name, refused)
    config = load_config(write_toml())
    with (
        pytest.raises(UserError, match="Operation not supported") as caught,
        prepare_run(config, ["cosmos-rl"], own_data=False),
    ):
        pass
    assert str(tmp_path / "out") in str(caught.value)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []
    if name == "rename":
        assert main(["check", "--env", "--config", str(tmp_path / "config.toml")]) == 2
        assert "this disk cannot hold a run" in capsys.readouterr().err


# ---- a full disk ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Sets the largest size of a file, as a quota would."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_checkpoint_that_does_not_fit_says_so(tmp_path: Path, small_files: Callable[[int], None]) -> None:
    small_files(20_000)
    with (
        pytest.raises(DiskFullError, match="File too large|No space left on device") as caught,
        report_full_disk(tmp_path),
    ):
        dcp.save({"a": torch.zeros(100_000)}, checkpoint_id=tmp_path / "step", no_dist=True)
    assert str(tmp_path) in str(caught.value)
    assert "--train.resume=true" in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_on_a_full_disk_names_the_folder_and_keeps_what_was_whole(
    write_toml: Toml, tmp_path: Path, small_files: Callable[[int], None], mode: str
) -> None:
    config = write_toml(lora=False)
    options = [f"--train.ckpt.save_mode={mode}", "--train.ckpt.export_safetensors=false", "--train.ckpt.save_freq=1"]

    def fill(_metrics: dict[str, Any], step: int) -> None:
        if step == 2:
            small_files(20_000)

    with pytest.raises(DiskFullError, match="File too large|No space left on device") as caught:
        train(config, *options, custom_logger_fns=[fill])
    (run,) = (tmp_path / "out").glob("2*")
    assert str(run / "checkpoints" / "step_") in str(caught.value)
    assert list_whole_steps(run / "checkpoints") == [1] or mode == "async"  # step 1 may still be written then


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "No space left on device"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
            "No space left on device (torch: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598)",
        ),
        (ValueError("something else"), None),
        (OSError(errno.EIO, "Input/output error"), None),
    ],
)
def test_the_many_words_for_a_full_disk(error: Exception, reason: str | None) -> None:
    assert explain_full_disk(error) == reason
    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = error
    assert explain_full_disk(wrapped) == reason


# ---- copies --------------------------------------------------------------------------------------------------------


def saved_run(output: Path) -> RunFolder:
    run = create_run(output, "20250101000000")
    policy = policy_dir(run.checkpoints, 3)
    policy.mkdir(parents=True)
    (policy / COMMIT_MARKER).write_text(build_marker_text(policy))
    os.symlink("checkpoints/step_3", run.root / "best")
    return run


def test_a_copy_that_has_followed_the_links_names_all_that_must_go_before_anything_is_loaded(tmp_path: Path) -> None:
    saved_run(tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "copy", symlinks=False)
    config = Config.from_dict({"train": {"output_dir": str(tmp_path / "copy"), "resume": True}})
    with pytest.raises(UserError) as caught, prepare_run(config, ["cosmos-rl"], own_data=False):
        pass
    (run,) = (tmp_path / "copy").glob("2*")
    real = [tmp_path / "copy" / "checkpoints", tmp_path / "copy" / "safetensors", run / "best"]
    assert str(caught.value).splitlines()[1:] == [f"  {path}" for path in real]
    for path in real:
        shutil.rmtree(path)
    with prepare_run(config, ["cosmos-rl"], own_data=False) as again:
        assert again == RunFolder(run)


def test_a_run_in_a_moved_output_folder_continues(tmp_path: Path) -> None:
    saved_run(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    config = Config.from_dict({"train": {"output_dir": str(tmp_path / "elsewhere"), "resume": True}})
    with prepare_run(config, ["cosmos-rl"], own_data=False) as run:
        begin_run(run)
        check_links(tmp_path / "elsewhere", run)
    assert (tmp_path / "elsewhere" / "checkpoints" / "step_3" / "policy").is_dir()


# ---- clocks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    class Clock(datetime.datetime):
        moment = datetime.datetime(2026, 11, 28, tzinfo=datetime.UTC)

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return cls.moment.astimezone(tz)

    monkeypatch.setattr(run_folder.datetime, "datetime", Clock)
    return lambda text: setattr(Clock, "moment", datetime.datetime.fromisoformat(text))


def started(output: Path) -> RunFolder:
    config = Config.from_dict({"train": {"output_dir": str(output)}})
    with prepare_run(config, ["cosmos-rl"], own_data=False) as run:
        begin_run(run)
    return run


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2026-11-28T20:30:46+09:00", "2026-11-28T11:30:47+00:00"),  # the first on a machine in Tokyo
        ("2026-10-25T02:30:00+02:00", "2026-10-25T02:10:00+01:00"),  # the end of summer time
        ("2026-11-28T12:00:00+00:00", "2026-11-28T09:00:00+00:00"),  # the clock was set back
    ],
)
def test_the_run_that_was_started_last_is_the_newest(
    tmp_path: Path, clock: Callable[[str], None], first: str, second: str
) -> None:
    clock(first)
    old = started(tmp_path)
    clock(second)
    new = started(tmp_path)
    assert find_newest_run(tmp_path) == new
    assert (tmp_path / "checkpoints").resolve() == new.checkpoints.resolve()
    assert old.name < new.name
    plan = plan_resume(Config.from_dict({"train": {"output_dir": str(tmp_path), "resume": True}}))
    assert plan.run == new


def test_runs_are_named_in_utc(tmp_path: Path, clock: Callable[[str], None]) -> None:
    clock("2026-11-28T20:30:46+09:00")
    assert started(tmp_path).name == "20261128113046"


def test_a_run_that_was_named_in_local_time_is_ordered_by_its_record(tmp_path: Path) -> None:
    tokyo, later = create_run(tmp_path, "20261128203046"), create_run(tmp_path, "20261128113047")
    for run, moment in ((tokyo, "2026-11-28T20:30:46+09:00"), (later, "2026-11-28T11:30:47+00:00")):
        run.run_json.write_text(json.dumps({"started": moment}))
    assert find_newest_run(tmp_path) == later


def test_an_older_run_that_is_resumed_is_the_newest_by_its_links(tmp_path: Path) -> None:
    old, new = create_run(tmp_path, "20250101000000"), create_run(tmp_path, "20250102000000")
    assert find_newest_run(tmp_path) == new
    given = {"train": {"output_dir": str(tmp_path), "resume": True, "timestamp": old.name}}
    with prepare_run(Config.from_dict(given), ["cosmos-rl"], own_data=False) as run:
        begin_run(run)
    assert find_newest_run(tmp_path) == run == old
    assert (tmp_path / "checkpoints").resolve() == old.checkpoints.resolve()
