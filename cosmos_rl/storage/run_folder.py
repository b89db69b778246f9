"""The folder of one run: `<output_dir>/<timestamp>/`, and the links that lead to the newest one.

Runs are ordered by the time at which a command last began to work on them, in UTC, as `run.json` holds it; a clock that
was set back does not count (`find_free_timestamp`).
"""

import contextlib
import datetime
import fcntl
import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.storage.atomic import replace_link, write_text

_TIMESTAMP = "%Y%m%d%H%M%S"
_LINKED = ("checkpoints", "safetensors")


@dataclass(frozen=True)
class RunFolder:
    """Where everything of one run is."""

    root: Path

    @property
    def name(self) -> str:
        """The start time as YYYYmmddHHMMSS in UTC; names the run in trackers too."""
        return self.root.name

    @property
    def checkpoints(self) -> Path:
        """Folder of `step_<N>/policy/`, from which the run can be resumed."""
        return self.root / "checkpoints"

    @property
    def safetensors(self) -> Path:
        """Folder of `step_<N>/`, the exported models."""
        return self.root / "safetensors"

    @property
    def media(self) -> Path:
        """Galleries: `validation/step_<N>/`, `rollout/step_<N>/`."""
        return self.root / "media"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, one line a step."""
        return self.root / "metrics.jsonl"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.toml"

    @property
    def run_json(self) -> Path:
        """How the run was started: command, versions, commit, time."""
        return self.root / "run.json"

    @property
    def ended(self) -> Path:
        """How the newest command on the run ended: exit code and reason; absent while it works."""
        return self.root / "ended.json"

    @property
    def report(self) -> Path:
        """The page that shows what the run did."""
        return self.root / "report.html"

    @property
    def next(self) -> Path:
        """Folder of the `config.toml` and `run.json` of a command that has not begun to train yet."""
        return self.root / ".next"

    @property
    def has_begun(self) -> bool:
        """Whether any command has trained here."""
        return self.checkpoints.is_dir()


def claim_run(output_dir: Path, timestamp: str = "") -> RunFolder:
    """Make an empty run folder, named by `timestamp` or by now. It counts as a run once it has begun.

    Raises:
        UserError: the named folder exists, or real folders stand where the links belong.
    """
    output_dir = Path(output_dir).expanduser().absolute()
    check_links(output_dir)
    return RunFolder(_claim(output_dir, timestamp))


def begin_run(run: RunFolder) -> None:
    """Training starts now: the command's description takes its place and the links of the output folder lead here.

    Until then a command leaves a run as it was: one that is refused late, by its data or its checkpoint, harms nothing.
    """
    for target in (run.config, run.run_json):
        waiting = run.next / target.name
        if waiting.is_file():
            write_text(target, waiting.read_text(encoding="utf-8"))
    run.ended.unlink(missing_ok=True)
    point_links(run)


def record_end(run: RunFolder, code: int, reason: str) -> None:
    """The command that waits in `.next` ends with this exit code; one that has not begun leaves the run as it was."""
    files = (run.run_json, run.next / run.run_json.name)
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    if len(texts) == 2 and texts[0] == texts[1]:
        write_text(run.ended, json.dumps({"code": code, "reason": reason}) + "\n")


def is_worked_on(run: RunFolder) -> bool | None:
    """Whether the process that last worked on the run is alive; None: there was none, or it is on another machine."""
    try:
        host = json.loads(run.run_json.read_text(encoding="utf-8"))["host"]
        pid = int((run.root / ".lock").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if host != platform.node():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def create_run(output_dir: Path, timestamp: str = "") -> RunFolder:
    """A new run folder that has begun. Raises `UserError` as `claim` does."""
    run = claim_run(output_dir, timestamp)
    begin_run(run)
    return run


def find_free_timestamp(output_dir: Path) -> datetime.datetime:
    """Now in UTC; where the clock was set back, the second after the newest run began."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    found = find_newest_run(output_dir)
    if found is None:
        return now
    return max(now, _read_start(found)[0] + datetime.timedelta(seconds=1))


def find_newest_run(output_dir: Path) -> RunFolder | None:
    """The run that was started last, or None."""
    found = list_runs(output_dir)
    if not found:
        return None
    return found[-1]


def find_run(path: Path) -> RunFolder:
    """The run whose folder `path` is, else the newest run of the output folder `path`.

    Raises:
        UserError: there is neither.
    """
    path = Path(path).expanduser().absolute()
    here = RunFolder(path)
    if here.config.is_file() or here.metrics.is_file() or here.next.is_dir():
        return here
    run = find_newest_run(path)
    if run is None:
        holds = "is a file" if path.is_file() else "does not exist"
        if path.is_dir():
            holds = "holds no run"
        raise UserError(
            f"{path} {holds}: give <output_dir>/<timestamp>, or <output_dir> for its newest run (looked for "
            "config.toml, for metrics.jsonl, and for folders <timestamp> with checkpoints)"
        )
    return run


def list_runs(output_dir: Path) -> list[RunFolder]:
    """All runs of `output_dir` that have begun, the newest last. Folders with other names are not ours."""
    output_dir = Path(output_dir).expanduser().absolute()
    if not output_dir.is_dir():
        return []
    folders = (entry for entry in output_dir.iterdir() if re.fullmatch(r"\d{14}", entry.name) and entry.is_dir())
    return sorted((run for run in map(RunFolder, folders) if run.has_begun), key=_read_start)


def _read_start(run: RunFolder) -> tuple[datetime.datetime, str]:
    """When a command last began to work on the run; its name where that is not recorded, and for a tie."""
    try:
        moment = datetime.datetime.fromisoformat(json.loads(run.run_json.read_text(encoding="utf-8"))["started"])
        return moment.astimezone(datetime.UTC), run.name
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        return datetime.datetime.strptime(run.name, _TIMESTAMP).replace(tzinfo=datetime.UTC), run.name
    except ValueError:  # fourteen digits that are no time
        return datetime.datetime.min.replace(tzinfo=datetime.UTC), run.name


def point_links(run: RunFolder) -> None:
    """Make `<output_dir>/checkpoints` and `<output_dir>/safetensors` lead to `run`."""
    output_dir = run.root.parent
    check_links(output_dir)
    for name in _LINKED:
        (run.root / name).mkdir(parents=True, exist_ok=True)
        replace_link(output_dir / name, run.root / name)


@contextlib.contextmanager
def lock_run(run: RunFolder) -> Iterator[None]:
    """Within the block no other command on this machine writes to `run`; the end of the process frees it too.

    Raises:
        UserError: another process is at it.
    """
    lock = os.open(run.root / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 20).decode() or "unknown"
            raise UserError(f"{run.root} is being written by process {owner}: stop it or wait for its end") from None
        except OSError:
            pass  # a file system without locks
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def claim_folder_by_time(parent: Path, pattern: str) -> Path:
    """Make a new folder in `parent` named by now in UTC; when that is taken, by the next second that is free."""
    moment = find_free_timestamp(parent)
    while True:
        folder = parent / moment.strftime(pattern)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            moment += datetime.timedelta(seconds=1)


def _claim(output_dir: Path, timestamp: str) -> Path:
    try:
        if not timestamp:
            return claim_folder_by_time(output_dir, _TIMESTAMP)
        folder = output_dir / timestamp
        folder.mkdir(parents=True)
        return folder
    except FileExistsError as error:
        if timestamp and (output_dir / timestamp).is_dir():
            raise UserError(
                f"{output_dir / timestamp} exists: leave train.timestamp out for a new run, or continue that run with "
                "--train.resume=true"
            ) from None
        raise UserError(f"{error.filename}: is a file, a folder is needed; choose another train.output_dir") from None
    except OSError as error:
        raise UserError(f"{output_dir}: the run folder cannot be made: {error.strerror}") from None


def check_links(output_dir: Path, run: RunFolder | None = None) -> None:
    """Raise `UserError` that names everything which stands where links of the output folder and of `run` belong."""
    links = [output_dir / name for name in _LINKED]
    if run is not None:
        links.append(run.root / "best")
    real = [str(link) for link in links if link.exists() and not link.is_symlink()]
    if len(real) == 1:
        raise UserError(
            f"{real[0]} is a real folder, but a link of the run belongs there; move it away or choose another "
            "train.output_dir"
        )
    if real:
        raise UserError(
            "these are real folders, but links of the run belong there, as after a copy that has followed them; remove "
            "or move them all, or choose another train.output_dir:\n  " + "\n  ".join(real)
        )
